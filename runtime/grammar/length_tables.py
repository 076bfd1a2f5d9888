"""LengthTables: for a repeated class of characters, which tokens fit into how many more of them.

The inside of a string costs the most to walk and is alike in all constraints of a vocabulary: the same class,
the same escapes, only other bounds and other text behind. So it is walked once for each such class. A table
holds the tokens that stay inside, as packed masks by the number of characters they need, and where in the
tree of tokens the class may be left; each constraint walks only what lies behind those places. It knows
classes by their content, not constraints.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from runtime.grammar.counted_dfa import CountedByteDfa
from runtime.grammar.mask_store import MaskStore
from runtime.grammar.symbolic_walk import Bools, Front, Rules, Walker
from runtime.grammar.trie import TokenTrie

_OPEN = 1 << 20
"""The bound that a walk of a class assumes; `need` counts from it."""

_MOST_INSIDE = 8
_PREPARED = 32
_SMALLEST = 24
"""A class of fewer characters is walked as it comes."""


class Inside(NamedTuple):
    """A control that repeats a class, and those that lead straight back to it (after a backslash).

    controls: the repeating one first. slot: what counts its rounds, None where nothing does; last: the
    largest count at which another round may begin. edges bool [edges]: those that stay inside. key: its
    content, alike in every automaton.
    """

    controls: tuple[int, ...]
    slot: int | None
    last: int
    edges: Bools
    key: bytes


@dataclass(frozen=True, eq=False)
class LengthTable:
    """needs int64 [steps], ascending: rounds that must still be free to begin (-1: none), and rows uint32
    [steps, words]: the tokens that need at most so many. place int8, done, need int32 [nodes of the tree]:
    behind each node, between two characters: 1 + which of Inside.controls, rounds done, rounds needed; place
    0: not there."""

    needs: npt.NDArray[np.int64]
    rows: npt.NDArray[np.uint32]
    place: npt.NDArray[np.int8]
    done: npt.NDArray[np.int32]
    need: npt.NDArray[np.int32]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.needs, self.rows, self.place, self.done, self.need))


class LengthTables:
    """The tables of one vocabulary, by content; the longest unused go when they take more than
    `limit_bytes`. Thread-safe."""

    def __init__(self, trie: TokenTrie, limit_bytes: int = 128 << 20, store: MaskStore | None = None) -> None:
        self._trie, self._limit, self._store = trie, limit_bytes, store
        self._known: OrderedDict[bytes, LengthTable] = OrderedDict()
        self._held = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._known)

    def table(self, dfa: CountedByteDfa, inside: Inside) -> LengthTable:
        with self._lock:
            found = self._known.get(inside.key)
            if found is not None:
                self._known.move_to_end(inside.key)
                return found
        found = self._load(inside.key)
        if found is None:
            found = self._make(dfa, inside)
            if self._store is not None:
                parts = (found.needs, found.rows, found.place, found.done, found.need)
                self._store.save(inside.key, parts)
        with self._lock:
            if inside.key not in self._known:
                self._known[inside.key] = found
                self._held += found.nbytes
            while self._held > self._limit and len(self._known) > 1:
                self._held -= self._known.popitem(last=False)[1].nbytes
        return found

    def prepare(self, dfa: CountedByteDfa) -> None:
        """Make the tables of the first classes that `dfa` repeats."""
        counts = dfa.counts
        taken = counts.count > 0
        source = np.nonzero(taken)[0]
        loops = np.unique(source[counts.target[counts.first[taken]] == source])
        met: set[bytes] = set()
        for control in loops[:_PREPARED].tolist():
            inside = find_inside(dfa, control)
            if inside is not None and inside.key not in met:
                met.add(inside.key)
                self.table(dfa, inside)

    def _load(self, key: bytes) -> LengthTable | None:
        parts = self._store.load(key) if self._store is not None else None
        nodes, words = len(self._trie.byte), -(-self._trie.size // 32)
        if parts is None or len(parts) != 5:
            return None
        needs, rows, place, done, need = cast("tuple[Any, ...]", parts)
        kinds = [(np.int64, 1), (np.uint32, 2), (np.int8, 1), (np.int32, 1), (np.int32, 1)]
        if any(part.dtype != kind or part.ndim != ndim for part, (kind, ndim) in zip(parts, kinds)):
            return None
        if rows.shape != (len(needs), words) or any(part.shape != (nodes,) for part in (place, done, need)):
            return None
        return LengthTable(needs, rows, place, done, need)

    def _make(self, dfa: CountedByteDfa, inside: Inside) -> LengthTable:
        trie = self._trie
        walker = Walker(dfa, trie, _inside_rules(dfa, inside))
        levels = walker.run(walker.start(inside.controls[0], 0, high=_OPEN + 1))
        place = np.zeros(len(trie.byte), dtype=np.int8)
        done = np.zeros(len(trie.byte), dtype=np.int32)
        need = np.zeros(len(trie.byte), dtype=np.int32)
        order = np.zeros(dfa.counts.controls, dtype=np.int8)
        order[list(inside.controls)] = np.arange(1, len(inside.controls) + 1)
        tokens, needed = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
        for level in levels:
            needs = np.full(len(level.here), -1) if inside.slot is None else _OPEN - level.high[inside.slot]
            token = trie.token[level.here]
            ends = np.flatnonzero(token >= 0)
            tokens.append(token[ends])
            needed.append(needs[ends])
            between = np.flatnonzero(level.node == 0)
            here = level.here[between]
            place[here] = order[level.control[between]]
            need[here] = needs[between]
            if inside.slot is not None:
                done[here] = level.off[inside.slot, between]
        found, need_of = np.concatenate(tokens), np.concatenate(needed)
        steps = np.unique(need_of)
        rows = np.zeros((len(steps), -(-trie.size // 32)), dtype=np.uint32)
        for number, step in enumerate(steps.tolist()):
            flags = trie.all_of(found[need_of == step])
            rows[number] = np.packbits(flags, bitorder="little").view("<u4")
        np.bitwise_or.accumulate(rows, axis=0, out=rows)
        for part in (steps, rows, place, done, need):
            part.flags.writeable = False
        return LengthTable(steps.astype(np.int64), rows, place, done, need)

    def leaving(self, dfa: CountedByteDfa, inside: Inside, table: LengthTable) -> Front:
        """The paths that take a byte which leads out, before that step."""
        trie, slots = self._trie, len(dfa.counts.radix)
        here, control, done, need = [], [], [], []
        for number, one in enumerate(inside.controls, 1):
            for byte in _leaving_bytes(dfa, inside, one):
                child = trie.by_byte[byte]
                parent = trie.parent[child]
                first = parent < 0
                fits = np.where(first, number == 1, table.place[parent] == number)
                child, parent, first = child[fits], parent[fits], first[fits]
                here.append(child)
                control.append(np.full(len(child), one))
                done.append(np.where(first, 0, table.done[parent]))
                need.append(np.where(first, -1, table.need[parent]))
        nothing = np.empty(0, dtype=np.int64)
        nodes = np.concatenate([nothing, *here])
        size = len(nodes)
        off = np.zeros((slots, size), dtype=np.int64)
        bounds = np.array(dfa.counts.radix, dtype=np.int64).reshape(slots, 1) - 1
        high = np.repeat(bounds, size, axis=1)
        if inside.slot is not None:
            off[inside.slot] = np.concatenate([nothing, *done])
            high[inside.slot] = inside.last - np.concatenate([nothing, *need])
        return Front(
            nodes, np.concatenate([nothing, *control]), np.zeros(size, dtype=np.int64),
            np.zeros((slots, size), dtype=np.bool_), off, np.zeros_like(off), high,
        )  # fmt: skip


def _inside_rules(dfa: CountedByteDfa, inside: Inside) -> Rules:
    """The rules of a walk that stays inside, under the bound _OPEN instead of the constraint's own."""
    counts, gates = dfa.counts, dfa.gates
    high, gate_high = np.full_like(counts.high, _OPEN * 2), np.full_like(gates.high, _OPEN * 2)
    if inside.slot is not None:
        high[inside.slot, counts.high[inside.slot] <= inside.last] = _OPEN
        gate_high[inside.slot, gates.high[inside.slot] <= inside.last] = _OPEN
    return Rules(np.zeros_like(counts.low), high, np.zeros_like(gates.low), gate_high, inside.edges)


