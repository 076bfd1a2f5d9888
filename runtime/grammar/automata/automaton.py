"""A deterministic automaton over classes of characters for a language tree, built within limits.

Thompson's construction, then subset construction (Rabin & Scott 1959). Characters that the pattern does not
distinguish share a class, so `.` or a Unicode category costs one transition.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from runtime.grammar.automata.charset import SURROGATES, Ranges, category, difference
from runtime.grammar.automata.regex_syntax import (
    Alt,
    At,
    AtKind,
    Chars,
    Node,
    Ref,
    Repeat,
    Seq,
    has_conditions,
    positions,
)
from runtime.protocol.errors import BadConstraint, UnsupportedConstraint


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of compiling one constraint. positions: characters of the pattern with counts written out; work:
    elementary steps (2 to 4 million a second); seconds: CPU time of the thread."""

    positions: int = 100_000
    states: int = 40_000
    table_bytes: int = 32 << 20
    work: int = 1_500_000
    seconds: float = 10.0


class Meter:
    """Counts one compilation, by one thread, against its limits."""

    def __init__(self, limits: Limits, kind: str = "regex") -> None:
        self.limits, self._kind = limits, kind
        self._work = 0
        self._ends = time.thread_time() + limits.seconds
        self._look = 0

    def spend(self, steps: int) -> None:
        self._work += steps
        if self._work > self.limits.work:
            raise self.too_large(f"needs more than {self.limits.work} steps to compile")
        if self._work - self._look > 20_000:
            self._look = self._work
            if time.thread_time() > self._ends:
                raise self.too_large(f"takes longer than {self.limits.seconds:g} s to compile")

    def states(self, states: int) -> None:
        if states > self.limits.states:
            raise self.too_large(f"needs more than {self.limits.states} states")

    def table(self, states: int, classes: int) -> None:
        if states * (classes + 1) * 4 > self.limits.table_bytes:
            raise self.too_large(f"needs a table of more than {self.limits.table_bytes >> 20} MiB")

    def too_large(self, what: str) -> UnsupportedConstraint:
        hint = "use smaller counts or fewer alternatives"
        return UnsupportedConstraint(f"the constraint {what}", where=self._kind, hint=hint)


class CharDfa(NamedTuple):
    """delta: int32 [states, classes + 1], -1 = no way on, the last column all -1; state 0 is the first.
    accepting: bool [states]. intervals: (first, last, class) of code points, disjoint, ascending, without
    surrogates. Every state can reach an accepting one."""

    delta: npt.NDArray[np.int32]
    accepting: npt.NDArray[np.bool_]
    intervals: tuple[tuple[int, int, int], ...]


def build(node: Node, limits: Limits) -> CharDfa:
    """The automaton of `node`. Raises BadConstraint when it passes the limits or accepts nothing."""
    meter = Meter(limits)
    needed = positions(node)
    if needed > limits.positions:
        raise meter.too_large(f"spells out to {needed} characters; at most {limits.positions} are taken")
    nfa = Nfa(meter)
    start = nfa.add(node, MATCH)
    conditions = has_conditions(node)
    extra = (((10, 10),), category(r"\w", False), category(r"\w", True)) if conditions else ()
    intervals, cells = partition([*nfa.sets, *extra], meter)
    return Subsets(nfa, cells, intervals, meter, conditions).run(start)


def partition(
    sets: Sequence[Ranges], meter: Meter
) -> tuple[tuple[tuple[int, int, int], ...], list[frozenset[int]]]:
    """The coarsest classes of characters that keep every set whole: intervals, and classes of each set."""
    meter.spend(sum(map(len, sets)) + 1)
    events: dict[int, int] = {}
    for number, ranges in enumerate(sets):
        for first, last in difference(ranges, SURROGATES):
            events[first] = events.get(first, 0) ^ (1 << number)
            events[last + 1] = events.get(last + 1, 0) ^ (1 << number)
    numbers: dict[int, int] = {}
    intervals: list[tuple[int, int, int]] = []
    member, since = 0, 0
    for at in sorted(events):
        if member:
            intervals.append((since, at - 1, numbers.setdefault(member, len(numbers))))
        member ^= events[at]
        since = at
    cells: list[set[int]] = [set() for _ in sets]
    for signature, cell in numbers.items():
        rest = signature
        while rest:
            low = rest & -rest
            cells[low.bit_length() - 1].add(cell)
            rest ^= low
    return tuple(intervals), [frozenset(one) for one in cells]


MATCH = 0


