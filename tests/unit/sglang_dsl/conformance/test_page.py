"""tutorials/coming_from_sglang.md: its tables are those of the text files, and
each defect that it lists has a test by its number."""

from __future__ import annotations

import re
from pathlib import Path

from tests.unit.sglang_dsl.conformance.page import PAGE, written

HERE = Path(__file__).parent


def test_the_tables_are_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert written(page) == page, "run: python -m tests.unit.sglang_dsl.conformance.page --write"


def test_every_defect_has_a_line_and_a_test() -> None:
    numbers = [f"{number:02}" for number in range(1, 53)]
    listed = re.findall(r"^\| W(\d+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert [f"{int(number):02}" for number in listed] == numbers
    tests = "".join(file.read_text(encoding="utf-8") for file in HERE.glob("test_w*.py"))
    assert sorted(set(re.findall(r"^def test_w(\d\d)_", tests, re.MULTILINE))) == numbers
