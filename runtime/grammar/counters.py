"""A language tree becomes a deterministic automaton with counters: `x{3,4096}` is one state and a number.

Counting automata, made deterministic where every state of a set of states agrees on its counters' values (see
Turonova et al., "Regex matching with counting-set automata", OOPSLA 2020, for the general question). Repeats
for which that does not hold, such as the second one of `[a-z]{2,50}[a-c]{1,30}`, are written out as states.
Repeats that are never open at the same time share a slot, the number of repeats around them. It does not know
bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from runtime.grammar.automaton import Limits, Meter, partition
from runtime.grammar.count_nfa import MATCH, CountNfa, Step, prune
from runtime.grammar.regex_syntax import Node, positions
from runtime.protocol.errors import BadConstraint

UNROLLED = 32
"""Repeats that spell out to fewer characters become states: that costs less than a counter."""

_ROUNDS = 8
_FAR = 1 << 40
_WAY = 5  # steps of the limits that one empty step with counters takes
_WRITTEN = 20_000

Interval = tuple[int, int]


class Change(NamedTuple):
    """What becomes of a counter's value v: keep * v + add, with keep 0 or 1."""

    keep: int
    add: int


_KEPT, _CLEARED = Change(1, 0), Change(0, 0)


@dataclass(frozen=True, eq=False)
class CountDfa:
    """controls, classes: how many of each. radix [slots]: values of slot s lie in 0 .. radix[s] - 1; a slot
    that nothing counts in holds 0. first, count int32 [controls, classes + 1]: the edges a class may take,
    of which at most one fits the values; the last column has none. target int32 [edges]; low, high int64
    [slots, edges]: values an edge is open for, both ends inclusive; keep bool, add int64 [slots, edges]: the
    value after it is keep * value + add. accepts: for each control the boxes of values ((low, high) per slot)
    in which it is a match. intervals: as CharDfa's. Every state that can be reached can reach a match."""

    controls: int
    classes: int
    radix: tuple[int, ...]
    first: npt.NDArray[np.int32]
    count: npt.NDArray[np.int32]
    target: npt.NDArray[np.int32]
    low: npt.NDArray[np.int64]
    high: npt.NDArray[np.int64]
    keep: npt.NDArray[np.bool_]
    add: npt.NDArray[np.int64]
    accepts: tuple[tuple[tuple[Interval, ...], ...], ...]
    intervals: tuple[tuple[int, int, int], ...]

    def repeating(self) -> npt.NDArray[np.intp]:
        """The controls that lead straight back to themselves."""
        taken = self.count > 0
        source = np.nonzero(taken)[0]
        return np.unique(source[self.target[self.first[taken]] == source])


class _Ambiguous(Exception):
    """Repeats whose count is not one number."""

    def __init__(self, repeats: set[int]) -> None:
        self.repeats = repeats


