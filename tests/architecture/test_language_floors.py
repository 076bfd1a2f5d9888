"""The language's files import each other as ARCHITECTURE.md lists them: each only what stands in its own line
of the table or above it; and every file is in it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "sglang_dsl"
PAGE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
TABLE = PAGE[PAGE.index("## The language's files") : PAGE.index("**Backends.**")]
ROWS = [
    re.findall(r"`([\w./]+\.py)`", line.split("|")[1])
    for line in TABLE.splitlines()
    if line.startswith("| `")
]
FLOOR = {name: floor for floor, names in enumerate(ROWS) for name in names}


def imported(file: Path) -> set[str]:
    """Files of the package that a module loads when it is loaded itself."""
    found = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sglang_dsl":
            inner = (node.module or "").split(".")[1:]
            names = ["/".join(inner)] if inner else [alias.name for alias in node.names]
            found |= {f"{name}.py" for name in names}
    return {name for name in found if (PACKAGE / name).is_file()}


def test_every_file_is_listed_once() -> None:
    files = {file.name for file in PACKAGE.glob("*.py") if file.name != "__init__.py"}
    listed = [name for names in ROWS for name in names]
    assert len(listed) == len(set(listed))
    assert files == {name for name in listed if "/" not in name}


@pytest.mark.parametrize("name", FLOOR)
def test_a_file_imports_nothing_above_its_floor(name: str) -> None:
    higher = {other for other in imported(PACKAGE / name) if FLOOR.get(other, 0) > FLOOR[name]}
    assert higher == set()
