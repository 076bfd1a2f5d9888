"""process/docs/test_docs.py, at length."""

from __future__ import annotations

import functools
import re
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.process.browser import NAMES, browser, executable
from tests.process.docs.test_docs import built_site


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


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    site = built_site(tmp_path)
    assert (site / "reference" / "language" / "index.html").read_text(encoding="utf-8").count("<h3") > 60
    assert "http" not in "".join(
        re.findall(
            r'<(?:script|link)[^>]*(?:src|href)="(http[^"]*)"', (site / "index.html").read_text("utf-8")
        )
    )
