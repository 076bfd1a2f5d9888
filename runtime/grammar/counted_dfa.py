"""CountedByteDfa: the byte-level automaton of a constraint whose repeats are counted, not written out.

A state is one int: node of the UTF-8 table + nodes * (control + controls * (value of slot 0 + radix 0 *
(value of slot 1 + ...))). It does not know tokens.
"""

from __future__ import annotations

import hashlib
from functools import cached_property

import numpy as np
import numpy.typing as npt

from runtime.grammar.byte_automaton import DEAD, ByteAutomaton
from runtime.grammar.counters import CountDfa
from runtime.grammar.utf8 import utf8_table

_ROWS_KEPT = 1024
_MOST_STATES = 1 << 62


class CountedByteDfa(ByteAutomaton):
    """`counts` read over bytes."""

    def __init__(self, counts: CountDfa, utf8: npt.NDArray[np.int32] | None = None) -> None:
        self.counts = counts
        self.utf8 = utf8_table(counts.intervals, counts.classes) if utf8 is None else utf8
        self.nodes, self.classes = len(self.utf8), counts.classes
        self.intervals = counts.intervals
        self._rows: dict[int, npt.NDArray[np.int64]] = {}

    def fits(self) -> bool:
        """Whether every state is an int of 63 bits."""
        size = self.nodes * self.counts.controls
        for radix in self.counts.radix:
            size *= radix
        return size < _MOST_STATES

    def place(self, state: int) -> tuple[int, tuple[int, ...], int]:
        """(control, values, node) of a state."""
        rest, node = divmod(state, self.nodes)
        rest, control = divmod(rest, self.counts.controls)
        values = []
        for radix in self.counts.radix:
            rest, value = divmod(rest, radix)
            values.append(value)
        return control, tuple(values), node

    def state(self, control: int, values: tuple[int, ...], node: int = 0) -> int:
        number = 0
        for radix, value in zip(reversed(self.counts.radix), reversed(values), strict=True):
            number = number * radix + value
        return (number * self.counts.controls + control) * self.nodes + node

    @property
    def nbytes(self) -> int:
        counts = self.counts
        arrays = (counts.first, counts.count, counts.target, counts.low, counts.high, counts.keep, counts.add)
        return self.utf8.nbytes + sum(part.nbytes for part in arrays)

    @cached_property
    def content(self) -> bytes:
        """A digest of the automaton."""
        counts = self.counts
        digest = hashlib.blake2b(repr((counts.radix, counts.accepts)).encode(), digest_size=20)
        arrays = (counts.first, counts.count, counts.target, counts.low, counts.high, counts.keep, counts.add)
        for part in (*arrays, self.utf8):
            digest.update(repr(part.shape).encode() + part.tobytes())
        return digest.digest()

    @cached_property
    def gates(self) -> Gates:
        return Gates(self)

    def step(self, state: int, byte: int) -> int:
        control, values, node = self.place(state)
        entry = int(self.utf8[node, byte])
        if entry >= 0:
            return state - node + entry if self._opens(control, values, entry) else DEAD
        edge = self.edge(control, values, ~entry)
        return DEAD if edge < 0 else self.state(int(self.counts.target[edge]), self.after(edge, values))

    def _opens(self, control: int, values: tuple[int, ...], node: int) -> bool:
        gates = self.gates
        first = int(gates.first[control])
        for row in range(first, first + int(gates.count[control])):
            if gates.open[row, node] and _within(values, gates.low[:, row], gates.high[:, row]):
                return True
        return False

    def edge(self, control: int, values: tuple[int, ...], kind: int) -> int:
        """The edge that a character of class `kind` takes, -1 for none."""
        counts = self.counts
        first = int(counts.first[control, kind])
        for edge in range(first, first + int(counts.count[control, kind])):
            if _within(values, counts.low[:, edge], counts.high[:, edge]):
                return edge
        return -1

    def after(self, edge: int, values: tuple[int, ...]) -> tuple[int, ...]:
        keep, add = self.counts.keep[:, edge].tolist(), self.counts.add[:, edge].tolist()
        return tuple(k * v + a for k, v, a in zip(keep, values, add, strict=True))

    def accepts(self, state: int) -> bool:
        control, values, node = self.place(state)
        return node == 0 and self.accepts_at(control, values)

    def accepts_at(self, control: int, values: tuple[int, ...]) -> bool:
        return any(
            all(low <= value <= high for value, (low, high) in zip(values, box, strict=True))
            for box in self.counts.accepts[control]
        )

    def is_final(self, state: int) -> bool:
        control, values, node = self.place(state)
        if node:
            return False
        gates = self.gates
        first = int(gates.first[control])
        rows = range(first, first + int(gates.count[control]))
        return not any(_within(values, gates.low[:, row], gates.high[:, row]) for row in rows)

    def following(self, state: int) -> npt.NDArray[np.int64]:
        control, values, node = self.place(state)
        entries = self.utf8[node].astype(np.int64)
        leaf = entries < 0
        after = self._row(control, values)[np.where(leaf, ~entries, -1)]
        inner = np.where(leaf, 0, entries)
        opens = np.zeros(self.nodes, dtype=np.bool_)
        gates = self.gates
        first = int(gates.first[control])
        for row in range(first, first + int(gates.count[control])):
            if _within(values, gates.low[:, row], gates.high[:, row]):
                opens |= gates.open[row]
        return np.where(leaf, after, np.where(opens[inner], state - node + inner, DEAD))

    def _row(self, control: int, values: tuple[int, ...]) -> npt.NDArray[np.int64]:
        """int64 [classes + 1]: the state after a character of each class."""
        key = self.state(control, values)
        row = self._rows.get(key)
        if row is None:
            counts = self.counts
            row = np.full(counts.classes + 1, DEAD, dtype=np.int64)
            first, count = counts.first[control], counts.count[control]
            for start in np.unique(first[count > 0]).tolist():
                classes = np.flatnonzero((first == start) & (count > 0))
                edge = self.edge(control, values, int(classes[0]))
                if edge >= 0:
                    row[classes] = self.state(int(counts.target[edge]), self.after(edge, values))
            if len(self._rows) >= _ROWS_KEPT:
                self._rows.clear()
            self._rows[key] = row
        return row


