"""The documentation's pages: their Python runs and prints what it shows, those made from the code are as the
code is, every public name has an example, and the site is built without a warning."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import sglang_dsl as sgl
from runtime.api import Engine
from tests.process.browser import NAMES, browser, executable
from tests.process.docs.pages import BLOCK, printed

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "tutorials"
PAGES = [
    "index.md",
    "quickstart.md",
    "notebooks.md",
    *sorted(
        str(page.relative_to(DOCS)) for page in (DOCS / "concepts").glob("*.md") if page.stem != "request"
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


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    site = built_site(tmp_path)
    assert (site / "reference" / "language" / "index.html").read_text(encoding="utf-8").count("<h3") > 60
    assert "http" not in "".join(
        re.findall(
            r'<(?:script|link)[^>]*(?:src|href)="(http[^"]*)"', (site / "index.html").read_text("utf-8")
        )
    )


@pytest.mark.slow
@pytest.mark.skipif(executable() is None, reason=f"no browser is installed: none of {', '.join(NAMES)}")
def test_a_browser_clicks_through_the_site(tmp_path: Path) -> None:
    """Every page of the navigation and the search; nothing complains."""
    handler = functools.partial(QuietFiles, directory=str(built_site(tmp_path)))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, browser(tmp_path / "profile") as page:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            page.open(f"http://127.0.0.1:{server.server_port}/")
            found = "[...document.querySelectorAll('a.md-nav__link[href]')].map(one => one.href)"
            pages = sorted({link.partition("#")[0] for link in page.evaluate(found)})
            assert len(pages) > 40
            for url in pages:
                page.open(url)
                assert len(page.text("article h1")) > 3, url
                page.wait("[...document.images].every(one => one.loading === 'lazy' || one.complete)")
                broken = "[...document.images].filter(one => one.complete && !one.naturalWidth).length"
                assert page.evaluate(broken) == 0, url
            page.open(f"http://127.0.0.1:{server.server_port}/")
            field = "document.querySelector('.md-search__input')"
            page.wait(f"{field} !== null && (document.querySelector('#__search').click(), true)")
            page.evaluate(f"{field}.focus()")
            page.send("Input.insertText", text="jump-forward")
            page.wait("document.querySelectorAll('.md-search-result__item').length > 2")
            page.click(".md-search-result__item a")
            page.wait("document.querySelector('article').innerText.toLowerCase().includes('jump-forward')")
            assert page.complaints == []
        finally:
            server.shutdown()


class QuietFiles(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass
