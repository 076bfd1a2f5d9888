"""Writes the two tables of tutorials/coming_from_sglang.md, between their marks: the defects (defects.txt,
and on what their tests run) and the public names (surface.txt).

    python -m tests.unit.sglang_dsl.conformance.page          says whether the page is up to date
    python -m tests.unit.sglang_dsl.conformance.page --write  brings it up to date
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

from tests.unit.sglang_dsl.conformance.surface import Row, rows

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[3] / "tutorials" / "coming_from_sglang.md"
FIXTURES = {"backend": ("mock", "model"), "pocket": ("model",), "api": ("socket",)}
"""What a test that takes this fixture runs on."""


def tested() -> dict[int, tuple[str, ...]]:
    """Number -> on what its tests run, read off their parameters."""
    found: dict[int, set[str]] = {}
    for file in sorted(HERE.glob("test_w*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and (number := re.match(r"test_w(\d\d)_", node.name)):
                taken = [FIXTURES.get(one.arg, ()) for one in node.args.args]
                found.setdefault(int(number[1]), set()).update(*taken)
    return {
        number: tuple(one for one in ("mock", "model", "socket") if one in on) for number, on in found.items()
    }


def defects() -> str:
    """The table of the defects as Markdown. Raises KeyError where one has no test."""
    on = tested()
    lines = ["| | in sglang | here | tested on |", "|---|---|---|---|"]
    for line in (HERE / "defects.txt").read_text(encoding="utf-8").splitlines():
        if not line.startswith(";"):
            name, there, here = (part.strip() for part in line.split("|"))
            lines.append(f"| {name} | {there} | {here} | {', '.join(on[int(name[1:])])} |")
    return "\n".join(lines)


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
    """The page with its tables as they are now. Raises ValueError where a mark is missing."""
    for name, made in (("defects", defects()), ("table", table())):
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, found, rest = page.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise ValueError(f"the page has no {begin} ... {end}")
        page = f"{before}{begin}\n{made}\n{end}{after}"
    return page


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
