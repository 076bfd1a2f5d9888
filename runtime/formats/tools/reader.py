"""Reads a text that comes in pieces of any size.

A format's parser is a generator over a Reader: it yields where it needs more text, and decides only by what
the text says, never by where a piece ended. So the same text gives the same result however it was cut.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from functools import lru_cache
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]
"""Yields where more text is needed; returns what was read."""

NAME = re.compile(r"[\w.\-]*")
_BEFORE = {mark: re.compile(rf"\s*+([\w.\-]++)\s*+{re.escape(mark)}") for mark in "(="}
_BLANK = re.compile(r"\s*")
_SHORT = 512  # characters that are copied with every piece, at most


class Malformed(Exception):
    """What stands here is no call of this format."""


class Reader:
    """feed() and end() are called from outside between two steps of the parser; the rest is the parser's.

    `taken`: everything consumed since the last reset, which becomes content if it turns out to be no call.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.over = False
        self.taken: list[str] = []
        self._waiting: list[str] = []
        self._waits = 0

    def feed(self, text: str) -> bool:
        """Whether the parser should look at it now. Where much is here that it could not use yet, pieces wait
        until they are worth another copy of that: so the work stays linear in the text."""
        self._waiting.append(text)
        self._waits += len(text)
        if self.left > _SHORT and self._waits * 8 < self.left:
            return False
        self._join()
        return True

    def end(self) -> None:
        self.over = True
        self._join()

    def _join(self) -> None:
        self.text = self.text[self.at :] + "".join(self._waiting)
        self.at = self._waits = 0
        self._waiting.clear()

    @property
    def left(self) -> int:
        """Characters that are here and not yet consumed."""
        return len(self.text) - self.at

    def take(self, count: int) -> str:
        """Consume `count` characters that are here."""
        piece = self.text[self.at : self.at + count]
        self.at += count
        self.taken.append(piece)
        return piece

    def reset(self) -> str:
        """What was taken, which is forgotten."""
        text = "".join(self.taken)
        self.taken.clear()
        return text

    def more(self) -> Reading[None]:
        """Wait for text. Raises Malformed where there is no more."""
        if self.over:
            raise Malformed("the text ends")
        yield

    def peek(self) -> Reading[str]:
        """The next character."""
        while not self.left:
            yield from self.more()
        return self.text[self.at]

    def run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Consume the longest run that `pattern`, a repetition of one class of characters, matches."""
        pieces = ""
        while True:
            found = pattern.match(self.text, self.at)
            if found is not None and found.end() > self.at:
                pieces += self.take(found.end() - self.at)
            if self.left or self.over:
                return pieces
            yield

    def blank(self) -> Reading[str]:
        """Consume white space."""
        return (yield from self.run(_BLANK))

    def solid(self) -> str:
        """The next character, where it is here and no white space; else ""."""
        character = self.text[self.at : self.at + 1]
        return "" if character.isspace() else character

    def next_solid(self) -> Reading[str]:
        """The next character behind white space, which is consumed."""
        yield from self.run(_BLANK)
        return (yield from self.peek())

    def starts(self, options: Sequence[str], skip: int = 0) -> Reading[str]:
        """Which of `options` stands `skip` characters on, the longest; "" for none. Consumes nothing."""
        pattern, longest = longest_first(options)
        while True:
            place = self.at + skip
            here = len(self.text) - place
            if here >= longest or self.over or self.text[place:] not in _beginnings(options):
                found = pattern.match(self.text, place)
                return found[0] if found else ""
            yield

    def follows(self, options: Sequence[str]) -> Reading[str]:
        """Which of `options` comes next behind white space; consumes both. "" for none: nothing is
        consumed."""
        blank = 0 if self.solid() else (yield from self.width_of_blank())
        found = yield from self.starts(options, blank)
        if found:
            self.take(blank + len(found))
        return found

    def width_of_blank(self, skip: int = 0) -> Reading[int]:
        """How much white space stands `skip` characters on. Consumes nothing."""
        width = skip
        while True:
            found = _BLANK.match(self.text, self.at + width)
            width = (found.end() if found else self.at + width) - self.at
            if self.at + width < len(self.text) or self.over:
                return width - skip
            yield

    def expect(self, *options: str) -> Reading[str]:
        """Consume one of `options`, behind white space. Raises Malformed."""
        found = yield from self.follows(options)
        if not found:
            raise Malformed(f"{options[0]!r} is missing")
        return found

    def named(self, mark: str) -> Reading[str]:
        """Consume a name and `mark`, "(" or "=", behind it; the name. Raises Malformed."""
        found = _BEFORE[mark].match(self.text, self.at)
        if found is not None:
            self.take(found.end() - self.at)
            return found[1]
        yield from self.blank()
        name = yield from self.run(NAME)
        if not name:
            raise Malformed(f"a name is missing before {mark!r}")
        yield from self.expect(mark)
        return name

    def until(self, options: Sequence[str], limit: int | None = None) -> Reading[str]:
        """Consume up to the first of `options`, which stays. Raises Malformed where none comes, or not within
        `limit` characters."""
        pieces, size = [], 0
        while True:
            place = self.find(options)
            count = self.left - self.held(options) if place is None else place
            if limit is not None and size + count > limit:
                self.take(limit - size)
                raise Malformed(f"no {options[0]!r} within {limit} characters")
            pieces.append(self.take(count))
            size += count
            if place is not None:
                return "".join(pieces)
            yield from self.more()

    def held(self, options: Sequence[str]) -> int:
        """How many of the last characters that are here may begin one of `options`."""
        return held_back(self.text, self.at, options)

    def find(self, options: Sequence[str], pattern: re.Pattern[str] | None = None) -> int | None:
        """How far away the first of `options` is. None: there is none, or it may begin where the text that is
        here ends. pattern: what finds them, where not all of them count."""
        if not options:
            return None
        any_of, longest = longest_first(options)
        found = (pattern or any_of).search(self.text, self.at)
        if found is None:
            return None
        place = found.start() - self.at
        # Another one may begin before it, of which only the beginning is here.
        if place and not self.over and self.left - place < longest and self.left - self.held(options) < place:
            return None
        return place


@lru_cache(maxsize=1024)
def longest_first(options: Sequence[str]) -> tuple[re.Pattern[str], int]:
    """What matches any of them, the longest where several do, and how long that may be."""
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
