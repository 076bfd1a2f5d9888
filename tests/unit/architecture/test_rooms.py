"""Rooms: ARCHITECTURE.md lists the layers of both packages as import-linter's contracts do, and no room of
the language is a drawer for everything."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "sglang_dsl"
MOST = 15
FOLDERS = sorted({file.parent for file in PACKAGE.rglob("*.py")})


def layers(name: str) -> list[set[str]]:
    """Names of a contract's layers, ground first."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    [found] = [one for one in contracts["contracts"] if one["name"] == name]
    assert found["exhaustive"]
    return [set(re.findall(r"\w+", layer)) for layer in reversed(found["layers"])]


@pytest.mark.parametrize("package", ["language", "runtime"])
def test_the_page_lists_the_layers(package: str) -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    [line] = re.findall(rf"^- The {package}: (.*?)(?=\n- |\n\n)", page, re.DOTALL | re.MULTILINE)
    listed = [set(re.findall(r"\w+", layer)) for layer in line.split("<")]
    assert listed == layers(f"The {package}'s layers")


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_a_folder_of_many_files_has_rooms(folder: Path) -> None:
    assert len(list(folder.glob("*.py"))) <= MOST
