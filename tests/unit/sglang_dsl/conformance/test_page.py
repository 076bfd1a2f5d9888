"""tutorials/coming_from_sglang.md: its Python runs as printed, its tables are those of the text files, and
each defect that it lists has a test by its number."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.sglang_dsl.conformance.page import PAGE, written

HERE = Path(__file__).parent
ROOT = HERE.parents[3]


def test_the_tables_are_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert written(page) == page, "run: python -m tests.unit.sglang_dsl.conformance.page --write"


def test_every_defect_has_a_line_and_a_test() -> None:
    numbers = [f"{number:02}" for number in range(1, 53)]
    listed = re.findall(r"^\| W(\d+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert [f"{int(number):02}" for number in listed] == numbers
    tests = "".join(file.read_text(encoding="utf-8") for file in HERE.glob("test_w*.py"))
    assert sorted(set(re.findall(r"^def test_w(\d\d)_", tests, re.MULTILINE))) == numbers


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
