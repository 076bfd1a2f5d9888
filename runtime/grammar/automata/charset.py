"""Sets of code points as sorted ranges, and what Python's `re` means by a class, a category or "ignore case",
by asking `re` itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np

Ranges = tuple[tuple[int, int], ...]
"""Disjoint (first, last) pairs of code points, both ends inclusive, ascending, never adjacent."""

LAST = 0x10FFFF
EVERYTHING: Ranges = ((0, LAST),)
SURROGATES: Ranges = ((0xD800, 0xDFFF),)
_CASED_BELOW = 0x20000  # planes 2 and up hold ideographs, tags and private use: nothing with case


def union(*sets: Iterable[tuple[int, int]]) -> Ranges:
    """The code points of any of `sets`."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(pair for one in sets for pair in one):
        if merged and first <= merged[-1][1] + 1:
            if last > merged[-1][1]:
                merged[-1] = (merged[-1][0], last)
        else:
            merged.append((first, last))
    return tuple(merged)


def complement(ranges: Ranges) -> Ranges:
    """The code points that are not in `ranges`."""
    gaps: list[tuple[int, int]] = []
    start = 0
    for first, last in ranges:
        if first > start:
            gaps.append((start, first - 1))
        start = last + 1
    if start <= LAST:
        gaps.append((start, LAST))
    return tuple(gaps)


def difference(ranges: Ranges, removed: Ranges) -> Ranges:
    return complement(union(complement(ranges), removed))


def points(values: Iterable[int]) -> Ranges:
    """The set of single code points `values`."""
    return union((value, value) for value in values)


@lru_cache(maxsize=16)
def category(escape: str, ascii_only: bool) -> Ranges:
    r"""Code points that a category escape such as ``\w`` matches."""
    return matching(re.compile(f"{escape}+", re.ASCII if ascii_only else re.UNICODE))


def matching(expression: Any) -> Ranges:
    """Code points that a compiled expression, a class repeated, matches."""
    text = np.arange(LAST + 1, dtype="<u4").tobytes().decode("utf-32-le", "surrogatepass")
    return tuple((match.start(), match.end() - 1) for match in expression.finditer(text))


@lru_cache(maxsize=1)
def _cased() -> tuple[str, Ranges]:
    """All characters that have another case, as text and as a set: the only ones "ignore case" can touch."""
    text = "".join(
        char
        for char in map(chr, range(_CASED_BELOW))
        if char.lower() != char or char.upper() != char or char.title() != char
    )
    return text, points(map(ord, text))


@lru_cache(maxsize=1024)
def ignoring_case(one_char_pattern: str, exact: Ranges, ascii_only: bool) -> Ranges:
    """What `one_char_pattern` matches under re.IGNORECASE, where `exact` is what it matches without."""
    text, cased = _cased()
    flags = re.IGNORECASE | (re.ASCII if ascii_only else re.UNICODE)
    return union(difference(exact, cased), points(map(ord, re.findall(one_char_pattern, text, flags))))


def prepare() -> None:
    r"""Work out \w, \d and \s now: 50 ms, and once for a process."""
    for escape in (r"\w", r"\d", r"\s"):
        category(escape, False)