class Nfa:
    """`char[q]`: index of the set taken, -1 for none; `on[q]`: what follows; `at[q]`: a condition."""

    def __init__(self, meter: Meter) -> None:
        self.sets: list[Ranges] = []
        self._numbers: dict[Ranges, int] = {}
        self._meter = meter
        self.char: list[int] = [-1]
        self.on: list[tuple[int, ...]] = [()]
        self.at: list[AtKind | None] = [None]

    def state(self, char: int, on: tuple[int, ...], at: AtKind | None = None) -> int:
        """A new state; its number."""
        self._meter.spend(1)
        self.char.append(char)
        self.on.append(on)
        self.at.append(at)
        return len(self.char) - 1

    def add(self, node: Node, then: int) -> int:
        """The state from which `node`, and then `then`, is matched."""
        match node:
            case Chars(ranges):
                number = self._numbers.setdefault(ranges, len(self.sets))
                if number == len(self.sets):
                    self.sets.append(ranges)
                return self.state(number, (then,))
            case At(kind):
                return self.state(-1, (then,), kind)
            case Seq(items):
                for item in reversed(items):
                    then = self.add(item, then)
                return then
            case Alt(options):
                return self.state(-1, tuple(self.add(option, then) for option in options))
            case Repeat(item, low, high):
                return self._repeat(item, low, high, then)
            case Ref():
                raise AssertionError("a pattern refers to no rules")

    def _repeat(self, item: Node, low: int, high: int | None, then: int) -> int:
        entry = then
        if high is None:
            loop = self.state(-1, ())
            body = self.add(item, loop)
            self.on[loop] = (body, then)
            entry = body if low else loop
            low = max(low - 1, 0)
        else:
            for _ in range(high - low):  # each may leave for `then` at once: no chain of empty steps
                entry = self.state(-1, (self.add(item, entry), then))
        for _ in range(low):
            entry = self.add(item, entry)
        return entry


class _Next(NamedTuple):
    """The next character after a position: the end, or a character with these properties."""

    end: bool
    newline: bool
    word: bool
    word_a: bool


class Before(NamedTuple):
    start: bool
    newline: bool
    word: bool
    word_a: bool


_PLAIN = _Next(False, False, False, False)
_END = _Next(True, False, False, False)
START = Before(True, False, False, False)
# Whether \B holds in the empty text differs between versions of Python.
_NO_EDGE_IN_NOTHING = re.fullmatch(r"\B", "") is not None