def _edges_of(dfa: CountedByteDfa, control: int) -> Iterator[tuple[int, npt.NDArray[np.intp]]]:
    """(first edge, the classes that take it, or it and those after it) of a control."""
    first, count = dfa.counts.first[control], dfa.counts.count[control]
    kinds = np.flatnonzero(count)
    starts, where = np.unique(first[kinds], return_inverse=True)
    for number, start in enumerate(starts.tolist()):
        yield start, kinds[where == number]


def _leaving_bytes(dfa: CountedByteDfa, inside: Inside, control: int) -> list[int]:
    kinds = [
        kind for edge, kinds in _edges_of(dfa, control) if not inside.edges[edge] for kind in kinds.tolist()
    ]
    return np.flatnonzero(np.isin(~dfa.utf8[0, :128], kinds)).tolist()


def find_inside(dfa: CountedByteDfa, control: int) -> Inside | None:
    """What `control` repeats; None where that is no class a table can hold."""
    counts = dfa.counts
    groups = {control: list(_edges_of(dfa, control))}
    if not any(counts.target[edge] == control for edge, _ in groups[control]):
        return None
    for edge, _ in groups[control]:
        other = int(counts.target[edge])
        if other not in groups and len(groups) < _MOST_INSIDE:
            back = list(_edges_of(dfa, other))
            if any(counts.target[edge] == control for edge, _ in back):
                groups[other] = back
    edges = np.zeros(len(counts.target), dtype=np.bool_)
    ascii_only = _ascii_only(dfa)
    for one, parts in groups.items():
        for edge, kinds in parts:
            if int(counts.target[edge]) in groups:
                if (counts.count[one, kinds] != 1).any():
                    return None
                edges[edge] = True
            elif not ascii_only[kinds].all():
                return None
    slot, last = _counted_slot(dfa, control, groups, edges)
    if slot is not None and slot < 0:
        return None
    key = _content(dfa, groups, edges, slot, last)
    return None if key is None else Inside(tuple(groups), slot, last, edges, key)


