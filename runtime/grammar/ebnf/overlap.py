"""Overlaps: what the texts of terminals have in common for a lexer: whether one text is both, and what
lengthens a text of one within another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from runtime.grammar.automata.automaton import MATCH, START, Meter, Nfa, Subsets, partition
from runtime.grammar.automata.regex_syntax import Node


class Overlaps:
    """The overlaps of `terminals`, by number: trees without names. One automaton follows them all.
    Sets of bytes are bits of an int.

    firsts    the first bytes of all texts of each terminal
    longer    pair of terminals -> the first bytes of characters that lengthen a text of the first within the
              second
    """

    def __init__(self, terminals: Sequence[Node], meter: Meter) -> None:
        nfa, starts = Nfa(meter), []
        nfa.sets.append(())  # what the end of a terminal takes
        owner = [-1]  # of each state of the NFA
        for number, terminal in enumerate(terminals):
            starts.append(nfa.add(terminal, nfa.state(0, (MATCH,))))
            owner += [number] * (len(nfa.char) - len(owner))
        intervals, cells = partition(nfa.sets, meter)
        lead = [0] * len(intervals)
        for first, last, cell in intervals:
            lead[cell] |= (2 << _lead_byte(last)) - (1 << _lead_byte(first))
        bytes_of = [union_of(lead, sum(1 << cell for cell in some)) for some in cells]
        self._begins: list[set[int]] = [set() for _ in terminals]  # with which classes of characters
        self.firsts = [0] * len(terminals)
        self.longer: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._same: set[tuple[int, int]] = set()
        subsets = Subsets(nfa, cells, intervals, meter, False)
        state = subsets.number(frozenset(starts), START)
        while state < subsets.count:
            members = subsets.key(state)[0]
            ended = [owner[one] for one in members if not nfa.char[one]]
            going: defaultdict[int, int] = defaultdict(int)
            for one in members:
                going[owner[one]] |= bytes_of[nfa.char[one]]
                if state == 0:
                    self._begins[owner[one]] |= cells[nfa.char[one]]
                    self.firsts[owner[one]] |= bytes_of[nfa.char[one]]
            for first in ended:
                self._same.update((first, second) for second in ended)
                for second, bytes_ in going.items():
                    self.longer[first, second] |= bytes_
            meter.spend(len(ended) * (len(ended) + len(going)))
            subsets.expand(state)  # which enters the states after it
            state += 1

    def alike(self, one: int, other: int) -> bool:
        """Whether some texts of the two begin with the same character."""
        return not self._begins[one].isdisjoint(self._begins[other])

    def same(self, one: int, other: int) -> bool:
        """Whether some text is both."""
        return (one, other) in self._same


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
