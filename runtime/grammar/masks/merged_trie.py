"""MergedTrie: the tree of tokens in which bytes that an automaton does not distinguish share a path.

Inside of a string an automaton distinguishes the quote, the backslash and the rest, so a walk takes thousands
of nodes, not hundreds of thousands. Of a run, the characters along a wide repeat, only the number counts.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from functools import cached_property
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from runtime.grammar.automata.dfa import ByteDfa
from runtime.grammar.masks.mask_store import MaskStore
from runtime.grammar.masks.native_walk import TokenTree
from runtime.grammar.masks.token_bits import Cache
from runtime.grammar.masks.trie import Ints, TokenTrie, Tree, spread, walk

_SCATTERED = 8
_ALONG, _LEFT = 0, -256
"""Offsets of rows of a table: the first one, between two characters, and the last."""
_LENGTH = (1 << 16) - 1

Bools = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.int32]


class MergedTrie(Tree):
    """`byte`: some byte of the node's kind. The first `roots` nodes are the numbers of characters of the run
    at the beginning of a token, from 0 on. node_of int32 [ids, in whole words of 32]: the node at which an
    id's text ends, or `nodes`.
    """

    def __init__(
        self, byte: Numbers, child_count: Numbers, roots: int, node_of: Numbers, deepest: int
    ) -> None:
        """`deepest`: bytes of the longest token. `native` is the tree for the C library."""
        self.byte, self.child_count, self.roots = byte, child_count, roots
        self.node_of = node_of
        self.nodes = len(byte)
        self.child_start = (roots + np.cumsum(child_count) - child_count).astype(np.int32)
        parts = {"byte": byte, "child_start": self.child_start, "child_count": child_count}
        self.native = TokenTree(
            {**parts, "node_of": node_of}, nodes=self.nodes, levels=deepest, roots=roots,
            words=len(node_of) // 32,
        )  # fmt: skip

    @property
    def nbytes(self) -> int:
        arrays = (self.byte, self.child_count, self.child_start, self.node_of)
        return sum(array.nbytes for array in arrays)

    @cached_property
    def _node_of(self) -> npt.NDArray[np.intp]:
        """A faster index."""
        return self.node_of.astype(np.intp)

    def pack(self, nodes: Bools) -> npt.NDArray[np.uint32]:
        """The ids whose text ends at one of `nodes` (bool [nodes + 1], the last one False), as words."""
        flags = nodes.take(self._node_of)
        return np.packbits(flags, bitorder="little").view("<u4").astype(np.uint32, copy=False)

    def reach(self, dfa: ByteDfa, chain: Sequence[int]) -> npt.NDArray[np.uint32]:
        """The ids whose bytes `dfa` allows from chain[0], as words; a new array. `chain`: the states after 0,
        1 ... characters of the run, at most `roots`. The tree's kinds of bytes are those of `dfa`."""
        nodes = np.zeros(self.nodes + 1, dtype=np.bool_)
        nodes[: len(chain)] = True
        here, source = spread(self.child_start[: len(chain)], self.child_count[: len(chain)])
        for reached, _ in walk(self, dfa, here, np.array(chain, dtype=np.int64).take(source)):
            nodes[reached] = True
        return self.pack(nodes)