class Subsets:
    """Subset construction. With conditions, a state also remembers what came before, and its closure is
    computed for each kind of next character. `$` may look past a last newline: states are numbered again in a
    second region "that newline must come now" and a third "the end must come now"."""

    def __init__(
        self,
        nfa: Nfa,
        cells: list[frozenset[int]],
        intervals: tuple[tuple[int, int, int], ...],
        meter: Meter,
        conditions: bool,
    ) -> None:
        self._nfa, self._cells, self._intervals, self._meter = nfa, cells, intervals, meter
        self._size = len(nfa.char)
        self._conditions = conditions
        every = frozenset().union(*cells) if cells else frozenset()
        self._classes = len(every)
        self._groups: dict[_Next, frozenset[int]] = {_PLAIN: every}
        if conditions:
            newline, word, word_a = cells[-3:]
            groups: dict[_Next, set[int]] = {}
            for cell in every:
                groups.setdefault(_Next(False, cell in newline, cell in word, cell in word_a), set()).add(
                    cell
                )
            self._groups = {kind: frozenset(group) for kind, group in groups.items()}
        self._splits: dict[
            tuple[_Next, tuple[int, ...]], list[tuple[tuple[int, ...], npt.NDArray[np.intp]]]
        ] = {}
        self._closures: dict[int, frozenset[int]] = {}
        self._numbers: dict[tuple[frozenset[int], Before], int] = {}
        self._by_core: dict[frozenset[int], int] = {}
        self._queue: list[tuple[frozenset[int], Before]] = []

    def run(self, start: int) -> CharDfa:
        self.number(frozenset((start,)), START)
        rows: list[list[tuple[npt.NDArray[np.intp], int]]] = []
        accepting: list[bool] = []
        while len(rows) < len(self._queue):
            accepting.append(self.accepts(len(rows)))
            rows.append(self.expand(len(rows)))
            self._meter.states(len(self._queue))
            self._meter.table(len(self._queue), self._classes)
        return self._finish(rows, accepting)

    def key(self, number: int) -> tuple[frozenset[int], Before]:
        return self._queue[number]

    @property
    def count(self) -> int:
        return len(self._queue)

    def expand(self, number: int) -> list[tuple[npt.NDArray[np.intp], int]]:
        """(classes, state after a character of them) of one state."""
        key, before = self._queue[number]
        row: list[tuple[npt.NDArray[np.intp], int]] = []
        for kind in self._groups:
            self._expand(self._reach(key, before, kind), kind, row)
        return row

    def accepts(self, number: int) -> bool:
        key, before = self._queue[number]
        return MATCH in (self._reach(key, before, _END) if self._conditions else key)

    def number(self, core: frozenset[int], before: Before) -> int:
        """The automaton's state for a set of NFA states. Without conditions it is known by its closure."""
        if self._conditions:
            return self.enter((core, before))
        number = self._by_core.get(core)
        if number is None:
            closed = frozenset().union(*(self._closure(state) for state in core))
            self._meter.spend(len(closed) + len(core))
            number = self._by_core[core] = self.enter((closed, START))
        return number

    def enter(self, key: tuple[frozenset[int], Before]) -> int:
        number = self._numbers.setdefault(key, len(self._queue))
        if number == len(self._queue):
            self._queue.append(key)
        return number

    def _reach(self, key: frozenset[int], before: Before, kind: _Next) -> Iterable[int]:
        return self._walk(key, before, kind) if self._conditions else key

    def _closure(self, state: int) -> frozenset[int]:
        """States that take a character, or match, behind empty steps; only without conditions."""
        known = self._closures.get(state)
        if known is None:
            char, on = self._nfa.char, self._nfa.on
            stack, seen, ends = [state], {state}, []
            while stack:
                at = stack.pop()
                if at == MATCH or char[at] >= 0:
                    ends.append(at)
                    continue
                for following in on[at]:
                    if following not in seen:
                        seen.add(following)
                        stack.append(following)
            self._meter.spend(len(seen))
            known = self._closures[state] = frozenset(ends)
        return known

    def _walk(self, core: Iterable[int], before: Before, kind: _Next) -> set[int]:
        size, nfa = self._size, self._nfa
        stack, seen, ends = list(core), set(core), set()
        while stack:
            at = stack.pop()
            region, state = divmod(at, size)
            if region == 2 and not kind.end:
                continue
            condition = nfa.at[state]
            if state == MATCH or nfa.char[state] >= 0:
                ends.add(at)
                continue
            if condition is not None:
                if condition == "end" and kind.newline and region == 0:
                    region = 1
                elif not (region == 1 and condition == "end") and not _holds(condition, before, kind):
                    continue
            for following in nfa.on[state]:
                at = region * size + following
                if at not in seen:
                    seen.add(at)
                    stack.append(at)
        self._meter.spend(len(seen))
        return {MATCH if end % size == MATCH and kind.end else end for end in ends}

    def _expand(
        self, numbered: Iterable[int], kind: _Next, row: list[tuple[npt.NDArray[np.intp], int]]
    ) -> None:
        """Add the transitions for next characters of one kind to `row`."""
        size, nfa = self._size, self._nfa
        targets: dict[int, list[int]] = {}
        count = 0
        for at in numbered:
            region, state = divmod(at, size)
            chars = nfa.char[state]
            if chars >= 0:
                count += 1
                targets.setdefault(chars, []).append(nfa.on[state][0] + (2 * size if region else 0))
        self._meter.spend(count + 1)
        for members, classes in self._split(kind, tuple(sorted(targets))):
            core = frozenset(target for member in members for target in targets[member])
            before = Before(False, kind.newline, kind.word, kind.word_a) if self._conditions else START
            self._meter.spend(len(members))
            row.append((classes, self.number(core, before)))

    def _split(
        self, kind: _Next, sets: tuple[int, ...]
    ) -> list[tuple[tuple[int, ...], npt.NDArray[np.intp]]]:
        """Classes of the group `kind`, grouped by which of `sets` they are in."""
        known = self._splits.get((kind, sets))
        if known is None:
            group = self._groups[kind]
            by_class: dict[int, list[int]] = {}
            for number in sets:
                for cell in self._cells[number] & group:
                    by_class.setdefault(cell, []).append(number)
            together: dict[tuple[int, ...], list[int]] = {}
            for cell, members in by_class.items():
                together.setdefault(tuple(members), []).append(cell)
            self._meter.spend(sum(map(len, by_class.values())))
            known = [
                (members, np.array(sorted(classes), dtype=np.intp)) for members, classes in together.items()
            ]
            self._splits[kind, sets] = known
        return known

    def _finish(self, rows: list[list[tuple[npt.NDArray[np.intp], int]]], accepting: list[bool]) -> CharDfa:
        """Drop the states that lead nowhere, and make the table."""
        sources: list[list[int]] = [[] for _ in rows]
        for number, row in enumerate(rows):
            for _, target in row:
                sources[target].append(number)
        live = {number for number, accepts in enumerate(accepting) if accepts}
        stack = list(live)
        while stack:
            for source in sources[stack.pop()]:
                if source not in live:
                    live.add(source)
                    stack.append(source)
        if 0 not in live:
            raise BadConstraint("no text can match the constraint", where="regex")
        renamed = {old: new for new, old in enumerate(sorted(live))}
        delta = np.full((len(live), self._classes + 1), -1, dtype=np.int32)
        for old, new in renamed.items():
            for classes, target in rows[old]:
                delta[new, classes] = renamed.get(target, -1)
        return CharDfa(delta, np.array([accepting[old] for old in renamed], dtype=np.bool_), self._intervals)


def _holds(condition: AtKind, before: Before, kind: _Next) -> bool:
    match condition:
        case "begin":
            return before.start
        case "begin_line":
            return before.start or before.newline
        case "end" | "end_string":
            return kind.end
        case "end_line":
            return kind.end or kind.newline
        case "edge":
            return before.word != kind.word
        case "edge_a":
            return before.word_a != kind.word_a
        case "no_edge" | "no_edge_a" if before.start and kind.end:
            return _NO_EDGE_IN_NOTHING
        case "no_edge":
            return before.word == kind.word
        case "no_edge_a":
            return before.word_a == kind.word_a
