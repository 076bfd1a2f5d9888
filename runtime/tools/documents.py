"""Documents that a browser tool searches: a folder of files, or a search engine and the pages it finds. Files
are ranked by BM25 (https://en.wikipedia.org/wiki/Okapi_BM25)."""

from __future__ import annotations

import asyncio
import math
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from runtime.protocol.errors import BadRequest
from runtime.tools.fetch import NotFetched, fetch

SUFFIXES = (".txt", ".md", ".rst", ".html", ".htm")
MOST_FILES = 20_000
MOST_BYTES = 4 << 20
"""Size of a document; the rest is ignored."""
TIMEOUT_S = 20.0
"""Limit of a search, or of fetching a page."""
SNIPPET = 240
_WIDE = "\u3040-\u30ff\u4e00-\u9fff"  # written without spaces: each character is a word
_WORD = re.compile(rf"[{_WIDE}]|[^\W{_WIDE}]+")
_STEEPNESS, _LENGTH = 1.5, 0.75


class NotReadable(Exception):
    """A document or search that failed; the message tells the model why."""


@dataclass(frozen=True)
class Document:
    """location: the path in the folder, or the URL."""

    location: str
    title: str
    text: str


@dataclass(frozen=True)
class Hit:
    location: str
    title: str
    snippet: str


class Documents(ABC):
    """Both methods raise NotReadable."""

    @abstractmethod
    async def search(self, query: str, most: int) -> list[Hit]: ...

    @abstractmethod
    async def read(self, location: str) -> Document: ...


def documents_of(source: str) -> Documents:
    """A folder, or a search engine's URL with {query} in it. Raises BadRequest."""
    if source.startswith(("http://", "https://")):
        return SearchEngine(source)
    return Folder(Path(source))


class Folder(Documents):
    """Text, Markdown and HTML files of a folder, read at the first search. Raises BadRequest."""

    def __init__(self, root: Path) -> None:
        self._root = root.expanduser().resolve()
        if not self._root.is_dir():
            raise BadRequest(f"there is no folder {root}", where="tool_documents")

    async def search(self, query: str, most: int) -> list[Hit]:
        return await asyncio.to_thread(self._search, query, most)

    async def read(self, location: str) -> Document:
        index = await asyncio.to_thread(lambda: self._index)
        if location not in index.documents:
            raise NotReadable(f"there is no document {location!r}")
        return index.documents[location]

    def _search(self, query: str, most: int) -> list[Hit]:
        terms = set(terms_of(query))
        documents = self._index.ranked(terms)[:most]
        return [Hit(one.location, one.title, _snippet(one.text, terms)) for one in documents]

    @cached_property
    def _index(self) -> _Index:
        documents: dict[str, Document] = {}
        for path in sorted(self._root.rglob("*")):
            inside = path.resolve().is_relative_to(self._root)
            if path.suffix.lower() not in SUFFIXES or not inside or not path.is_file():
                continue
            with path.open("rb") as file:
                text = file.read(MOST_BYTES).decode("utf-8", "replace")
            location = path.relative_to(self._root).as_posix()
            documents[location] = document(location, text, path.suffix.lower() in (".html", ".htm"))
            if len(documents) == MOST_FILES:
                break
        return _Index(documents)


class _Index:
    def __init__(self, documents: dict[str, Document]) -> None:
        self.documents = documents
        self._counts = {
            location: Counter(terms_of(f"{location} {one.title}\n{one.text}"))
            for location, one in documents.items()
        }
        self._sizes = {location: counts.total() for location, counts in self._counts.items()}
        self._mean = sum(self._sizes.values()) / max(1, len(documents)) or 1.0
        self._spread = Counter(word for count in self._counts.values() for word in count)

    def ranked(self, terms: set[str]) -> list[Document]:
        """Documents that contain any of the terms, best first."""
        scores = {location: self._score(location, terms) for location in self.documents}
        best = sorted(scores, key=lambda location: -scores[location])
        return [self.documents[location] for location in best if scores[location] > 0]

    def _score(self, location: str, terms: set[str]) -> float:
        counts, total = self._counts[location], len(self.documents)
        long = 1 - _LENGTH + _LENGTH * self._sizes[location] / self._mean
        score = 0.0
        for word in terms & counts.keys():
            rare = math.log(1 + (total - self._spread[word] + 0.5) / (self._spread[word] + 0.5))
            score += rare * counts[word] * (_STEEPNESS + 1) / (counts[word] + _STEEPNESS * long)
        return score


