"""BrowserTool: search, open and find, over documents of the server's operator (see documents.py)."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from runtime.formats.tools.types import Tool
from runtime.tools.documents import Documents, NotReadable
from runtime.tools.tool_server import ToolNamespace, ToolResult, ToolSession

LINES, MOST_LINES, WIDTH = 50, 200, 120
RESULTS, MOST_RESULTS = 5, 20
MOST_PAGES = 100
MOST_QUERY = 1000


def _tool(
    name: str, description: str, required: str | None = None, **parameters: tuple[str | list[str], str]
) -> Tool:
    properties = {word: {"type": kind, "description": text} for word, (kind, text) in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": [required] if required else []}
    return Tool(name, schema, description)


_CURSOR = ("integer", "number of a page shown before; without it, the last one")
TOOLS = (
    _tool(
        "search", "Searches for documents. Shows a numbered list.", "query",
        query=("string", "words to look for"), topn=("integer", f"results, at most; {RESULTS} if not given"),
    ),
    _tool(
        "open", "Shows a document, or another part of one that is open.",
        id=(["integer", "string"], "a number of the list of results, or where the document is"),
        cursor=_CURSOR, loc=("integer", "line to begin with"),
        num_lines=("integer", f"lines to show; {LINES} if not given"),
    ),
    _tool("find", "Finds the lines of a page that have a text in them.", "pattern",
          pattern=("string", "the text"), cursor=_CURSOR),
)  # fmt: skip


@dataclass(frozen=True)
class _Page:
    """links: the documents that the numbers on it refer to."""

    title: str
    location: str
    lines: tuple[str, ...]
    links: tuple[str, ...] = ()


class _Wrong(Exception):
    """An invalid call; the message is for the model."""


class BrowserTool:
    """The namespace "browser". timeout_s: of each call."""

    def __init__(self, documents: Documents, timeout_s: float = 30.0) -> None:
        self._documents, self._timeout_s = documents, timeout_s
        self.namespace = ToolNamespace("browser", "Searches and reads documents.", TOOLS)

    def session(self) -> AbstractAsyncContextManager[BrowserSession]:
        return nullcontext(BrowserSession(self._documents, self._timeout_s))


class BrowserSession(ToolSession):
    """The pages are numbered in the order in which they were shown; the newest MOST_PAGES are kept."""

    def __init__(self, documents: Documents, timeout_s: float) -> None:
        self._documents, self._timeout_s = documents, timeout_s
        self._pages: dict[int, _Page] = {}
        self._shown = 0

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        known = {"search": self._search, "open": self._open, "find": self._find}
        if name not in known:
            return ToolResult(f"there is no tool {name!r}; there are {', '.join(known)}", True)
        try:
            async with asyncio.timeout(self._timeout_s):
                return ToolResult(await known[name](arguments))
        except (_Wrong, NotReadable) as error:
            return ToolResult(str(error), True)
        except TimeoutError:
            return ToolResult(f"{name} did not end within {self._timeout_s:g} s", True)

    async def _search(self, arguments: Mapping[str, Any]) -> str:
        query = _text(arguments, "query")[:MOST_QUERY]
        hits = await self._documents.search(query, _number(arguments, "topn", RESULTS, 1, MOST_RESULTS))
        if not hits:
            return f"nothing was found for {query!r}"
        lines: list[str] = []
        for number, hit in enumerate(hits):
            lines += [f"[{number}] {hit.title} ({hit.location})", f"    {hit.snippet}"]
        page = _Page(f"Results for {query!r}", "search", tuple(lines), tuple(hit.location for hit in hits))
        return self._show(page, 0, len(lines))

    async def _open(self, arguments: Mapping[str, Any]) -> str:
        identity = arguments.get("id")
        if identity in (None, "", -1):
            page = self._page(arguments)
        else:
            document = await self._documents.read(self._location(identity, arguments))
            lines = [
                piece for line in document.text.splitlines() for piece in textwrap.wrap(line, WIDTH) or [""]
            ]
            page = _Page(document.title, document.location, tuple(lines))
        first = _number(arguments, "loc", 0, 0, max(0, len(page.lines) - 1))
        return self._show(page, first, _number(arguments, "num_lines", LINES, 1, MOST_LINES))

    async def _find(self, arguments: Mapping[str, Any]) -> str:
        pattern, page = _text(arguments, "pattern"), self._page(arguments)
        folded = pattern.casefold()
        matches = [f"L{at}: {line}" for at, line in enumerate(page.lines) if folded in line.casefold()]
        if not matches:
            return f"{pattern!r} is not on the page {page.title!r}"
        more = f"\n[{len(matches) - LINES} more]" if len(matches) > LINES else ""
        return f"{page.title} ({page.location})\n" + "\n".join(matches[:LINES]) + more

    def _show(self, page: _Page, first: int, count: int) -> str:
        self._pages[self._shown] = page
        number, self._shown = self._shown, self._shown + 1
        self._pages.pop(number - MOST_PAGES, None)
        lines = page.lines[first : first + count]
        part = f"lines {first} to {first + len(lines) - 1} of {len(page.lines)}" if lines else "empty"
        head = f"[{number}] {page.title} ({page.location}), {part}"
        return "\n".join([head, *lines])

    def _page(self, arguments: Mapping[str, Any]) -> _Page:
        if not self._pages:
            raise _Wrong("no page is open; search for one first")
        number = _number(arguments, "cursor", self._shown - 1, -1, self._shown - 1)
        page = self._pages.get(self._shown - 1 if number == -1 else number)
        if page is None:
            raise _Wrong(f"page {number} was closed long ago")
        return page

    def _location(self, identity: Any, arguments: Mapping[str, Any]) -> str:
        """The location of a document. A location can only be opened if a search has found it."""
        if isinstance(identity, str) and not identity.isdecimal():
            known = {one for page in self._pages.values() for one in (*page.links, page.location)}
            if identity not in known - {"search"}:
                raise _Wrong(f"{identity!r} is not among the documents found so far; search for it first")
            return identity
        links = self._page(arguments).links
        if not links and arguments.get("cursor") in (None, -1):
            # After a document was opened, numbers still refer to the last search.
            links = next((page.links for page in reversed(self._pages.values()) if page.links), ())
        number = _number({"id": identity}, "id", 0, 0, None)
        if number >= len(links):
            raise _Wrong(f"there is no number {number} here; there are {len(links)} from 0 on")
        return links[number]


def _text(arguments: Mapping[str, Any], name: str) -> str:
    value = arguments.get(name)
    if not isinstance(value, str) or not value.strip():
        raise _Wrong(f"{name} is missing, or no text")
    return value


def _number(arguments: Mapping[str, Any], name: str, otherwise: int, least: int, most: int | None) -> int:
    """A whole number, clamped to its range. Models write numbers as strings too."""
    value = arguments.get(name)
    if value is None:
        return otherwise
    try:
        number = None if isinstance(value, bool) else int(value)
    except (ValueError, OverflowError, TypeError):
        number = None
    if number is None:
        raise _Wrong(f"{name} is a whole number, got {value!r:.80}")
    return max(least, number if most is None else min(most, number))
