"""Overlaps: what the texts of terminals have in common for a lexer: whether one text is both, and what
lengthens a text of one within another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from runtime.grammar.automata.automaton import Meter, partition
from runtime.grammar.automata.charset import Ranges
from runtime.grammar.automata.regex_syntax import Alt, Chars, Node, Repeat, Seq, nodes_of


class Overlap(NamedTuple):
    """same: some text is both; longer: the first bytes of characters that lengthen a text of the first
    within the second, as bits."""

    same: bool
    longer: int


class Overlaps:
    """The overlaps of terminals, by number: trees whose characters are those of `nodes`. Sets of bytes are
    bits of an int."""

    def __init__(self, nodes: Iterable[Node], meter: Meter) -> None:
        self._meter = meter
        self._classes, self._lead = _classes(nodes, meter)
        self._numbers: dict[Node, int] = {}
        self._automata: list[_Automaton] = []
        self._met: dict[tuple[int, int], Overlap] = {}
        self._firsts: list[int] = []

    def number(self, body: Node) -> int:
        """The number of a terminal: a tree without names."""
        number = self._numbers.setdefault(body, len(self._automata))
        if number == len(self._automata):
            automaton = _Automaton(body, self._classes, self._meter)
            self._automata.append(automaton)
            self._firsts.append(union_of(self._lead, automaton.first_set))
        return number

    def first(self, one: int) -> int:
        """The first bytes of all its texts."""
        return self._firsts[one]

    def alike(self, one: int, other: int) -> bool:
        """Whether some texts of the two begin with the same character."""
        return bool(self._automata[one].first_set & self._automata[other].first_set)

    def meet(self, one: int, other: int) -> Overlap:
        known = self._met.get((one, other))
        if known is None:
            known = self._met[one, other] = self._compare(one, other)
        return known

    def _compare(self, one: int, other: int) -> Overlap:
        first, second = self._automata[one], self._automata[other]
        if first.straight and second.straight:
            return self._side_by_side(first.sets, second.sets)
        reached = [0] * len(first.sets)  # positions of the second that the same text leads to
        fits = [_fitting(second, chars) for chars in first.sets]
        queue = list(bits_of(first.first))
        for position in queue:
            reached[position] |= second.first & fits[position]
        while queue:
            position = queue.pop()
            ahead = second.after(reached[position])
            self._meter.spend(1 + first.follow[position].bit_count())
            for after in bits_of(first.follow[position]):
                new = ahead & fits[after]
                if new & ~reached[after]:
                    reached[after] |= new
                    queue.append(after)
        ends = union_of(reached, first.last)
        longer = union_of(second.sets, second.after(ends))
        return Overlap(bool(ends & second.last), union_of(self._lead, longer))

    def _side_by_side(self, one: list[int], other: list[int]) -> Overlap:
        self._meter.spend(1)
        if any(not first & second for first, second in zip(one, other)):
            return Overlap(False, 0)
        longer = union_of(self._lead, other[len(one)]) if len(one) < len(other) else 0
        return Overlap(len(one) == len(other), longer)


class _Automaton:
    """The positions of a terminal's characters (Glushkov 1961), sets of them as bits of an int.

    sets: the characters of each position, bits by class; follow: the positions after it. straight: it is a
    sequence of characters without repeats or alternatives."""

    def __init__(self, node: Node, classes: Mapping[Ranges, int], meter: Meter) -> None:
        self._classes, self._meter = classes, meter
        self.sets: list[int] = []
        self.follow: list[int] = []
        _, self.first, self.last = self._add(node)
        self._after: dict[int, int] = {}
        in_a_row = self.follow == [2 << position for position in range(len(self.sets) - 1)] + [0]
        self.straight = in_a_row and self.first == 1 and self.last == 1 << (len(self.sets) - 1)
        self.first_set = union_of(self.sets, self.first)

    def after(self, positions: int) -> int:
        if positions not in self._after:
            self._meter.spend(positions.bit_count())
            self._after[positions] = union_of(self.follow, positions)
        return self._after[positions]

    def _add(self, node: Node) -> tuple[bool, int, int]:
        """Whether it may be empty, its first positions, its last ones."""
        self._meter.spend(1)
        match node:
            case Chars(ranges):
                self.sets.append(self._classes[ranges])
                self.follow.append(0)
                position = 1 << (len(self.sets) - 1)
                return False, position, position
            case Seq(items):
                return self._row(items)
            case Alt(options):
                parts = [self._add(option) for option in options]
                first = last = 0
                for _, begins, ends in parts:
                    first, last = first | begins, last | ends
                return any(part[0] for part in parts), first, last
            case Repeat(item, low, high):
                empty, first, last = self._row((item,) * max(low, 1))
                if high is None:
                    return self._again(item, empty or low == 0, first, last, low)
                for _ in range(high - max(low, 1)):  # each further one only after the one before
                    skipped, begins, ends = self._add(item)
                    self._join(last, begins)
                    first |= begins if empty else 0
                    last |= ends
                    empty = empty and skipped
                return empty or low == 0, first, last
            case _:
                raise AssertionError("a terminal has no rules and no conditions")

    def _again(self, item: Node, empty: bool, first: int, last: int, low: int) -> tuple[bool, int, int]:
        """The rest of a repeat without end."""
        if low <= 1:
            self._join(last, first)
            return empty, first, last
        _, begins, ends = self._add(item)
        self._join(last | ends, begins)
        return empty, first | (begins if empty else 0), last | ends

    def _row(self, items: tuple[Node, ...]) -> tuple[bool, int, int]:
        empty, first, last = True, 0, 0
        for item in items:
            skipped, begins, ends = self._add(item)
            self._join(last, begins)
            first |= begins if empty else 0
            last = ends | (last if skipped else 0)
            empty = empty and skipped
        return empty, first, last

    def _join(self, last: int, first: int) -> None:
        for position in bits_of(last):
            self.follow[position] |= first


def _fitting(automaton: _Automaton, chars: int) -> int:
    return sum(bool(some & chars) << position for position, some in enumerate(automaton.sets))


def _classes(nodes: Iterable[Node], meter: Meter) -> tuple[dict[Ranges, int], list[int]]:
    """The classes of each set of characters, and the first bytes of each class; as bits."""
    sets = {part.ranges: 0 for node in nodes for part in nodes_of(node) if isinstance(part, Chars)}
    intervals, cells = partition(list(sets), meter)
    lead = [0] * len(intervals)
    for first, last, number in intervals:
        lead[number] |= (2 << _lead_byte(last)) - (1 << _lead_byte(first))
    return {ranges: sum(1 << cell for cell in some) for ranges, some in zip(sets, cells)}, lead


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