def _ascii_only(dfa: CountedByteDfa) -> Bools:
    """bool [classes + 1]: whether a class has no character above U+007F."""
    only = np.ones(dfa.counts.classes + 1, dtype=np.bool_)
    for _, last, kind in dfa.counts.intervals:
        if last >= 128:
            only[kind] = False
    return only


def _counted_slot(
    dfa: CountedByteDfa, control: int, groups: dict[int, list[tuple[int, npt.NDArray[np.intp]]]], edges: Bools
) -> tuple[int | None, int]:
    """(slot, last count at which a round may begin); (None, 0) where nothing counts, (-1, 0) where it is more
    involved."""
    counts, inner = dfa.counts, np.flatnonzero(edges)
    found: int | None = None
    last = 0
    for slot in range(len(counts.radix)):
        if (counts.low[slot, inner] != 0).any() or not counts.keep[slot, inner].all():
            return -1, 0
        if not counts.add[slot, inner].any():
            highest = max(int(counts.high[slot, edge]) for parts in groups.values() for edge, _ in parts)
            if (counts.high[slot, inner] != highest).any():
                return -1, 0
            continue
        own = [edge for edge, _ in groups[control] if counts.target[edge] == control]
        lasts = {int(counts.high[slot, edge]) for edge in own}
        adds = {int(counts.add[slot, edge]) for edge in own}
        if found is not None or len(lasts) != 1 or adds != {1}:
            return -1, 0
        found, last = slot, lasts.pop()
        if (counts.high[slot, inner] < last).any() or (counts.add[slot, inner] > 1).any():
            return -1, 0
    return found, last


def _content(
    dfa: CountedByteDfa,
    groups: dict[int, list[tuple[int, npt.NDArray[np.intp]]]],
    edges: Bools,
    slot: int | None,
    last: int,
) -> bytes | None:
    """A digest of what is inside: the same for the same class, whatever it is part of."""
    counts = dfa.counts
    intervals = np.array(counts.intervals, dtype=np.int64).reshape(-1, 3)
    parts: dict[tuple[int, int, int, bool], list[npt.NDArray[np.intp]]] = {}
    order = {control: number for number, control in enumerate(groups)}
    for control, group in groups.items():
        for edge, kinds in group:
            if not edges[edge]:
                continue
            add = 0 if slot is None else int(counts.add[slot, edge])
            bounded = slot is not None and int(counts.high[slot, edge]) <= last
            name = order[control], order[int(counts.target[edge])], add, bounded
            parts.setdefault(name, []).append(kinds)
    if len(groups) > 2:
        return None  # the order of more than two has no canonical form here
    digest = hashlib.blake2b(digest_size=20)
    for part in sorted(parts):
        rows = intervals[np.isin(intervals[:, 2], np.concatenate(parts[part])), :2]
        new = np.ones(len(rows), dtype=np.bool_)
        new[1:] = rows[1:, 0] != rows[:-1, 1] + 1
        begins = rows[new, 0]
        ends = rows[np.append(np.flatnonzero(new)[1:] - 1, len(rows) - 1), 1]
        if part == (0, 0, *part[2:]) and int((ends - begins + 1).sum()) < _SMALLEST:
            return None
        digest.update(repr(part).encode() + begins.tobytes() + ends.tobytes())
    return digest.digest()