def merged(trie: TokenTrie, kind_of: Ints, run: npt.NDArray[np.int32]) -> MergedTrie:
    """The tree for `kind_of` [256], as ByteDfa.kind_of; tokens with a byte of kind -1 are left out. `run`:
    see run_table()."""
    kinds = int(kind_of.max(initial=-1)) + 1
    some = np.zeros(max(kinds, 1), dtype=np.int64)
    used = np.flatnonzero(kind_of >= 0)
    some[kind_of[used]] = used
    node_of = _runs(trie, run)  # the merged node of each, in the end of all; now of those within the run
    others = np.flatnonzero(node_of > _LENGTH)
    behind = (node_of[others] >> 16).astype(np.int16)
    node_of[others] = -1
    others = others[behind.argsort(kind="stable")]
    ends = np.bincount(behind).cumsum().tolist()
    useful = trie.token >= 0  # what has no token at or below it is left out: characters of the run, begun
    for low, high in reversed(list(itertools.pairwise(ends))):
        level = others[low:high]
        above = trie.parent[level[useful[level]]]
        useful[above[above >= 0]] = True
    roots = int(node_of.max()) + 1
    bytes_, counts = [np.zeros(roots, dtype=np.int64)], []
    first, width, total = 0, roots, roots
    for low, high in itertools.pairwise(ends):
        level = others[low:high]
        before, kind = node_of[trie.parent[level]], kind_of[trie.byte[level]]
        kept = np.flatnonzero((kind >= 0) & (before >= 0) & useful[level])
        if not len(kept):
            break
        cells, mine = _numbered((before[kept] - first).astype(np.int64) * kinds + kind[kept], width * kinds)
        node_of[level[kept]] = total + mine
        bytes_.append(some[cells % kinds])
        counts.append(np.bincount(cells // kinds, minlength=width))
        first, total, width = total, total + len(cells), len(cells)
    counts.append(np.zeros(width, dtype=np.int64))
    node_of[node_of < 0] = total
    node_of[-1] = total  # of ids without a text
    byte, count = (np.concatenate(parts).astype(np.int32) for parts in (bytes_, counts))
    return MergedTrie(byte, count, roots, node_of.take(trie.end_of), trie.deepest)


def _runs(trie: TokenTrie, run: npt.NDArray[np.int32]) -> Numbers:
    """int32 [nodes of `trie`, and one above the first bytes]: of a node's text, the characters of the run
    that it begins with, and 1 << 16 times the bytes behind them."""
    count = len(trie.byte) + 1
    rows, counts = np.zeros(count, dtype=np.int32), np.zeros(count, dtype=np.int32)
    flat = run.reshape(-1)
    for low, high in itertools.pairwise(trie.levels):
        above = trie.parent[low:high].astype(np.intp)
        now, before = flat.take(rows.take(above) + trie.byte[low:high]), counts.take(above)
        left = np.flatnonzero(now != _ALONG)
        rows[low:high] = now
        counts[low:high] = (before & _LENGTH) + 1
        counts[low + left] = before[left] + (1 << 16)
    return counts


def run_table(utf8: npt.NDArray[np.int32], classes: Bools) -> npt.NDArray[np.int32]:
    """`utf8` (see utf8_table) with offsets of rows instead of nodes: _ALONG for the characters of a run's
    `classes`, _LEFT for all others, which is a last row of nothing else."""
    table = np.where(utf8 >= 0, utf8 * 256, np.where(classes[~np.minimum(utf8, -1)], _ALONG, _LEFT))
    return np.concatenate((table, np.full((1, 256), _LEFT))).astype(np.int32)


def _numbered(values: Ints, bound: int) -> tuple[Ints, Ints]:
    """np.unique of `values`, with the inverse; all are below `bound`."""
    if bound > _SCATTERED * len(values) + 4096:
        return np.unique(values, return_inverse=True)
    there = np.zeros(bound, dtype=np.bool_)
    there[values] = True
    different = np.flatnonzero(there)
    number = np.empty(bound, dtype=np.int64)
    number[different] = np.arange(len(different))
    return different, number[values]


class MergedTries:
    """The merged tries of one vocabulary, within `limit_bytes`, and on disk with a store. Thread-safe."""

    def __init__(self, trie: TokenTrie, limit_bytes: int = 64 << 20, store: MaskStore | None = None) -> None:
        self._trie, self._store = trie, store
        self._known: Cache[MergedTrie] = Cache(limit_bytes, lambda tree: tree.nbytes)

    def of(self, kind_of: Ints, run: npt.NDArray[np.int32]) -> MergedTrie:
        """See merged()."""
        key = hashlib.blake2b(kind_of.tobytes() + run.tobytes(), digest_size=20).digest()
        return self._known.get(key, lambda: self._make(key, kind_of, run))

    def _make(self, key: bytes, kind_of: Ints, run: npt.NDArray[np.int32]) -> MergedTrie:
        tree = self._load(key)
        if tree is None:
            tree = merged(self._trie, kind_of, run)
            if self._store is not None:
                roots = np.array([tree.roots], dtype=np.int64)
                self._store.save(key, (tree.byte, tree.child_count, roots, tree.node_of))
        return tree

    def _load(self, key: bytes) -> MergedTrie | None:
        parts = self._store.load(key) if self._store is not None else None
        if parts is None or len(parts) != 4:
            return None
        byte, child_count, roots, node_of = cast("tuple[Any, ...]", parts)
        dtypes = [(byte, np.int32), (child_count, np.int32), (roots, np.int64), (node_of, np.int32)]
        if any(part.dtype != kind or part.ndim != 1 for part, kind in dtypes) or len(roots) != 1:
            return None
        nodes, first = len(byte), int(roots[0])
        fits = len(child_count) == nodes and first + int(child_count.sum(dtype=np.int64)) == nodes
        bounds = [(byte, 255), (child_count, nodes), (roots, nodes), (node_of, nodes)]
        if any(part.min(initial=0) < 0 or part.max(initial=0) > most for part, most in bounds):
            return None
        if not fits or first < 1 or node_of.shape != self._trie.end_of.shape:
            return None
        return MergedTrie(byte, child_count, first, node_of, self._trie.deepest)