class SearchEngine(Documents):
    """`template`: a URL with {query} that answers {"results": [{"url", "title", "content"}]}, as SearXNG does
    with format=json. Pages are fetched only from the engine's own host and from public addresses: the results
    are not trusted. Raises BadRequest."""

    def __init__(self, template: str) -> None:
        try:
            self._origin = _server(httpx.URL(template))
        except httpx.InvalidURL as error:
            raise BadRequest(f"is not a URL: {error}", where="tool_documents") from None
        if "{query}" not in template or not self._origin[1]:
            raise BadRequest(f"a search URL has {{query}} in it, {template!r} not", where="tool_documents")
        self._template = template

    async def search(self, query: str, most: int) -> list[Hit]:
        body, _ = await self._get(self._template.replace("{query}", quote(query, safe="")))
        try:
            results = httpx.Response(200, content=body).json()["results"]
            return [
                Hit(one["url"], str(one.get("title") or one["url"]), str(one.get("content") or "")[:SNIPPET])
                for one in results[:most]
            ]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise NotReadable(f"the search engine's answer is not what it should be: {error}") from error

    async def read(self, location: str) -> Document:
        body, kind = await self._get(location)
        if not kind.startswith("text/") and "json" not in kind and "xml" not in kind:
            raise NotReadable(f"{location} is no text but {kind or 'of an unknown kind'}")
        return document(location, body.decode("utf-8", "replace"), "html" in kind)

    async def _get(self, url: str) -> tuple[bytes, str]:
        """The body, and its content type."""
        try:
            response = await fetch(
                url,
                accept="text/*, application/json, */*;q=0.5",
                most_bytes=MOST_BYTES,
                timeout_s=TIMEOUT_S,
                trusts=lambda address: _server(address) == self._origin,
            )
        except NotFetched as error:
            raise NotReadable(f"{url[:200]!r} {error}") from error
        if not 200 <= response.status < 300:
            raise NotReadable(f"{url[:200]!r} was answered with status {response.status}")
        return response.body, response.kind


def _server(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


def terms_of(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def document(location: str, text: str, is_html: bool) -> Document:
    if is_html:
        page = _Page()
        page.feed(text)
        page.close()
        title, text = " ".join("".join(page.title).split()), page.plain()
    else:
        title = next((line.strip("#= \t") for line in text.splitlines() if line.strip("#= \t")), "")
    return Document(location, title[:120] or location, text)


def _snippet(text: str, terms: set[str]) -> str:
    """The line with the most terms."""
    best = max(text.splitlines(), key=lambda line: len(terms & set(terms_of(line))), default="")
    return " ".join(best.split())[:SNIPPET]


class _Page(HTMLParser):
    """An HTML page's text, in lines."""

    BREAKS = frozenset(
        ("p", "div", "br", "li", "tr", "h1", "h2", "h3", "h4", "h5", "h6", "section", "article", "pre",
         "table", "ul", "ol", "blockquote")
    )  # fmt: skip
    HIDDEN = frozenset(("script", "style", "template", "noscript", "svg"))

    def __init__(self) -> None:
        super().__init__()
        self.title: list[str] = []
        self._pieces: list[str] = []
        self._hidden, self._in_title = 0, False

    def handle_starttag(self, tag: str, attrs: Sequence[Any]) -> None:
        self._hidden += tag in self.HIDDEN
        self._in_title = tag == "title"
        if tag in self.BREAKS:
            self._pieces.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self._hidden = max(0, self._hidden - (tag in self.HIDDEN))
        self._in_title = False
        if tag in self.BREAKS:
            self._pieces.append("\n")

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.title.append(data)
        elif not self._hidden:
            self._pieces.append(re.sub(r"\s+", " ", data))

    def plain(self) -> str:
        lines = (line.strip() for line in "".join(self._pieces).split("\n"))
        return "\n".join(line for line in lines if line)
