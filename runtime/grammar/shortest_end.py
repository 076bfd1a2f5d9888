"""ShortestEnds: the shortest text that leads from a state of an automaton to a match.

A search with an exact lower bound (A*: Hart, Nilsson & Raphael 1968): how far each control is from a match
when counts are left aside. It knows no tokens.
"""

from __future__ import annotations

import heapq
from functools import cached_property

import numpy as np
import numpy.typing as npt

from runtime.grammar.counted_dfa import CountedByteDfa

_WORK = 20_000
_KEPT = 4096


class ShortestEnds:
    """Of one automaton. Counts characters, not bytes. Thread-safe: its caches only grow, up to a bound."""

    def __init__(self, dfa: CountedByteDfa) -> None:
        self._dfa = dfa
        self._known: dict[int, tuple[bytes, int]] = {}  # state -> (a character, the state after it)
        self._edges: dict[int, list[tuple[int, int]]] = {}

    def text(self, state: int) -> bytes | None:
        """The shortest text from `state` to a match; None where it was not found within bounds."""
        parts: list[bytes] = []
        for _ in range(3):
            if state % self._dfa.nodes == 0:
                break
            byte = self._dfa.next_bytes(state)[0]
            parts.append(bytes((byte,)))
            state = self._dfa.step(state, byte)
        if not self._dfa.accepts(state) and state not in self._known and not self._search(state):
            return None
        while not self._dfa.accepts(state):
            if state not in self._known:
                return None
            char, state = self._known[state]
            parts.append(char)
        return b"".join(parts)

    def _search(self, start: int) -> bool:
        """Find the way from `start`, and keep it."""
        dfa, far = self._dfa, self._far
        source: dict[int, tuple[int, int]] = {start: (-1, -1)}
        cost = {start: 0}
        queue = [(int(far[dfa.place(start)[0]]), 0, start)]
        done: set[int] = set()
        while queue and len(cost) < _WORK:
            _, negative, state = heapq.heappop(queue)
            if state in done:
                continue
            done.add(state)
            if dfa.accepts(state) or state in self._known:
                self._keep(state, source)
                return True
            control, values, _ = dfa.place(state)
            for kind, edge in self._ways(control):
                if dfa.edge(control, values, kind) != edge:
                    continue
                after = dfa.state(int(dfa.counts.target[edge]), dfa.after(edge, values))
                steps = 1 - negative
                if after not in cost or steps < cost[after]:
                    cost[after] = steps
                    source[after] = state, kind
                    bound = steps + int(far[int(dfa.counts.target[edge])])
                    heapq.heappush(queue, (bound, -steps, after))
        return False

    def _keep(self, end: int, source: dict[int, tuple[int, int]]) -> None:
        if len(self._known) > _KEPT:
            self._known = {}
        known = self._known
        state = end
        while (step := source[state])[0] >= 0:
            known[step[0]] = self._character(step[1]), state
            state = step[0]

    def _ways(self, control: int) -> list[tuple[int, int]]:
        """(a class, an edge) for each edge of a control."""
        found = self._edges.get(control)
        if found is None:
            counts = self._dfa.counts
            first, count = counts.first[control], counts.count[control]
            by_edge: dict[int, int] = {}
            for kind in sorted(np.flatnonzero(count).tolist(), key=self._taste):
                for edge in range(int(first[kind]), int(first[kind] + count[kind])):
                    by_edge.setdefault(edge, kind)
            nearest = sorted((int(self._far[counts.target[edge]]), edge) for edge in by_edge)
            found = [(by_edge[edge], edge) for _, edge in nearest]
            if len(self._edges) < _KEPT:
                self._edges[control] = found
        return found

    def _taste(self, kind: int) -> tuple[int, bytes]:
        """Short and plain characters first."""
        char = self._character(kind)
        return len(char) + (
            0 if char.isalnum() else 1 if char.isascii() and char.decode().isprintable() else 4
        ), char

    def _character(self, kind: int) -> bytes:
        return self._characters[kind]

    @cached_property
    def _characters(self) -> list[bytes]:
        """For each class one of its characters, a letter or digit where it has one."""
        found: list[bytes] = [b""] * (self._dfa.counts.classes + 1)
        for first, last, kind in self._dfa.counts.intervals:
            for low, high in ((97, 122), (48, 57), (65, 90), (33, 126), (32, 32), (0, 0x10FFFF)):
                point = max(first, low)
                if point > min(last, high):
                    continue
                char = chr(point).encode("utf-8", "replace")
                if not found[kind] or (char.isalnum() and not found[kind].isalnum()):
                    found[kind] = char
                break
        for byte, entry in enumerate(self._dfa.utf8[0].tolist()):
            if entry < 0 and not found[~entry]:
                found[~entry] = bytes((byte,))
        return found

    @cached_property
    def _far(self) -> npt.NDArray[np.int64]:
        """int64 [controls]: characters to a match, counts left aside."""
        counts = self._dfa.counts
        controls, kinds = np.nonzero(counts.count)
        per = counts.count[controls, kinds]
        first = np.repeat(counts.first[controls, kinds], per)
        edges = first + np.arange(len(first)) - np.repeat(np.cumsum(per) - per, per)
        pairs = np.unique(np.stack((counts.target[edges].astype(np.int64), np.repeat(controls, per))), axis=1)
        starts = np.searchsorted(pairs[0], np.arange(counts.controls + 1))
        far = np.full(counts.controls, 1 << 40, dtype=np.int64)
        layer = np.array([number for number, boxes in enumerate(counts.accepts) if boxes], dtype=np.int64)
        steps = 0
        while len(layer):
            far[layer] = steps
            steps += 1
            before = [pairs[1, starts[target] : starts[target + 1]] for target in layer.tolist()]
            found = np.unique(np.concatenate(before)) if before else layer[:0]
            layer = found[far[found] > steps]
        return far
