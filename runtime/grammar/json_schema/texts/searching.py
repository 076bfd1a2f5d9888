"""Searching a text for an ECMA pattern, in bounded time. It knows no schema."""

from __future__ import annotations

import contextlib
import re
from functools import lru_cache
from typing import Any

import regex  # type: ignore[import-untyped]

from runtime.grammar.json_schema.texts.ecma import spell
from runtime.protocol.errors import BadConstraint

_SECONDS = (0.05, 0.5)
"""Of processor time, of all threads: a second, longer try tells a slow pattern from a busy process."""
_SHORT = 64
_FLAT = 4
_REPEATED_GROUP = re.compile(r"\)[*+{?]")
_REPEAT = re.compile(r"[*+{]")


class Searcher:
    """One pattern. Patterns that could take a time beyond any bound (nested repeats) are searched by an
    engine that can be stopped; one that had to be stopped is not tried again."""

    def __init__(self, pattern: str) -> None:
        python = spell(pattern).python
        self._pattern = pattern
        self._stoppable: Any = regex.compile(python)
        plain = _REPEATED_GROUP.search(python) is None and len(_REPEAT.findall(python)) <= _FLAT
        plain = plain and "(?<" not in python
        self._fast = re.compile(python) if plain else None
        self._slow = False

    def found(self, text: str) -> bool:
        """Whether the pattern matches somewhere in `text`. Raises BadConstraint where that takes too long."""
        if self._fast is not None and len(text) <= _SHORT:
            return self._fast.search(text) is not None
        if not self._slow:
            for seconds in _SECONDS:
                with contextlib.suppress(TimeoutError):
                    return self._stoppable.search(text, timeout=seconds) is not None
            self._slow = True
        raise BadConstraint(f"the pattern {self._pattern[:80]!r} takes too long to search a text for")


@lru_cache(maxsize=1024)
def searcher(pattern: str) -> Searcher:
    """Raises what spell() raises."""
    return Searcher(pattern)


def found(pattern: str, text: str) -> bool:
    """Whether an ECMA pattern matches somewhere in `text`."""
    return searcher(pattern).found(text)