class Gates:
    """Inside of a character: for each control some boxes of values, and the nodes of the UTF-8 table from
    which an allowed character can be completed in that box.

    first, count int64 [controls]: rows of a control; low, high int64 [slots, rows]; open bool [rows, nodes].
    """

    def __init__(self, dfa: CountedByteDfa) -> None:
        counts = dfa.counts
        below = nodes_below(dfa.utf8, counts.classes + 1)
        boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        rows: list[npt.NDArray[np.bool_]] = []
        self.first = np.zeros(counts.controls, dtype=np.int64)
        self.count = np.zeros(counts.controls, dtype=np.int64)
        low, high = counts.low.T.tolist(), counts.high.T.tolist()
        for control in range(counts.controls):
            first, count = counts.first[control], counts.count[control]
            starts, where = np.unique(np.where(count > 0, first, -1), return_inverse=True)
            by_box: dict[tuple[tuple[int, ...], tuple[int, ...]], npt.NDArray[np.bool_]] = {}
            for number, start in enumerate(starts.tolist()):
                if start < 0:
                    continue
                classes = where == number
                for edge in range(start, start + int(count[classes.argmax()])):
                    box = tuple(low[edge]), tuple(high[edge])
                    by_box[box] = by_box[box] | classes if box in by_box else classes
            self.first[control], self.count[control] = len(rows), len(by_box)
            boxes.extend(by_box)
            rows.extend(by_box.values())
        shape = (len(rows), len(counts.radix))
        self.low = np.array([box[0] for box in boxes], dtype=np.int64).reshape(shape).T.copy()
        self.high = np.array([box[1] for box in boxes], dtype=np.int64).reshape(shape).T.copy()
        allowed = np.array(rows, dtype=np.float32).reshape(len(rows), counts.classes + 1)
        self.open: npt.NDArray[np.bool_] = (allowed @ below.T.astype(np.float32)) > 0


def nodes_below(utf8: npt.NDArray[np.int32], width: int) -> npt.NDArray[np.bool_]:
    """bool [nodes, width]: the classes of the characters that go on from each node of a UTF-8 table."""
    nodes = len(utf8)
    below = np.zeros((nodes, width), dtype=np.bool_)
    at, byte = np.nonzero(utf8 < 0)
    below[at, ~utf8[at, byte]] = True
    inner = utf8 >= 0
    parents = np.flatnonzero(inner.any(axis=1)).tolist()
    for node in sorted(parents, key=lambda node: node or nodes):  # children have smaller numbers; the root
        below[node] |= below[utf8[node, inner[node]]].any(axis=0)  # comes last
    return below


def _within(values: tuple[int, ...], low: npt.NDArray[np.int64], high: npt.NDArray[np.int64]) -> bool:
    return all(a <= value <= b for value, a, b in zip(values, low.tolist(), high.tolist(), strict=True))
