"""process/docs/test_integrations_tutorial.py, at length."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.docs.test_integrations_tutorial import FIRST, LIGHT, ROOT, SECTIONS
from tests.process.patience import PROGRAM_S


def python_of(*sections: str) -> str:
    return "\n".join(
        code for name in sections for code in re.findall(r"```python\n(.*?)```", SECTIONS[name], re.DOTALL)
    )


def run(code: str, folder: Path) -> None:
    file = folder / "page.py"
    file.write_text(f"{code}\nengine.close()\n", encoding="utf-8")
    environment = {**os.environ, "DSPY_CACHEDIR": str(folder), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-P", str(file)], capture_output=True, text=True, timeout=PROGRAM_S, cwd=folder,
        check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_the_python_runs_as_printed(tmp_path: Path) -> None:
    for package in ("outlines", "pandas", "datasets", "langchain_core"):
        pytest.importorskip(package, reason=f"{package} is not installed (the extra `dev`)")
    run(python_of(FIRST, *LIGHT), tmp_path)


def test_dspys_python_runs_as_printed(tmp_path: Path) -> None:
    pytest.importorskip("dspy", reason="dspy is not installed (the extra `dspy`)")
    run(python_of(FIRST, "DSPy"), tmp_path)
