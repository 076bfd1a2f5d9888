"""Writes the conformance table into tutorials/coming_from_sglang.md, between its marks:

python -m tests.sglang_dsl.conformance.page          says whether the page is up to date
python -m tests.sglang_dsl.conformance.page --write  brings it up to date
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.sglang_dsl.conformance.surface import Row, rows

PAGE = Path(__file__).resolve().parents[3] / "tutorials" / "coming_from_sglang.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"


def table() -> str:
    """The table as Markdown, a section each."""
    lines: list[str] = []
    section = ""
    for row in rows():
        if row.section != section:
            section = row.section
            lines += ["", f"### {section}", "", "| in sglang | here | |", "|---|---|---|"]
        lines.append(_line(row))
    return "\n".join([*lines, ""])


def _line(row: Row) -> str:
    return f"| {_code(row.said)} | {row.status} | {row.note} |"


def _code(text: str) -> str:
    """Names set as code."""
    return f"`{text}`" if "`" not in text else text


def written(page: str) -> str:
    """The page with the table as it is now. Raises ValueError where a mark is missing."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page has no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main(arguments: list[str]) -> int:
    page = PAGE.read_text(encoding="utf-8")
    fresh = written(page)
    if "--write" in arguments:
        PAGE.write_text(fresh, encoding="utf-8")
        return 0
    print("up to date" if fresh == page else "stale: run it with --write")
    return int(fresh != page)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
