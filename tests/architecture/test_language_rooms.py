"""The language's rooms: ARCHITECTURE.md lists them in the order of import-linter's contract, and none is a
drawer for everything."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "sglang_dsl"
MOST = 15
FOLDERS = sorted({file.parent for file in PACKAGE.rglob("*.py")})


def layers() -> list[set[str]]:
    """Names of the contract's layers, ground first."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    [found] = [one for one in contracts["contracts"] if one["name"] == "The language's layers"]
    assert found["exhaustive"]
    return [set(re.findall(r"\w+", layer)) for layer in reversed(found["layers"])]


def test_the_page_lists_every_room_ground_first() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    table = page[page.index("## The language's rooms") : page.index("**Backends.**")]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    listed = [name for row in rows for name in re.findall(r"`(\w+)(?:\.py|/)`", row)]
    floor = {name: index for index, names in enumerate(layers()) for name in names}
    assert sorted(listed) == sorted(floor)
    assert [floor[name] for name in listed] == sorted(floor.values())


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_a_folder_of_many_files_has_rooms(folder: Path) -> None:
    assert len(list(folder.glob("*.py"))) <= MOST
