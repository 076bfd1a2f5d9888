"""The page about other libraries: its Python runs as printed, each library's in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_dsl import integrations
from sglang_dsl.integrations import pytest_plugin
from tests.process.patience import PROGRAM_S

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "tutorials" / "integrations.md").read_text(encoding="utf-8")
SECTIONS = {part.partition("\n")[0].strip(): part for part in PAGE.split("\n## ")}
FIRST, LIGHT = "# Other libraries", ("Types of outlines", "Rows of pandas and datasets", "LangChain")
HEAVY = ("LlamaIndex", "lm-evaluation-harness")
"""Executed with the other clients that have packages of their own."""


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


@pytest.mark.slow
def test_the_python_runs_as_printed(tmp_path: Path) -> None:
    for package in ("outlines", "pandas", "datasets", "langchain_core"):
        pytest.importorskip(package, reason=f"{package} is not installed (the extra `dev`)")
    run(python_of(FIRST, *LIGHT), tmp_path)


@pytest.mark.slow
def test_dspys_python_runs_as_printed(tmp_path: Path) -> None:
    pytest.importorskip("dspy", reason="dspy is not installed (the extra `dspy`)")
    run(python_of(FIRST, "DSPy"), tmp_path)


def test_every_part_is_on_the_page() -> None:
    assert set(SECTIONS) == {FIRST, *LIGHT, *HEAVY, "DSPy", "pytest"}
    for name in integrations._LATE.names():
        assert f"`{name}" in PAGE
    for name in ("sgl_mock", "sgl_recorded", "sgl_record_backend"):
        assert f"def {name}(" in Path(pytest_plugin.__file__).read_text(encoding="utf-8")
        assert f"`{name}`" in PAGE
