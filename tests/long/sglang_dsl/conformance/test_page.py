"""The Python of tutorials/coming_from_sglang.md runs as printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.sglang_dsl.conformance.page import PAGE

ROOT = Path(__file__).resolve().parents[4]


@pytest.mark.timeout(900)
def test_the_python_runs_as_printed(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) > 8
    file = tmp_path / "page.py"
    file.write_text("\n".join(blocks), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(file)], capture_output=True, text=True, timeout=300, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "capital(country)" in done.stdout
