"""The tokens of a vocabulary walked through an automaton with counters, for all values of the counters at
once.

A walk begins in one control, its counters' values left open. Where a path asks something of a value, it is
noted: a token comes out with the box of starting values for which it is allowed. So one walk serves
`x{3,4096}` from its first character to its last. It does not know masks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from runtime.grammar.counted_dfa import CountedByteDfa
from runtime.grammar.merged_trie import Ints, MergedTrie
from runtime.grammar.trie import spread

Bools = npt.NDArray[np.bool_]


class Front(NamedTuple):
    """Paths under way, one per column. here [paths]: node of the tree; before a step, the one whose byte
    comes next, after it, the one whose byte was taken. control, node [paths]: where the automaton is. fixed
    bool [slots, paths]: whether a slot's value is known and `off`; else it is the starting value + off, and
    the starting value lies in low .. high."""

    here: Ints
    control: Ints
    node: Ints
    fixed: Bools
    off: Ints
    low: Ints
    high: Ints

    def take(self, index: Ints) -> Front:
        return Front(
            self.here[index], self.control[index], self.node[index], self.fixed[:, index],
            self.off[:, index], self.low[:, index], self.high[:, index],
        )  # fmt: skip


class Allowed(NamedTuple):
    """Nodes of the tree [found] at which tokens end, and the box of starting values [slots, found] that
    allows each. A node may come up several times."""

    nodes: Ints
    low: Ints
    high: Ints


class Rules(NamedTuple):
    """What a walk asks of values: low, high int64 [slots, edges], and the same of the gates' rows."""

    low: Ints
    high: Ints
    gate_low: Ints
    gate_high: Ints


def rules_of(dfa: CountedByteDfa) -> Rules:
    gates = dfa.gates
    return Rules(dfa.counts.low, dfa.counts.high, gates.low, gates.high)


class Walker:
    """Steps of many paths at once through `dfa`, along `tree`."""

    def __init__(self, dfa: CountedByteDfa, tree: MergedTrie) -> None:
        self._dfa, self.tree, self._rules = dfa, tree, rules_of(dfa)
        self.radix = dfa.counts.radix
        counts, gates = dfa.counts, dfa.gates
        self._utf8 = dfa.utf8.reshape(-1)
        self._first, self._count = counts.first.reshape(-1), counts.count.reshape(-1)
        self._width = counts.classes + 1
        self._target = counts.target.astype(np.int64)
        self._gate_first, self._gate_count = gates.first, gates.count

    def start(self, control: int, node: int) -> Front:
        """All first bytes of tokens, before a step."""
        here = np.arange(self.tree.roots)
        size, radix = len(here), self._dfa.counts.radix
        shape = (len(radix), size)
        bounds = np.array([values - 1 for values in radix])
        return Front(
            here, np.full(size, control), np.full(size, node), np.zeros(shape, dtype=np.bool_),
            np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64),
            np.repeat(bounds.astype(np.int64).reshape(-1, 1), size, axis=1),
        )  # fmt: skip

    def run(self, front: Front) -> list[Front]:
        """All steps from `front` on: the paths after each."""
        levels = []
        while len(front.here):
            front = self.step(front)
            levels.append(front)
            front = self.below(front)
        return levels

    def below(self, front: Front) -> Front:
        """The children of each path's node."""
        here, source = spread(self.tree.child_start[front.here], self.tree.child_count[front.here])
        return front.take(source)._replace(here=here)

    def step(self, front: Front) -> Front:
        """After the byte of each path's node."""
        entry = self._utf8[front.node * 256 + self.tree.byte[front.here]].astype(np.int64)
        leaf = entry < 0
        if leaf.all():
            return self._complete(front, ~entry)
        ends, inner = np.flatnonzero(leaf), np.flatnonzero(~leaf)
        done = self._complete(front.take(ends), ~entry[ends])
        going = self._inside(front.take(inner), entry[inner])
        return Front(
            np.concatenate((done.here, going.here)),
            np.concatenate((done.control, going.control)),
            np.concatenate((done.node, going.node)),
            np.concatenate((done.fixed, going.fixed), axis=1),
            np.concatenate((done.off, going.off), axis=1),
            np.concatenate((done.low, going.low), axis=1),
            np.concatenate((done.high, going.high), axis=1),
        )

    def _complete(self, front: Front, kind: Ints) -> Front:
        """A character of class `kind` is complete."""
        cell = front.control * self._width + kind
        edge, source = spread(self._first[cell].astype(np.int64), self._count[cell].astype(np.int64))
        rules, counts = self._rules, self._dfa.counts
        front = front.take(source)
        if counts.radix:
            front, kept = _held(front, rules.low[:, edge], rules.high[:, edge])
            edge = edge[kept]
            keep, add = counts.keep[:, edge], counts.add[:, edge]
            front = front._replace(fixed=front.fixed | ~keep, off=np.where(keep, front.off, 0) + add)
        return front._replace(control=self._target[edge], node=np.zeros(len(edge), dtype=np.int64))

    def _inside(self, front: Front, node: Ints) -> Front:
        """In the middle of a character, at `node` of the UTF-8 table."""
        rules, gates = self._rules, self._dfa.gates
        row, source = spread(self._gate_first[front.control], self._gate_count[front.control])
        node = node[source]
        may = gates.open[row, node]
        kept = np.flatnonzero(may)
        row, node = row[kept], node[kept]
        front = front.take(source[kept])
        if self._dfa.counts.radix:
            front, kept = _held(front, rules.gate_low[:, row], rules.gate_high[:, row])
            node = node[kept]
        return front._replace(node=node)

    def allowed(self, levels: list[Front]) -> Allowed:
        """The nodes in `levels` at which tokens end."""
        nodes, lows, highs = [], [], []
        for level in levels:
            token = self.tree.token[level.here]
            ends = np.flatnonzero(token >= 0)
            nodes.append(token[ends])
            lows.append(level.low[:, ends])
            highs.append(level.high[:, ends])
        slots = len(self._dfa.counts.radix)
        empty = np.zeros((slots, 0), dtype=np.int64)
        return Allowed(
            np.concatenate([np.empty(0, dtype=np.int64), *nodes]),
            np.concatenate([empty, *lows], axis=1),
            np.concatenate([empty, *highs], axis=1),
        )


def _held(front: Front, low: Ints, high: Ints) -> tuple[Front, Ints]:
    """The paths whose values may lie in low .. high [slots, paths], and which those are."""
    fixed, off = front.fixed, front.off
    new_low = np.where(fixed, front.low, np.maximum(front.low, low - off))
    new_high = np.where(fixed, front.high, np.minimum(front.high, high - off))
    may = (new_low <= new_high) & (~fixed | ((off >= low) & (off <= high)))
    kept = np.flatnonzero(may.all(axis=0))
    if len(kept) == may.shape[1]:
        return front._replace(low=new_low, high=new_high), kept
    return front._replace(low=new_low, high=new_high).take(kept), kept


class CharacterWalker(Walker):
    """The same along a tree of whole characters; kind_of [characters of the tree]: the class of each."""

    def __init__(self, dfa: CountedByteDfa, tree: MergedTrie, kind_of: Ints) -> None:
        super().__init__(dfa, tree)
        self._kind_of = kind_of

    def step(self, front: Front) -> Front:
        return self._complete(front, self._kind_of[self.tree.byte[front.here]])
