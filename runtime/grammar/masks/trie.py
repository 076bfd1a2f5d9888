"""TokenTrie: the bytes of all tokens of a vocabulary as one tree in arrays, walked along an automaton for the
whole vocabulary at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from runtime.grammar.automata.dfa import DEAD, ByteDfa
from runtime.grammar.masks.native_walk import TokenTree
from runtime.protocol.vocabulary import Vocabulary

Ints = npt.NDArray[np.int64]
Small = npt.NDArray[np.signedinteger[Any]]


class Reached(NamedTuple):
    """Tokens that may follow a state, and the states they lead to, in no special order."""

    ids: Ints
    states: Ints


class Tree:
    """Nodes level by level, int32 [nodes]: the byte of each, and its children, which are consecutive."""

    byte: npt.NDArray[np.int32]
    child_start: npt.NDArray[np.int32]
    child_count: npt.NDArray[np.int32]


class TokenTrie(Tree):
    """`token` int32 [nodes]: the token that ends at a node, or -1. The first `roots` nodes are the first
    bytes. Ids without text are left out."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        tokens = vocabulary.tokens
        silent = vocabulary.special | vocabulary.eos
        ids = [token for token, data in enumerate(tokens) if data and token not in silent]
        ids.sort(key=tokens.__getitem__)  # equal texts stay in the order of their ids
        self.size = len(tokens)
        self._ids = np.array(ids, dtype=np.int32)
        texts = [tokens[token] for token in ids]
        buffer = np.frombuffer(b"".join(texts), dtype=np.uint8)
        lengths = np.fromiter(map(len, texts), np.int32, len(texts))
        self.deepest = int(lengths.max(initial=0))
        self._twins = np.empty((0, 2), dtype=np.int32)  # (id, the one of equal text that a node names)
        self.roots = 0
        self.levels = [0]
        """The first node of each level, and the number of nodes."""
        self._build(buffer, lengths)
        singles = self.byte[: self.roots][self.token[: self.roots] >= 0].tolist()
        self.missing_bytes = frozenset(range(256)) - frozenset(singles)

    def _build(self, buffer: npt.NDArray[Any], lengths: npt.NDArray[np.int32]) -> None:
        """The levels, of the texts in `buffer`, which is in their order."""
        starts = (np.cumsum(lengths, dtype=np.int32) - lengths).astype(np.int32)
        bytes_, child_start, child_count, tokens_at, twins = [], [], [], [], [self._twins]
        count = 0
        rows = np.arange(len(lengths), dtype=np.int32)  # tokens longer than the depth, in sorted order
        above = np.zeros(len(lengths), dtype=np.int32)  # their node one level up, counted within that level
        for depth in range(self.deepest):
            keep = np.flatnonzero(lengths[rows] > depth)
            rows, above = rows[keep], above[keep]
            now = buffer[starts[rows] + depth]
            new = np.ones(len(rows), dtype=np.bool_)
            new[1:] = (now[1:] != now[:-1]) | (above[1:] != above[:-1])
            mine = np.cumsum(new, dtype=np.int32) - 1
            level = int(mine[-1]) + 1
            bytes_.append(now[new].astype(np.int32))
            if depth:
                counts = np.bincount(above[new], minlength=len(bytes_[-2])).astype(np.int32)
                child_start.append(count + np.cumsum(counts, dtype=np.int32) - counts)
                child_count.append(counts)
            else:
                self.roots = level
            ends = np.flatnonzero(lengths[rows] == depth + 1)[::-1]
            token = np.full(level, -1, dtype=np.int32)
            ended = self._ids[rows[ends]]
            token[mine[ends]] = ended  # the first of equal tokens is written last
            named = token[mine[ends]]
            twins.append(np.stack((ended, named), axis=1)[ended != named])
            tokens_at.append(token)
            above = mine
            count += level
            self.levels.append(count)
        if bytes_:
            child_start.append(np.zeros(len(bytes_[-1]), dtype=np.int32))
            child_count.append(np.zeros(len(bytes_[-1]), dtype=np.int32))
        self.byte, self.token = _in_one(bytes_), _in_one(tokens_at)
        self.child_start, self.child_count = _in_one(child_start), _in_one(child_count)
        self._twins = np.concatenate(twins)

    @cached_property
    def parent(self) -> npt.NDArray[np.int32]:
        """int32 [nodes]: the node above each, -1 above the first bytes."""
        parent = np.full(len(self.byte), -1, dtype=np.int32)
        parent[self.roots :] = np.repeat(np.arange(len(self.byte), dtype=np.int32), self.child_count)
        return parent

    @cached_property
    def end_of(self) -> npt.NDArray[np.int32]:
        """int32 [ids, in whole words of 32]: the node at which an id's text ends; -1 for ids without one."""
        ends = np.full(-(-self.size // 32) * 32, -1, dtype=np.int32)
        nodes = np.flatnonzero(self.token >= 0)
        ends[self.token[nodes]] = nodes
        if len(self._twins):
            ends[self._twins[:, 0]] = ends[self._twins[:, 1]]
        return ends

    @cached_property
    def native(self) -> TokenTree:
        """Itself, for the C library."""
        parts = {"byte": self.byte, "child_start": self.child_start, "child_count": self.child_count}
        return TokenTree(
            {**parts, "token": self.token, "twin": self._twins}, nodes=len(self.byte), levels=self.deepest,
            roots=self.roots, words=-(-self.size // 32), twins=len(self._twins),
        )  # fmt: skip

    def reach(self, dfa: ByteDfa, state: int) -> Reached:
        """All tokens whose bytes `dfa` allows from `state`."""
        tokens: list[Ints] = []
        states: list[Ints] = []
        for here, at in walk(self, dfa, np.arange(self.roots), np.full(self.roots, state, dtype=np.int64)):
            tokens.append(self.token.take(here).astype(np.int64))
            states.append(at)
        return self._with_twins(_joined(tokens), _joined(states))

    def _with_twins(self, tokens: Ints, states: Ints) -> Reached:
        ends = np.flatnonzero(tokens >= 0)
        tokens, states = tokens[ends], states[ends]
        if not len(self._twins):
            return Reached(tokens, states)
        state_of = np.full(self.size, DEAD, dtype=np.int64)
        state_of[tokens] = states
        state_of[self._twins[:, 0]] = state_of[self._twins[:, 1]]
        ids = np.flatnonzero(state_of != DEAD)
        return Reached(ids, state_of[ids])

    def can_spell(self, dfa: ByteDfa) -> bool:
        """Whether every byte that `dfa` may need is a token by itself, so that no state can be a dead end."""
        if not self.missing_bytes:
            return True
        needed = {int(number) for number in np.flatnonzero((dfa.delta >= 0).any(axis=0))}
        for byte in self.missing_bytes:
            for entry in np.unique(dfa.utf8[:, byte]):
                if entry >= 0 or int(~entry) in needed:
                    return False
        return True


def walk(tree: Tree, dfa: ByteDfa, here: Ints, at: Ints) -> Iterator[tuple[Ints, Ints]]:
    """All nodes of `tree` that `dfa` allows, and its states there, level by level. here, at: nodes to begin
    with, and the states above them."""
    nodes, width = dfa.nodes, dfa.delta.shape[1]
    utf8, delta = dfa.utf8.reshape(-1), dfa.delta.reshape(-1)
    open_, many = dfa.open_nodes.reshape(-1), dfa.open_nodes.shape[1]
    while len(here):
        state = at // nodes
        entry = utf8.take((at - state * nodes) * 256 + tree.byte.take(here)).astype(np.int64)
        leaf, inner = entry < 0, np.maximum(entry, 0)
        after = delta.take(state * width + np.where(leaf, ~entry, width - 1)).astype(np.int64)
        stays = open_.take(dfa.pattern_of.take(state) * many + inner)
        at = np.where(
            leaf, np.where(after >= 0, after * nodes, DEAD), np.where(stays, state * nodes + inner, DEAD)
        )
        keep = (at >= 0).nonzero()[0]
        here, at = here.take(keep), at.take(keep)
        yield here, at
        here, source = spread(tree.child_start.take(here), tree.child_count.take(here))
        at = at.take(source)


def spread(starts: Small, counts: Small) -> tuple[Ints, Ints]:
    """start, start + 1 ... of each run, and which run each comes from."""
    source = np.repeat(np.arange(len(counts)), counts)
    return np.arange(len(source)) + (starts - (np.cumsum(counts) - counts)).take(source), source


def _in_one(parts: list[npt.NDArray[np.int32]]) -> npt.NDArray[np.int32]:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)


def _joined(parts: Sequence[npt.NDArray[np.generic]]) -> Ints:
    return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, dtype=np.int64)
