"""TokenTrie: the bytes of all tokens of a vocabulary as one tree in arrays, walked for a whole vocabulary
at once.

It does not know what is allowed; an automaton tells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from runtime.grammar.byte_automaton import DEAD
from runtime.grammar.counted_dfa import CountedByteDfa
from runtime.grammar.dfa import ByteDfa
from runtime.protocol.vocabulary import Vocabulary

Ints = npt.NDArray[np.int64]
Step = Callable[[Ints, Ints], Ints]
"""The state after a byte, DEAD where it is not allowed; element by element."""


class Reached(NamedTuple):
    """Tokens that may follow a state and the states they lead to, int64 [found] each, in no special order."""

    ids: Ints
    states: Ints


class TokenTrie:
    """Nodes level by level; a node's children, and the tokens that end at it, are consecutive.

    byte, child_start, child_count, token int64 [nodes]: the byte of a node, its children, the token that ends
    at it (-1 for none). The first `roots` nodes are the first bytes. Leaves out
    ids that stand for no text: special ones, those that end a generation and empty ones.

    characters: the tokens are whole characters, and those take the part of bytes: `byte` is the place of a
    node's in `points`, the code points in use, ascending.
    """

    def __init__(self, vocabulary: Vocabulary, *, characters: bool = False) -> None:
        tokens = vocabulary.tokens
        silent = vocabulary.special | vocabulary.eos
        texts = sorted((data, token) for token, data in enumerate(tokens) if data and token not in silent)
        self.size = len(tokens)
        self._ids = np.array([token for _, token in texts], dtype=np.int64)
        self.points = np.arange(256)
        joined = b"".join(data for data, _ in texts)
        if characters:
            lengths = np.array([len(data.decode()) for data, _ in texts], dtype=np.int64)
            wide = np.frombuffer(joined.decode().encode("utf-32-le"), dtype="<u4")
            self.points, buffer = np.unique(wide.astype(np.int64), return_inverse=True)
        else:
            lengths = np.array([len(data) for data, _ in texts], dtype=np.int64)
            buffer = np.frombuffer(joined, dtype=np.uint8).astype(np.int64)
        starts = np.concatenate(([0], np.cumsum(lengths)[:-1])).astype(np.int64) if texts else lengths
        self.deepest = int(lengths.max(initial=0))
        bytes_, child_start, child_count, tokens_at = [], [], [], []
        self.roots = 0
        self.levels = [0]
        """Where each level of nodes begins, and where the last one ends."""
        made = 0
        rows = np.arange(len(texts))  # tokens longer than the depth, in sorted order
        above = np.zeros(len(texts), dtype=np.int64)  # their node one level up, counted within that level
        for depth in range(self.deepest):
            keep = lengths[rows] > depth
            rows, above = rows[keep], above[keep]
            now = buffer[starts[rows] + depth]
            new = np.ones(len(rows), dtype=np.bool_)
            new[1:] = (now[1:] != now[:-1]) | (above[1:] != above[:-1])
            mine = np.cumsum(new) - 1
            level = int(mine[-1]) + 1
            bytes_.append(now[new])
            if depth:
                counts = np.bincount(above[new], minlength=len(bytes_[-2]))
                child_start.append(made + np.cumsum(counts) - counts)
                child_count.append(counts)
            else:
                self.roots = level
            ends = np.flatnonzero(lengths[rows] == depth + 1)[::-1]
            token = np.full(level, -1, dtype=np.int64)
            token[mine[ends]] = rows[ends]  # the first of equal tokens is written last
            tokens_at.append(token)
            above = mine
            made += level
            self.levels.append(made)
        if bytes_:
            child_start.append(np.zeros(len(bytes_[-1]), dtype=np.int64))
            child_count.append(np.zeros(len(bytes_[-1]), dtype=np.int64))
        self.byte = _joined(bytes_)
        self.child_start, self.child_count = _joined(child_start), _joined(child_count)
        row_of = _joined(tokens_at)  # the first token that ends at each node, -1 for none
        self.token = np.where(row_of >= 0, self._ids[row_of], -1) if len(row_of) else row_of
        first: dict[bytes, int] = {}
        twins = [(token, first[data]) for data, token in texts if first.setdefault(data, token) != token]
        self._twins = np.array(twins, dtype=np.int64).reshape(
            -1, 2
        )  # (id, the one of equal text that a node names)
        singles = {data[0] for data, _ in texts if len(data) == 1}
        self.missing_bytes = frozenset(range(256)) - singles

    @cached_property
    def parent(self) -> npt.NDArray[np.int32]:
        """int32 [nodes]: the node above each, -1 above the first bytes."""
        children, source = spread(self.child_start, self.child_count)
        parent = np.full(len(self.byte), -1, dtype=np.int32)
        parent[children] = source
        return parent

    @cached_property
    def end_of(self) -> npt.NDArray[np.int64]:
        """int64 [ids, in whole words of 32]: the node at which an id's text ends; -1 for ids without one."""
        ends = np.full(-(-self.size // 32) * 32, -1, dtype=np.int64)
        nodes = np.flatnonzero(self.token >= 0)
        ends[self.token[nodes]] = nodes
        if len(self._twins):
            ends[self._twins[:, 0]] = ends[self._twins[:, 1]]
        return ends

    def reach(self, dfa: ByteDfa, state: int) -> Reached:
        """All tokens whose bytes `dfa` allows from `state`."""
        step = _by_product(dfa) or _by_parts(dfa)
        here = np.arange(self.roots)
        at = np.full(self.roots, state, dtype=np.int64)
        tokens: list[Ints] = []
        states: list[Ints] = []
        while len(here):
            at = step(at, self.byte[here])
            keep = np.flatnonzero(at >= 0)
            here, at = here[keep], at[keep]
            tokens.append(self.token[here])
            states.append(at)
            here, source = spread(self.child_start[here], self.child_count[here])
            at = at[source]
        return self._with_twins(_joined(tokens), _joined(states))

    def _with_twins(self, tokens: Ints, states: Ints) -> Reached:
        found = np.flatnonzero(tokens >= 0)
        tokens, states = tokens[found], states[found]
        if not len(self._twins):
            return Reached(tokens, states)
        state_of = np.full(self.size, DEAD, dtype=np.int64)
        state_of[tokens] = states
        state_of[self._twins[:, 0]] = state_of[self._twins[:, 1]]
        ids = np.flatnonzero(state_of != DEAD)
        return Reached(ids, state_of[ids])

    def with_twins(self, tokens: list[int]) -> list[int]:
        """`tokens`, of which nodes name each, and those of equal text."""
        if not len(self._twins):
            return tokens
        twins: list[int] = self._twins[np.isin(self._twins[:, 1], tokens), 0].tolist()
        return tokens + twins

    def can_spell(self, dfa: ByteDfa | CountedByteDfa) -> bool:
        """Whether every byte that `dfa` may want is a token by itself, so that no state can be a dead end."""
        if not self.missing_bytes:
            return True
        allowed = dfa.delta >= 0 if isinstance(dfa, ByteDfa) else dfa.counts.count > 0
        wanted = {int(number) for number in np.flatnonzero(allowed.any(axis=0))}
        for byte in self.missing_bytes:
            for entry in np.unique(dfa.utf8[:, byte]):
                if entry >= 0 or int(~entry) in wanted:
                    return False
        return True


def _by_product(dfa: ByteDfa) -> Step | None:
    if dfa.product is None:
        return None
    kind_of, table = dfa.product
    kinds, flat = table.shape[1], table.reshape(-1)
    return lambda at, byte: flat[at * kinds + kind_of[byte]].astype(np.int64)


def _by_parts(dfa: ByteDfa) -> Step:
    nodes, width = dfa.nodes, dfa.delta.shape[1]
    utf8, delta = dfa.utf8.reshape(-1), dfa.delta.reshape(-1)

    def step(at: Ints, byte: Ints) -> Ints:
        state, node = np.divmod(at, nodes)
        entry = utf8[node * 256 + byte].astype(np.int64)
        leaf = entry < 0
        after = delta[state * width + np.where(leaf, ~entry, width - 1)].astype(np.int64)
        inner = np.where(leaf, 0, entry)
        stays = np.where(dfa.open_nodes[dfa.pattern_of[state], inner], state * nodes + inner, DEAD)
        return np.where(leaf, np.where(after >= 0, after * nodes, DEAD), stays)

    return step


def spread(starts: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """start, start + 1 ... of each run, and which run each comes from."""
    source = np.repeat(np.arange(len(counts)), counts)
    return np.arange(len(source)) + (starts - (np.cumsum(counts) - counts))[source], source


def _joined(parts: Sequence[npt.NDArray[np.generic]]) -> Ints:
    return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, dtype=np.int64)
