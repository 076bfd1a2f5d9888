"""The kernels are what Triton's compiler takes, for a GPU that need not be there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SHARED_AT_MOST = 227 << 10  # bytes of a block on an H100


def test_they_compile(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_kernels.py"))],
        capture_output=True,
        text=True,
        timeout=1200,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    made = [line.split() for line in done.stdout.splitlines()]
    assert len({name for name, _, _ in made}) == 13
    assert all(int(shared) <= SHARED_AT_MOST and cubin == "True" for _, shared, cubin in made)
