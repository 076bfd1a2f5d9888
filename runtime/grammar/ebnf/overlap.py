"""Overlaps: what the texts of terminals have in common for a lexer: whether one text is both, and what
lengthens a text of one within another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from runtime.grammar.automata.automaton import MATCH, START, Meter, Nfa, Subsets, partition
from runtime.grammar.automata.regex_syntax import Node


class Overlap(NamedTuple):
    """same: some text is both. second, first: the first bytes of characters that lengthen a text of the
    first terminal within the second one, and a text of the second within the first; as bits."""

    same: bool
    second: int
    first: int


class Overlaps:
    """The overlaps of `terminals`, by number: trees without names. One automaton over classes of characters
    follows them all. Sets of bytes are bits of an int."""

    def __init__(self, terminals: Sequence[Node], meter: Meter) -> None:
        self._meter = meter
        nfa = Nfa(meter)
        starts = [nfa.add(terminal, MATCH) for terminal in terminals]
        intervals, cells = partition(nfa.sets, meter)
        self._lead = [0] * len(intervals)
        for first, last, number in intervals:
            self._lead[number] |= (2 << _lead_byte(last)) - (1 << _lead_byte(first))
        self._subsets = Subsets(nfa, cells, intervals, meter, False)
        self._starts = [self._subsets.number(frozenset((start,)), START) for start in starts]
        self._rows: dict[int, dict[int, int]] = {}
        self._met: dict[tuple[int, int], Overlap] = {}

    @cached_property
    def firsts(self) -> list[int]:
        """The first bytes of all texts of each terminal."""
        return [self._bytes(start) for start in self._starts]

    def alike(self, one: int, other: int) -> bool:
        """Whether some texts of the two begin with the same character."""
        rows = self._row(self._starts[one]), self._row(self._starts[other])
        return not rows[0].keys().isdisjoint(rows[1])

    def meet(self, one: int, other: int) -> Overlap:
        if (one, other) not in self._met:
            self._met[one, other] = self._compare(self._starts[one], self._starts[other])
        return self._met[one, other]

    def _compare(self, one: int, other: int) -> Overlap:
        same, longer, lengthened = False, 0, 0
        queue = [(one, other)]
        met = set(queue)
        for first, second in queue:  # the states of both after the same text
            whole = self._subsets.accepts(first), self._subsets.accepts(second)
            same |= all(whole)
            longer |= self._bytes(second) if whole[0] else 0
            lengthened |= self._bytes(first) if whole[1] else 0
            ahead, behind = self._row(first), self._row(second)
            after = {(ahead[kind], behind[kind]) for kind in ahead.keys() & behind.keys()} - met
            self._meter.spend(1 + len(after))
            met |= after
            queue += after
        return Overlap(same, longer, lengthened)

    def _row(self, state: int) -> dict[int, int]:
        """The state after each class of characters that may follow."""
        if state not in self._rows:
            row = self._subsets.expand(state)
            self._rows[state] = {kind: after for classes, after in row for kind in classes.tolist()}
        return self._rows[state]

    def _bytes(self, state: int) -> int:
        """The first bytes of the characters that may follow."""
        return union_of(self._lead, sum(1 << kind for kind in self._row(state)))


def _lead_byte(point: int) -> int:
    if point < 0x80:
        return point
    if point < 0x800:
        return 0xC0 | point >> 6
    return 0xE0 | point >> 12 if point < 0x10000 else 0xF0 | point >> 18


def bits_of(value: int) -> Iterator[int]:
    """The positions of its bits, ascending."""
    while value:
        low = value & -value
        yield low.bit_length() - 1
        value ^= low


def union_of(sets: Sequence[int], numbers: int) -> int:
    """The union of those of `sets` whose numbers are the bits of `numbers`."""
    union = 0
    for number in bits_of(numbers):
        union |= sets[number]
    return union
