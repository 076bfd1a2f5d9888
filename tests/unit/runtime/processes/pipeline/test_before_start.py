"""What a child process inherits: no key, and a way to find the package."""

from __future__ import annotations

import os
from pathlib import Path

from runtime.processes.pipeline.before_start import for_children


def test_a_child_finds_the_package_and_no_key() -> None:
    given = {"SGLANG_DSL_API_KEY": "a", "SGLANG_DSL_ADMIN_API_KEY": "b", "PYTHONPATH": "/x", "HOME": "/y"}
    found = for_children(given)
    assert found.keys() == {"PYTHONPATH", "HOME"}
    first, last = found["PYTHONPATH"].split(os.pathsep)
    assert first == "/x"
    assert (Path(last) / "runtime" / "__init__.py").exists()
    assert for_children({})["PYTHONPATH"] == last
