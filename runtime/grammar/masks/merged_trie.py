"""MergedTrie: the tree of tokens as one automaton sees it, bytes of one kind taken for one.

An automaton over bytes tells few kinds of them apart: of a string's inside, the quote, the backslash and the
rest. Tokens that differ within a kind share their path here, so a walk takes thousands of nodes instead of
hundreds of thousands. It knows kinds of bytes, not automata.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from runtime.grammar.automata.dfa import ByteDfa
from runtime.grammar.masks.mask_store import MaskStore
from runtime.grammar.masks.trie import TokenTrie, spread, stepper

_SCATTERED = 8

Ints = npt.NDArray[np.int64]
Small = npt.NDArray[np.signedinteger[Any]]
Bools = npt.NDArray[np.bool_]


class MergedTrie:
    """Nodes level by level; a node's children are consecutive; the first `roots` nodes are the first bytes.

    byte, child_start, child_count int [nodes]: some byte of the node's kind, its children. node_of int32 [ids
    of the vocabulary, in whole words of 32]: where an id's text ends; `nodes` for ids without a text, and for
    those that hold a byte of no kind.
    """

    def __init__(self, byte: Small, child_count: Small, roots: int, node_of: npt.NDArray[np.int32]) -> None:
        self.byte, self.child_count, self.roots, self.node_of = byte, child_count, roots, node_of
        self.nodes = len(byte)
        self.child_start = (roots + np.cumsum(child_count) - child_count).astype(np.int32)

    @property
    def nbytes(self) -> int:
        mine = (self.byte, self.child_count, self.child_start, self.node_of)
        return sum(part.nbytes for part in mine)

    def pack(self, nodes: Bools) -> npt.NDArray[np.uint32]:
        """The ids whose text ends at one of `nodes` (bool [nodes + 1], the last one False), as words."""
        flags = nodes.take(self.node_of)
        return np.packbits(flags, bitorder="little").view("<u4").astype(np.uint32, copy=False)

    def reach(self, dfa: ByteDfa, state: int) -> npt.NDArray[np.uint32]:
        """The ids whose bytes `dfa` allows from `state`, as words; a new array. Its kinds of bytes are those
        of `dfa`."""
        step = stepper(dfa)
        nodes = np.zeros(self.nodes + 1, dtype=np.bool_)
        here = np.arange(self.roots)
        at = np.full(self.roots, state, dtype=np.int64)
        while len(here):
            at = step(at, self.byte.take(here))
            keep = (at >= 0).nonzero()[0]
            here = here.take(keep)
            nodes[here] = True
            here, source = spread(self.child_start.take(here), self.child_count.take(here))
            at = at.take(keep.take(source))
        return self.pack(nodes)


def merged(trie: TokenTrie, kind_of: Ints) -> MergedTrie:
    """`kind_of` [256]: the kind of each byte, -1 for those that are never wanted: what holds one is left
    out."""
    kinds = int(kind_of.max(initial=-1)) + 1
    some = np.zeros(max(kinds, 1), dtype=np.int64)
    wanted = np.flatnonzero(kind_of >= 0)
    some[kind_of[wanted]] = wanted
    place = np.full(len(trie.byte) + 1, -1, dtype=np.int32)  # the merged node of each, in the end of all
    kind: Ints = kind_of.astype(np.int32)[trie.byte].astype(np.int64)
    bytes_: list[Ints] = []
    counts: list[Ints] = []
    above, width, made, roots = -1, 1, 0, 0
    for low, high in zip(trie.levels, trie.levels[1:]):
        cell = kind[low:high]
        if above < 0:
            kept = np.flatnonzero(cell >= 0)
            cell = cell[kept]
        else:
            before = place[trie.parent[low:high]]
            kept = np.flatnonzero((cell >= 0) & (before >= 0))
            cell = (before[kept] - above).astype(np.int64) * kinds + cell[kept]
        if not len(kept):
            break
        cells, mine = _numbered(cell, width * kinds)
        place[low:high][kept] = made + mine
        bytes_.append(some[cells % kinds])
        if above < 0:
            roots = len(cells)
        else:
            counts.append(np.bincount(cells // kinds, minlength=width))
        above, made, width = made, made + len(cells), len(cells)
    if bytes_:
        counts.append(np.zeros(width, dtype=np.int64))
    node_of = place[trie.end_of]
    node_of[node_of < 0] = made
    return MergedTrie(_joined(bytes_), _joined(counts), roots, node_of)


def _numbered(values: Ints, bound: int) -> tuple[Ints, Ints]:
    """The different `values`, ascending, and which of them each is; all are below `bound`."""
    if bound > _SCATTERED * len(values) + 4096:
        return np.unique(values, return_inverse=True)
    there = np.zeros(bound, dtype=np.bool_)
    there[values] = True
    different = np.flatnonzero(there)
    number = np.empty(bound, dtype=np.int64)
    number[different] = np.arange(len(different))
    return different, number[values]


class MergedTries:
    """Those of one vocabulary by kinds of bytes; the longest unused go when they take more than
    `limit_bytes`. With a store they are found on disk again. Thread-safe."""

    def __init__(self, trie: TokenTrie, limit_bytes: int = 64 << 20, store: MaskStore | None = None) -> None:
        self._trie, self._limit, self._store = trie, limit_bytes, store
        self._known: OrderedDict[bytes, MergedTrie] = OrderedDict()
        self._held = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._known)

    def of(self, utf8: npt.NDArray[np.int32], dead: int) -> MergedTrie:
        """Of an automaton over the table `utf8` (see utf8_table), whose entry `dead` leads nowhere."""
        kind_of = byte_kinds(utf8, dead)
        key = hashlib.blake2b(kind_of.tobytes(), digest_size=20).digest()
        with self._lock:
            found = self._known.get(key)
            if found is not None:
                self._known.move_to_end(key)
                return found
        found = self._load(key)
        if found is None:
            found = merged(self._trie, kind_of)
            if self._store is not None:
                roots = np.array([found.roots], dtype=np.int64)
                self._store.save(key, (found.byte, found.child_count, roots, found.node_of))
        with self._lock:
            if key not in self._known:
                self._known[key] = found
                self._held += found.nbytes
            while self._held > self._limit and len(self._known) > 1:
                self._held -= self._known.popitem(last=False)[1].nbytes
        return found

    def _load(self, key: bytes) -> MergedTrie | None:
        parts = self._store.load(key) if self._store is not None else None
        if parts is None or len(parts) != 4:
            return None
        byte, child_count, roots, node_of = cast("tuple[Any, ...]", parts)
        wanted = [(byte, np.int64), (child_count, np.int64), (roots, np.int64), (node_of, np.int32)]
        if any(part.dtype != kind or part.ndim != 1 for part, kind in wanted) or len(roots) != 1:
            return None
        nodes, first = len(byte), int(roots[0])
        fits = len(child_count) == nodes and first + int(child_count.sum()) == nodes
        if not fits or node_of.shape != self._trie.end_of.shape or int(node_of.max(initial=0)) > nodes:
            return None
        return MergedTrie(byte, child_count, first, node_of)


def byte_kinds(utf8: npt.NDArray[np.int32], dead: int) -> Ints:
    """int64 [256]: bytes of equal columns are of one kind, numbered by their first byte; -1: `dead` in every
    row."""
    columns = np.ascontiguousarray(utf8.T)
    numbers: dict[bytes, int] = {}
    nowhere = (columns == dead).all(axis=1)
    kinds = [
        -1 if nowhere[byte] else numbers.setdefault(columns[byte].tobytes(), len(numbers))
        for byte in range(256)
    ]
    return np.array(kinds, dtype=np.int64)


def _joined(parts: list[Ints]) -> Ints:
    return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, dtype=np.int64)
