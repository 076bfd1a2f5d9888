"""Reads a text that comes in pieces of any size.

A format's parser is a generator over a Reader. It yields when it needs more text, and decides only by the
text, never by where a piece ended. So the same text gives the same result however it was split.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from functools import lru_cache
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]
"""Yields when more text is needed; returns the text or value read."""

NAME = re.compile(r"[\w.\-]*")
_BEFORE = {mark: re.compile(rf"\s*+([\w.\-]++)\s*+{re.escape(mark)}") for mark in "(="}
_BLANK = re.compile(r"\s*")
_SHORT = 512  # up to this many characters are copied with every piece


class Malformed(Exception):
    """The text is not a call of this format."""


class Reader:
    """feed() and end() are called from outside between two steps of the parser; the parser calls the rest.
    `taken`: everything consumed since the last reset, which becomes content if it is not a call."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self.taken: list[str] = []
        self._waiting: list[str] = []
        self._waits = 0

    def feed(self, text: str) -> bool:
        """Whether the parser should run now. If there is much text that it could not use yet, pieces wait
        until copying that text is worth it, so that the work stays linear in the text."""
        self._waiting.append(text)
        self._waits += len(text)
        if self.left > _SHORT and self._waits * 8 < self.left:
            return False
        self._join()
        return True

    def end(self) -> None:
        self.ended = True
        self._join()

    def _join(self) -> None:
        self.text = self.text[self.at :] + "".join(self._waiting)
        self.at = self._waits = 0
        self._waiting.clear()

    @property
    def left(self) -> int:
        """Available characters that are not consumed yet."""
        return len(self.text) - self.at

    def take(self, count: int) -> str:
        """Consume `count` available characters."""
        piece = self.text[self.at : self.at + count]
        self.at += count
        self.taken.append(piece)
        return piece

    def reset(self) -> str:
        """Return and forget the consumed text."""
        text = "".join(self.taken)
        self.taken.clear()
        return text

    def more(self) -> Reading[None]:
        """Wait for text. Raises Malformed at the end of the text."""
        if self.ended:
            raise Malformed("the text ends")
        yield

    def peek(self) -> Reading[str]:
        """The next character."""
        while not self.left:
            yield from self.more()
        return self.text[self.at]

    def run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Consume the longest match of `pattern`, a repetition of one character class."""
        pieces = ""
        while True:
            match = pattern.match(self.text, self.at)
            if match is not None and match.end() > self.at:
                pieces += self.take(match.end() - self.at)
            if self.left or self.ended:
                return pieces
            yield

    def blank(self) -> Reading[str]:
        """Consume white space."""
        return (yield from self.run(_BLANK))

    def solid(self) -> str:
        """The next character, if it is available and not white space; else ""."""
        character = self.text[self.at : self.at + 1]
        return "" if character.isspace() else character

    def next_solid(self) -> Reading[str]:
        """Consume white space; the next character after it."""
        yield from self.run(_BLANK)
        return (yield from self.peek())

    def starts(self, options: Sequence[str], skip: int = 0) -> Reading[str]:
        """The longest of `options` found `skip` characters ahead; "" if none. Consumes nothing."""
        pattern, longest = longest_first(options)
        while True:
            position = self.at + skip
            here = len(self.text) - position
            if here >= longest or self.ended or self.text[position:] not in _beginnings(options):
                match = pattern.match(self.text, position)
                return match[0] if match else ""
            yield

    def follows(self, options: Sequence[str]) -> Reading[str]:
        """The one of `options` that comes next after white space; consumes both. "" if none; then nothing is
        consumed."""
        blank = 0 if self.solid() else (yield from self.width_of_blank())
        option = yield from self.starts(options, blank)
        if option:
            self.take(blank + len(option))
        return option

    def width_of_blank(self, skip: int = 0) -> Reading[int]:
        """The length of the white space `skip` characters ahead. Consumes nothing."""
        width = skip
        while True:
            match = _BLANK.match(self.text, self.at + width)
            width = (match.end() if match else self.at + width) - self.at
            if self.at + width < len(self.text) or self.ended:
                return width - skip
            yield

    def expect(self, *options: str) -> Reading[str]:
        """Consume one of `options`, after white space. Raises Malformed."""
        option = yield from self.follows(options)
        if not option:
            raise Malformed(f"{options[0]!r} is missing")
        return option

    def named(self, mark: str) -> Reading[str]:
        """Consume a name followed by `mark`, "(" or "="; returns the name. Raises Malformed."""
        match = _BEFORE[mark].match(self.text, self.at)
        if match is not None:
            self.take(match.end() - self.at)
            return match[1]
        yield from self.blank()
        name = yield from self.run(NAME)
        if not name:
            raise Malformed(f"a name is missing before {mark!r}")
        yield from self.expect(mark)
        return name

    def until(self, options: Sequence[str], limit: int | None = None) -> Reading[str]:
        """Consume up to the first of `options`, which stays. Raises Malformed if there is none, or not within
        `limit` characters."""
        pieces, size = [], 0
        while True:
            distance = self.find(options)
            count = self.left - self.held(options) if distance is None else distance
            if limit is not None and size + count > limit:
                self.take(limit - size)
                raise Malformed(f"no {options[0]!r} within {limit} characters")
            pieces.append(self.take(count))
            size += count
            if distance is not None:
                return "".join(pieces)
            yield from self.more()

    def held(self, options: Sequence[str]) -> int:
        """How many of the last available characters may begin one of `options`."""
        return held_back(self.text, self.at, options)

    def find(self, options: Sequence[str], pattern: re.Pattern[str] | None = None) -> int | None:
        """The distance to the first of `options`. None: there is none, or it may begin at the end of the
        available text. pattern: finds them, if not all of them count."""
        if not options:
            return None
        any_of, longest = longest_first(options)
        match = (pattern or any_of).search(self.text, self.at)
        if match is None:
            return None
        distance = match.start() - self.at
        # Another one may begin before it, with only its beginning available.
        if (
            distance
            and not self.ended
            and self.left - distance < longest
            and self.left - self.held(options) < distance
        ):
            return None
        return distance


@lru_cache(maxsize=1024)
def longest_first(options: Sequence[str]) -> tuple[re.Pattern[str], int]:
    """A pattern for any of them, preferring the longest, and the maximum length."""
    ordered = sorted(options, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)"), len(ordered[0]) if ordered else 0


@lru_cache(maxsize=1024)
def _beginnings(options: Sequence[str]) -> frozenset[str]:
    return frozenset(one[:size] for one in options for size in range(len(one)))


def held_back(text: str, start: int, options: Sequence[str]) -> int:
    """How many of the last characters of text[start:] may begin one of `options`."""
    beginnings = _beginnings(options)
    longest = max(map(len, options), default=1)
    for at in range(max(start, len(text) - longest + 1), len(text)):
        if text[at:] in beginnings:
            return len(text) - at
    return 0
