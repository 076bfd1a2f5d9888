"""What a browser would see of a view's HTML."""

from __future__ import annotations

import re
from html.parser import HTMLParser

VOID = {"img"}
KNOWN = {
    "code", "details", "div", "i", "img", "mark", "pre", "span", "style", "sub", "summary", "table", "td",
    "th", "tr",
}  # fmt: skip
ATTRIBUTES = {"alt", "class", "data-told", "open", "src", "style", "tabindex"}


class Seen(HTMLParser):
    """Tags that close in order, no scripts, nothing to load. shown: all text; marked: the text of each
    <mark>; told: what appears under the pointer; pictures: their addresses. Raises AssertionError for
    anything else."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.shown, self.style = "", ""
        self.marked: list[str] = []
        self.told: list[str] = []
        self.pictures: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []
        assert text.startswith('<div class="sgl">')
        assert "url(" not in self.style
        assert "@import" not in self.style

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in KNOWN, tag
        given = dict(attrs)
        assert set(given) <= ATTRIBUTES, given
        assert re.fullmatch(r"[\w\s:;.%-]*", str(given.get("style", ""))), given
        assert re.fullmatch(r"[\w -]*", str(given.get("class", ""))), given
        if "src" in given:
            assert str(given["src"]).startswith("data:image/")
            self.pictures.append(str(given["src"]))
        if "data-told" in given:
            self.told.append(str(given["data-told"]))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "mark":
            self.marked.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "style":
            self.style += data
            return
        self.shown += data
        if "mark" in self.open:
            self.marked[-1] += data
