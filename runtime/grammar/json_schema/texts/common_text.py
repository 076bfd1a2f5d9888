"""The shortest texts that match several patterns of lowered schemas, for examples."""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import islice, product

from runtime.grammar.automata.automaton import Limits
from runtime.grammar.automata.charset import EVERYTHING
from runtime.grammar.automata.dfa import ByteDfa, compile_node
from runtime.grammar.automata.regex_syntax import (
    EMPTY,
    Alt,
    At,
    Chars,
    Node,
    Repeat,
    Seq,
    has_conditions,
    parse,
)
from runtime.protocol.errors import BadConstraint, UnsupportedConstraint

LIMITS = Limits(positions=20_000, states=4000, table_bytes=4 << 20, work=150_000, seconds=0.1)
_STEPS = 100_000
_MOST, _TURNING = 64, 6
_READABLE = (*range(97, 123), *range(48, 58), *range(65, 91), 45, 46, 47, 32)
_UNSPELLED = frozenset((*range(32), 127))
_RUST_POINT = re.compile(r"\\x\{([0-9A-Fa-f]+)\}")


@lru_cache(maxsize=256)
def shortest_of_all(patterns: tuple[str, ...], low: int, high: int) -> tuple[str, ...]:
    """Some texts of `low` to `high` characters, as short as possible, in which each of `patterns`, in the
    syntax of lowered schemas, matches; () if none was found within the bounds."""
    automata: list[ByteDfa] = []
    for pattern in patterns:
        try:
            automata.append(compile_node(search_language(pattern), LIMITS))
        except BadConstraint:
            continue  # the text may yet do
    letters = _letters(automata)
    tables = [dfa.delta.tolist() for dfa in automata]
    start = (tuple(0 for _ in automata), 0)
    level, before = [start], {start: (start, "")}
    for length in range(high + 1):
        after: list[tuple[tuple[int, ...], int]] = []
        for one in level:
            states, counted = one
            if length >= low and all(
                dfa.accepting[state] for dfa, state in zip(automata, states, strict=True)
            ):
                return _alike(_spelled(one, length, before), letters)
            for classes, (char, *_) in letters.items():
                there = tuple(
                    table[state][kind] for table, state, kind in zip(tables, states, classes, strict=True)
                )
                following = (there, min(counted + 1, low))
                if -1 not in there and following not in before:
                    before[following] = (one, char)
                    after.append(following)
        level = after
        if not level or len(before) * len(letters) > _STEPS:
            return ()
    return ()


def _letters(automata: Sequence[ByteDfa]) -> dict[tuple[int, ...], list[str]]:
    """Characters by their classes in the automata."""
    starts = {first for dfa in automata for first, _, _ in dfa.intervals}
    starts |= {last + 1 for dfa in automata for _, last, _ in dfa.intervals}
    letters: dict[tuple[int, ...], list[str]] = {}
    for point in (*_READABLE, *sorted(starts)):
        if point in _UNSPELLED or point > 0x10FFFF or 0xD800 <= point <= 0xDFFF:
            continue
        classes = tuple(_class(dfa, point) for dfa in automata)
        if -1 not in classes:
            letters.setdefault(classes, []).append(chr(point))
    return letters


def _alike(text: str, letters: Mapping[tuple[int, ...], list[str]]) -> tuple[str, ...]:
    """`text`, and others with characters of the same classes; the last ones change first."""
    kinds = {char: chars for chars in letters.values() for char in chars}
    wheels = [list(dict.fromkeys((char, *kinds[char]))) for char in reversed(text)]
    ends = islice(product(*reversed(wheels[:_TURNING])), _MOST)
    return tuple(text[: len(text) - len(end)] + "".join(end) for end in ends)


def _class(dfa: ByteDfa, point: int) -> int:
    row = bisect(dfa.intervals, point, key=lambda interval: interval[0]) - 1
    return dfa.intervals[row][2] if row >= 0 and point <= dfa.intervals[row][1] else -1


def _spelled(
    end: tuple[tuple[int, ...], int],
    length: int,
    before: dict[tuple[tuple[int, ...], int], tuple[tuple[tuple[int, ...], int], str]],
) -> str:
    chars = []
    for _ in range(length):
        end, char = before[end]
        chars.append(char)
    return "".join(reversed(chars))


def search_language(pattern: str) -> Node:
    """The texts in which `pattern`, in the syntax of lowered schemas, matches somewhere. Raises
    UnsupportedConstraint for a condition inside of it."""
    python = _RUST_POINT.sub(lambda point: f"\\U{int(point[1], 16):08X}", pattern)
    try:
        tree = parse(python, anchored=False)
    except BadConstraint as error:
        raise UnsupportedConstraint(error.message) from None
    return _searched(tree)


_ANYTHING = Repeat(Chars(EVERYTHING), 0, None)
_BEGINS, _ENDS = {"begin"}, {"end", "end_string"}


def _searched(node: Node) -> Node:
    """`node` anywhere in a text, its outer anchors resolved."""
    match node:
        case Alt(options):
            return Alt(tuple(_searched(option) for option in options))
        case Seq(items) if len(items) == 1:
            return _searched(items[0])
        case Seq(items) if items and isinstance(items[0], Alt) and has_conditions(items[0]):
            rest = items[1:]
            return Alt(tuple(_searched(_sequence(option, rest)) for option in items[0].options))
        case Seq(items) if items and isinstance(items[-1], Alt) and has_conditions(items[-1]):
            before = Seq(items[:-1])
            return Alt(tuple(_searched(_sequence(before, (option,))) for option in items[-1].options))
        case Seq(items):
            parts = list(items)
        case _:
            parts = [node]
    while len(parts) > 1 and isinstance(parts[0], Seq):
        parts[:1] = parts[0].items
    while len(parts) > 1 and isinstance(parts[-1], Seq):
        parts[-1:] = parts[-1].items
    first, last = _ANYTHING, _ANYTHING
    while parts and isinstance(parts[0], At) and parts[0].kind in _BEGINS:
        del parts[0]
        first = EMPTY  # type: ignore[assignment]
    while parts and isinstance(parts[-1], At) and parts[-1].kind in _ENDS:
        del parts[-1]
        last = EMPTY  # type: ignore[assignment]
    if any(map(has_conditions, parts)):
        raise UnsupportedConstraint("has a condition inside")
    return Seq((first, *parts, last))


def _sequence(first: Node, rest: tuple[Node, ...]) -> Node:
    return Seq((*first.items, *rest) if isinstance(first, Seq) else (first, *rest))
