"""A short text that a regex matches, for backends without a model."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

# The standard library's own parser; its modules have had these names since Python 3.11.
from re import _compiler as compiler  # type: ignore[attr-defined]
from re import _constants as ops  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

# Tried in this order for classes.
_CANDIDATES = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 -_.,:;!?'\"()[]{}\n\t/\\"


def example(pattern: str, pick: Callable[[int], int] = lambda size: 0) -> str:
    """A text that matches `pattern`; pick(n) chooses one of n alternatives. Raises ValueError."""
    text = _sequence(parser.parse(pattern), pick, {})
    if re.fullmatch(pattern, text) is None:
        raise ValueError(f"no example found for the regex {pattern!r}")
    return text


def _sequence(items: Any, pick: Callable[[int], int], groups: dict[int, str]) -> str:
    return "".join(_one(op, argument, pick, groups) for op, argument in items)


def _one(op: Any, argument: Any, pick: Callable[[int], int], groups: dict[int, str]) -> str:
    if op is ops.LITERAL:
        return chr(argument)
    if op is ops.NOT_LITERAL:
        return _first(lambda c: c != chr(argument))
    if op is ops.ANY:
        return "a"
    if op is ops.IN:
        return _member(argument, pick)
    if op is ops.BRANCH:
        branches = argument[1]
        return _sequence(branches[pick(len(branches))], pick, groups)
    if op is ops.SUBPATTERN:
        group, _, _, inner = argument
        text = _sequence(inner, pick, groups)
        if group is not None:
            groups[group] = text
        return text
    if op in (ops.MAX_REPEAT, ops.MIN_REPEAT, ops.POSSESSIVE_REPEAT):
        least, _, inner = argument
        return "".join(_sequence(inner, pick, groups) for _ in range(least))
    if op is ops.ATOMIC_GROUP:
        return _sequence(argument, pick, groups)
    if op is ops.GROUPREF:
        return groups[argument]
    if op is ops.AT:
        return ""
    raise ValueError(f"the regex uses {op}, for which no example can be made")


def _member(items: Sequence[tuple[Any, Any]], pick: Callable[[int], int]) -> str:
    op, argument = items[0]
    if op is ops.RANGE:
        low, high = argument
        return chr(low + pick(min(high - low + 1, 10)))
    if op is ops.LITERAL:
        return chr(argument)
    part = list(items) if op is ops.NEGATE else [items[0]]
    pattern = compiler.compile(parser.SubPattern(parser.State(), [(ops.IN, part)]))
    return _first(lambda char: pattern.fullmatch(char) is not None)


def _first(accepts: Callable[[str], bool]) -> str:
    for char in _CANDIDATES:
        if accepts(char):
            return char
    raise ValueError("the regex has a class of characters of which none is known")
