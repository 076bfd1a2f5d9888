"""The documentation's pages: their Python runs and prints what it shows, those made from the code are as the
code is, every public name has an example, and the site is built without a warning."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sglang_dsl as sgl
from runtime.api import Engine
from tests.process.docs.pages import BLOCK, printed

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "tutorials"
PAGES = [
    "index.md",
    "quickstart.md",
    "notebooks.md",
    *sorted(
        str(page.relative_to(DOCS))
        for page in (DOCS / "concepts").glob("*.md")
        if page.stem not in ("request", "glossary")  # which show no program
    ),
    "reference/language.md",
    "reference/engine.md",
]
LANGUAGE = (DOCS / "reference" / "language.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine("pocket") as engine:
        yield engine


@pytest.mark.parametrize("name", PAGES)
def test_the_python_of_a_page_prints_what_it_shows(name: str, engine: Engine, tmp_path: Path) -> None:
    page = (DOCS / name).read_text(encoding="utf-8")
    shown = [text for _, text in BLOCK.findall(page)]
    assert printed(page, engine, tmp_path) == shown


def test_pages_made_from_the_code_are_as_the_code_is() -> None:
    """`make docs` makes them anew."""
    done = subprocess.run(
        [sys.executable, ".ci/docs.py", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_public_name_has_a_heading_and_an_example_that_runs() -> None:
    code = "".join(block for block, _ in BLOCK.findall(LANGUAGE))
    headings = set(re.findall(r"^(?:::: \S+\.|### `)(\w+)`?$", LANGUAGE, re.MULTILINE))
    assert set(sgl.__all__) - headings == set()
    assert [name for name in sgl.__all__ if not re.search(rf"\bsgl\.{name}\b", code)] == []


def built_site(folder: Path) -> Path:
    """Of the pages as they stand here; warnings are errors."""
    for name in ("tutorials", ".ci", "benchmarks/results", "sglang_dsl", "runtime"):
        shutil.copytree(
            ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "checkpoint")
        )
    shutil.copy(ROOT / "mkdocs.yml", folder)
    for command in ([".ci/docs.py"], ["-m", "mkdocs", "build", "--strict", "--quiet"]):
        done = subprocess.run(
            [sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "build" / "site"