def build_counted(node: Node, limits: Limits, unrolled: int = UNROLLED) -> CountDfa | None:
    """The automaton of `node`, which holds no At; None where no repeat of it can be counted within half of
    the limits' work, so that it has to be written out. Raises BadConstraint when it accepts nothing."""
    trimmed = prune(node)
    if trimmed is None:
        raise BadConstraint("no text can match the constraint", where="regex")
    meter = Meter(
        Limits(limits.positions, limits.states, limits.table_bytes, limits.work // 2, limits.seconds)
    )
    given_up: set[int] = set()
    for _ in range(_ROUNDS):
        nfa = CountNfa(meter, unrolled, given_up)
        if nfa.size(trimmed) > limits.positions:
            return None
        if not nfa.counts_any(trimmed):
            return None
        try:
            start = nfa.add(trimmed, MATCH, ())
            return _Sets(nfa, meter).run(start) if nfa.counters else None
        except _Ambiguous as found:
            given_up |= found.repeats
        except BadConstraint:
            if positions(trimmed) > _WRITTEN:
                raise
            return None
    return None


class _Path(NamedTuple):
    """From a state over empty steps to a character (`char`, -1: to a match) and behind it to `state`."""

    char: int
    state: int
    changes: tuple[Change, ...]
    box: tuple[Interval, ...]


class _Way(NamedTuple):
    state: int
    changes: tuple[Change, ...]
    box: tuple[Interval, ...]
    fresh: frozenset[int]


class _Row(NamedTuple):
    """One edge of the result: box of values, target, changes."""

    box: tuple[Interval, ...]
    target: int
    changes: tuple[Change, ...]


class _Sets:
    """Subset construction over states that agree on their counters."""

    def __init__(self, nfa: CountNfa, meter: Meter) -> None:
        self._nfa, self._meter = nfa, meter
        self._slots = max((one.slot for one in nfa.counters), default=-1) + 1
        self._radix = tuple(
            max(one.high for one in nfa.counters if one.slot == slot) + 1 for slot in range(self._slots)
        )
        self.intervals, cells = partition(nfa.sets, meter)
        self._cells = cells
        self._classes = len(frozenset().union(*cells)) if cells else 0
        self._paths_of: dict[int, list[_Path]] = {}
        self._splits: dict[tuple[int, ...], list[tuple[tuple[int, ...], npt.NDArray[np.intp]]]] = {}
        self._numbers: dict[frozenset[int], int] = {}
        self._queue: list[frozenset[int]] = []

    def run(self, start: int) -> CountDfa:
        state, _ = self._settle(start, (_CLEARED,) * self._slots)
        self._number(frozenset((state,)))
        rows: list[list[tuple[npt.NDArray[np.intp], list[_Row]]]] = []
        accepts: list[tuple[tuple[Interval, ...], ...]] = []
        while len(rows) < len(self._queue):
            core = self._queue[len(rows)]
            paths = [path for state in sorted(core) for path in self._paths(state)]
            self._meter.spend(len(paths) + 1)
            bounds = self._bounds(core)
            accepts.append(tuple(dict.fromkeys(path.box for path in paths if path.char < 0)))
            rows.append(self._expand(paths, bounds))
            self._meter.states(len(self._queue))
            self._meter.table(2 * len(self._queue), self._classes)
        return self._finish(rows, accepts)

    def _number(self, core: frozenset[int]) -> int:
        number = self._numbers.setdefault(core, len(self._queue))
        if number == len(self._queue):
            self._queue.append(core)
        return number

    def _bounds(self, core: frozenset[int]) -> list[int]:
        """The largest value of each slot."""
        bounds = [0] * self._slots
        for state in core:
            for slot, number in enumerate(self._nfa.scope[state]):
                bounds[slot] = max(bounds[slot], self._nfa.counters[number].high)
        return bounds

    def _settle(self, state: int, changes: tuple[Change, ...]) -> tuple[int, tuple[Change, ...]]:
        """Follow empty steps that are the only way on."""
        met = {state}
        while len(self._nfa.steps[state]) == 1:
            edge = self._nfa.steps[state][0]
            if edge.target in met:
                break
            met.add(edge.target)
            if edge.counter >= 0:
                slot = self._nfa.counters[edge.counter].slot
                old = changes[slot]
                changed = _CLEARED if edge.op == "enter" else Change(old.keep, old.add + 1)
                changes = (*changes[:slot], changed, *changes[slot + 1 :])
            state = edge.target
        return state, changes

    def _paths(self, state: int) -> list[_Path]:
        found = self._paths_of.get(state)
        if found is None:
            found = self._paths_of[state] = self._find_paths(state)
        return found

    def _find_paths(self, start: int) -> list[_Path]:
        nfa = self._nfa
        found: list[_Path] = []
        first = _Way(start, (_KEPT,) * self._slots, ((0, _FAR),) * self._slots, frozenset())
        stack, seen = [first], {first}
        while stack:
            way = stack.pop()
            self._meter.spend(_WAY)
            if way.state == MATCH:
                found.append(_Path(-1, MATCH, (_CLEARED,) * self._slots, way.box))
                continue
            if nfa.char[way.state] >= 0:
                target, changes = self._settle(nfa.on[way.state], way.changes)
                open_slots = len(nfa.scope[target])
                changes = (*changes[:open_slots], *(_CLEARED,) * (self._slots - open_slots))
                found.append(_Path(nfa.char[way.state], target, changes, way.box))
                continue
            for edge in nfa.steps[way.state]:
                after = self._take(way, edge)
                if after is not None and after not in seen:
                    seen.add(after)
                    stack.append(after)
        return found

    def _take(self, way: _Way, edge: Step) -> _Way | None:
        """After one empty step; None where the counter does not let it."""
        if edge.counter < 0:
            return _Way(edge.target, way.changes, way.box, way.fresh)
        counter = self._nfa.counters[edge.counter]
        slot, fresh = counter.slot, way.fresh
        change, (low, high) = way.changes[slot], way.box[slot]
        match edge.op:
            case "enter":
                change = _CLEARED
            case "loop":
                high, low = (
                    (min(high, counter.high - 1 - change.add), low)
                    if change.keep
                    else ((high, low) if change.add < counter.high else (-1, 0))
                )
                fresh = fresh | {edge.counter}
            case "exit":
                low, high = (
                    (max(low, counter.low - change.add), high)
                    if change.keep
                    else ((low, high) if change.add >= counter.low else (0, -1))
                )
                change, fresh = _CLEARED, fresh - {edge.counter}
            case _:
                if edge.counter in fresh:
                    return None  # a round that took nothing
                change = Change(change.keep, change.add + 1)
        if low > high:
            return None
        return _Way(
            edge.target,
            (*way.changes[:slot], change, *way.changes[slot + 1 :]),
            (*way.box[:slot], (low, high), *way.box[slot + 1 :]),
            fresh,
        )

    def _expand(self, paths: list[_Path], bounds: list[int]) -> list[tuple[npt.NDArray[np.intp], list[_Row]]]:
        by_set: dict[int, list[_Path]] = {}
        for path in paths:
            if path.char >= 0:
                by_set.setdefault(path.char, []).append(path)
        out = []
        for members, classes in self._split(tuple(sorted(by_set))):
            candidates = [path for member in members for path in by_set[member]]
            self._meter.spend(len(candidates))
            out.append((classes, self._rows(candidates, bounds)))
        return out

    def _rows(self, paths: list[_Path], bounds: list[int]) -> list[_Row]:
        """The edges for one class: the values cut into boxes in which the same paths are open."""
        pieces: list[list[Interval]] = []
        for slot in range(self._slots):
            cuts = {0, bounds[slot] + 1}
            for path in paths:
                low, high = path.box[slot]
                cuts |= {cut for cut in (low, high + 1) if cut <= bounds[slot]}
            ordered = sorted(cuts)
            pieces.append([(low, high - 1) for low, high in itertools.pairwise(ordered)])
        rows: list[_Row] = []
        for box in itertools.product(*pieces):
            self._meter.spend(len(paths))
            open_ = [path for path in paths if _inside(box, path.box)]
            if open_:
                target = self._number(frozenset(path.state for path in open_))
                rows.append(_Row(box, target, self._agreed(open_, box)))
        return _merged(rows, self._slots)

    def _agreed(self, paths: list[_Path], box: tuple[Interval, ...]) -> tuple[Change, ...]:
        """What becomes of each slot. Raises _Ambiguous where the paths do not agree."""
        changes: list[Change] = []
        for slot in range(self._slots):
            known: Change | None = None
            low, high = box[slot]
            for path in paths:
                if len(self._nfa.scope[path.state]) <= slot:
                    continue
                change = path.changes[slot]
                if known is None or _same(known, change, low, high):
                    known = change if known is None else known
                else:
                    raise _Ambiguous(self._open(paths, slot))
            changes.append(known or _CLEARED)
        return tuple(changes)

    def _open(self, paths: Iterable[_Path], slot: int) -> set[int]:
        """The repeats that are counted in a slot behind `paths`."""
        scopes = [self._nfa.scope[path.state] for path in paths]
        return {self._nfa.counters[scope[slot]].repeat for scope in scopes if len(scope) > slot}

    def _split(self, sets: tuple[int, ...]) -> list[tuple[tuple[int, ...], npt.NDArray[np.intp]]]:
        """Classes, grouped by which of `sets` they are in."""
        found = self._splits.get(sets)
        if found is None:
            by_class: dict[int, list[int]] = {}
            for number in sets:
                for cell in self._cells[number]:
                    by_class.setdefault(cell, []).append(number)
            together: dict[tuple[int, ...], list[int]] = {}
            for cell, members in by_class.items():
                together.setdefault(tuple(members), []).append(cell)
            self._meter.spend(sum(map(len, by_class.values())))
            found = [(members, np.array(sorted(cells), dtype=np.intp)) for members, cells in together.items()]
            self._splits[sets] = found
        return found

    def _finish(
        self,
        rows: list[list[tuple[npt.NDArray[np.intp], list[_Row]]]],
        accepts: list[tuple[tuple[Interval, ...], ...]],
    ) -> CountDfa:
        first = np.zeros((len(rows), self._classes + 1), dtype=np.int32)
        count = np.zeros_like(first)
        edges: list[_Row] = []
        for control, row in enumerate(rows):
            for classes, taken in row:
                first[control, classes] = len(edges)
                count[control, classes] = len(taken)
                edges.extend(taken)
        shape = (len(edges), self._slots)
        boxes = np.array([edge.box for edge in edges], dtype=np.int64).reshape(*shape, 2)
        changes = np.array([edge.changes for edge in edges], dtype=np.int64).reshape(*shape, 2)
        return CountDfa(
            len(rows), self._classes, self._radix, first, count,
            np.array([edge.target for edge in edges], dtype=np.int32),
            np.ascontiguousarray(boxes[:, :, 0].T), np.ascontiguousarray(boxes[:, :, 1].T),
            np.ascontiguousarray(changes[:, :, 0].T > 0), np.ascontiguousarray(changes[:, :, 1].T),
            tuple(accepts), self.intervals,
        )  # fmt: skip


def _inside(inner: tuple[Interval, ...], outer: tuple[Interval, ...]) -> bool:
    return all(a >= c and b <= d for (a, b), (c, d) in zip(inner, outer, strict=True))


def _same(one: Change, other: Change, low: int, high: int) -> bool:
    """Whether two changes come to the same for values in low .. high."""
    return one == other or (low == high and one.keep * low + one.add == other.keep * low + other.add)


def _merged(rows: list[_Row], slots: int) -> list[_Row]:
    """Boxes side by side that lead the same way, as one."""
    for slot in range(slots):
        kept: list[_Row] = []
        for row in sorted(rows, key=lambda row: (row.box[:slot], row.box[slot + 1 :], row.box[slot])):
            last = kept[-1] if kept else None
            if (
                last is not None
                and last[1:] == row[1:]
                and last.box[:slot] == row.box[:slot]
                and last.box[slot + 1 :] == row.box[slot + 1 :]
                and last.box[slot][1] + 1 == row.box[slot][0]
            ):
                joined = (last.box[slot][0], row.box[slot][1])
                kept[-1] = last._replace(box=(*row.box[:slot], joined, *row.box[slot + 1 :]))
            else:
                kept.append(row)
        rows = kept
    return rows
