"""ByteDfa: the automaton over bytes of a regular expression or a list of choices.

A state is one int: (state of the character automaton) * nodes + (node of the UTF-8 table), so the product is
never written out and a length bound of thousands of Unicode characters costs one small row each.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from runtime.grammar.automata.automaton import Limits, Meter, build
from runtime.grammar.automata.regex_syntax import Node, parse
from runtime.grammar.automata.utf8 import utf8_table
from runtime.protocol.errors import BadConstraint

DEFAULT_LIMITS = Limits()
MAX_PATTERN = 1 << 17
"""Characters of a pattern; longer ones would take seconds in `re`'s own parser."""
DEAD = -1
"""No state."""
LONGEST_FORCED = 1 << 14
"""Bytes of one forced path; a longer one continues from its end."""
_FORCED_KEPT = 4096
_MIX = np.uint64(0x9E3779B97F4A7C15)
_SETS = 16
"""Sets of bytes, the most common ones, of which one is chosen for a run."""


class Run(NamedTuple):
    """Characters that many states do not distinguish: a repeat of a wide class is a chain of such states.

    classes: bool [classes + 1], those of the characters. after: int [character states], the state to which
    all of them lead, else -1. ends: bool [character states], whether none of them leads on."""

    classes: npt.NDArray[np.bool_]
    after: npt.NDArray[np.int64]
    ends: npt.NDArray[np.bool_]

    def chain(self, state: int, most: int) -> list[int]:
        """The character states from `state` on along the run, at most `most`; [] if it ends before that in a
        state from which some of its characters lead on."""
        states, after = [state], self.after.item
        while len(states) < most and (following := after(state)) >= 0:
            state = following
            states.append(state)
        return states if len(states) == most or self.ends[state] else []


@dataclass(frozen=True, eq=False)
class ByteDfa:
    """delta: int32 [states, classes + 1], -1 = no way on, the last column all -1. utf8: int32 [nodes, 256],
    see utf8_table. accepting: bool [states]. The first state is 0, and every state can reach a match.
    Immutable but for its caches; shared by threads."""

    delta: npt.NDArray[np.int32]
    utf8: npt.NDArray[np.int32]
    accepting: npt.NDArray[np.bool_]
    intervals: tuple[tuple[int, int, int], ...] = ()
    """(first, last, class) of code points, as CharDfa's; empty if classes are bytes."""

    @cached_property
    def nodes(self) -> int:
        """state % nodes == 0 between two characters, and only there."""
        return len(self.utf8)

    @cached_property
    def classes(self) -> int:
        """Kinds of characters that are distinguished."""
        return int(self.delta.shape[1]) - 1

    @cached_property
    def pattern_of(self) -> npt.NDArray[np.intp]:
        """The row of `open_nodes` for each character state; equal sets of allowed classes share one."""
        return self._patterns[1]

    @cached_property
    def open_nodes(self) -> npt.NDArray[np.bool_]:
        """bool [patterns, nodes]: whether some character that goes on from node n is allowed."""
        return self._patterns[0]

    @cached_property
    def _patterns(self) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.intp]]:
        allowed = self.delta >= 0
        numbers: dict[bytes, int] = {}
        packed = np.packbits(allowed, axis=1)
        pattern_of = np.array([numbers.setdefault(row.tobytes(), len(numbers)) for row in packed])
        rows = np.zeros((len(numbers), allowed.shape[1]), dtype=np.float32)
        rows[pattern_of] = allowed
        below = _nodes_below(self.utf8, self.delta.shape[1])
        return (rows @ below.T.astype(np.float32)) > 0, pattern_of

    @cached_property
    def kind_of(self) -> npt.NDArray[np.intp]:
        """int64 [256]: bytes of equal columns of the UTF-8 table are of one kind, numbered by their first
        byte; -1 for those that lead nowhere."""
        columns = np.ascontiguousarray(self.utf8.T)
        numbers: dict[bytes, int] = {}
        nowhere = (columns == ~self.classes).all(axis=1).tolist()
        kinds = [
            -1 if nowhere[byte] else numbers.setdefault(columns[byte].tobytes(), len(numbers))
            for byte in range(256)
        ]
        return np.array(kinds, dtype=np.intp)

    def step(self, state: int, byte: int) -> int:
        """The state after one byte, or DEAD."""
        at, node = divmod(state, self.nodes)
        entry = self.utf8.item(node, byte)
        if entry >= 0:
            return at * self.nodes + entry if self.open_nodes.item(self.pattern_of.item(at), entry) else DEAD
        after = self.delta.item(at, ~entry)
        return after * self.nodes if after >= 0 else DEAD

    def accepts(self, state: int) -> bool:
        """Whether the bytes up to `state` are a whole match."""
        at, node = divmod(state, self.nodes)
        return node == 0 and bool(self.accepting[at])

    def is_final(self, state: int) -> bool:
        """Whether no byte may follow. Every state reaches a match, so such a state accepts."""
        at, node = divmod(state, self.nodes)
        return node == 0 and not self.open_nodes[self.pattern_of[at], 0]

    def following(self, state: int) -> npt.NDArray[np.int64]:
        """int64 [256]: the state after each byte, or DEAD."""
        at, node = divmod(state, self.nodes)
        entries = self.utf8[node].astype(np.int64)
        leaf = entries < 0
        after = self.delta[at, np.where(leaf, ~entries, -1)].astype(np.int64)
        inner = leaf | self.open_nodes[self.pattern_of[at], np.where(leaf, 0, entries)]
        return np.where(leaf, np.where(after >= 0, after * self.nodes, DEAD),
                        np.where(inner, at * self.nodes + entries, DEAD))  # fmt: skip

    def walk(self, state: int, data: bytes) -> int:
        """The state after all of `data`, or DEAD."""
        for byte in data:
            state = self.step(state, byte)
            if state == DEAD:
                return DEAD
        return state

    def next_bytes(self, state: int) -> list[int]:
        return [int(byte) for byte in np.flatnonzero(self.following(state) != DEAD)]

    def only_byte(self, state: int) -> tuple[int, int] | None:
        """(byte, state after it) if exactly one byte may follow and stopping is not allowed."""
        if self.accepts(state):
            return None
        after = self.following(state)
        ways = np.flatnonzero(after != DEAD)
        return (int(ways[0]), int(after[ways[0]])) if len(ways) == 1 else None

    @cached_property
    def _forced(self) -> dict[int, tuple[bytes, int]]:
        return {}

    def forced(self, state: int) -> tuple[bytes, int]:
        """The only byte path from `state` up to a match, at most LONGEST_FORCED, and the state after it."""
        known = self._forced.get(state)
        if known is None:
            if len(self._forced) >= _FORCED_KEPT:
                self._forced.clear()
            path, at = bytearray(), state
            while len(path) < LONGEST_FORCED and (only := self.only_byte(at)) is not None:
                path.append(only[0])
                at = only[1]
            known = self._forced[state] = bytes(path), at
        return known

    @property
    def nbytes(self) -> int:
        return self.delta.nbytes + self.utf8.nbytes + self.accepting.nbytes

    @cached_property
    def content(self) -> bytes:
        """A digest of the automaton."""
        digest = hashlib.blake2b(b"states", digest_size=20)
        for part in (self.delta, self.utf8, self.accepting):
            digest.update(repr(part.shape).encode() + part.tobytes())
        return digest.digest()

    def width(self, state: int) -> int:
        """The most ASCII bytes that lead from `state` to a common one; 0 inside of a character."""
        at, node = divmod(state, self.nodes)
        return 0 if node else int(self._widths[0][at])

    def alike(self, steps: int) -> npt.NDArray[np.uint64]:
        """uint64 [character states]: equal digests for states that allow the same texts of up to `steps`
        characters, such as the states of a long repeat up to its end."""
        width = self.delta.shape[1]
        # Not of numpy.random, whose import takes longer than all of this.
        weights = np.arange(1, width + 1, dtype=np.uint64) * _MIX
        for shift in (30, 27, 31):
            weights = (weights ^ (weights >> np.uint64(shift))) * _MIX
        weights |= np.uint64(1)
        states = len(self.delta)
        rows, classes = np.nonzero(self.delta >= 0)
        edges, which = np.unique(rows * states + self.delta[rows, classes], return_inverse=True)
        factors = np.zeros(len(edges), dtype=np.uint64)
        np.add.at(factors, which, weights[classes])
        sources, targets = np.divmod(edges, states)
        some, first = np.unique(sources, return_index=True)
        digests = np.ones(states, dtype=np.uint64)
        for _ in range(min(steps, states)):
            digests *= _MIX
            digests ^= digests >> np.uint64(29)
            after = np.ones(states, dtype=np.uint64)
            if len(some):
                after[some] = np.add.reduceat(digests[targets] * factors, first) | np.uint64(1)
            digests = after
        return digests

    @cached_property
    def widest(self) -> int:
        """The greatest width() of all states."""
        return int(self._widths[0].max(initial=0))

    @cached_property
    def _widths(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """width() of each character state, and the state to which so many bytes lead, -1 for none."""
        states = len(self.delta)
        some = np.flatnonzero(self._bytes)
        part = self.delta[:, some]
        rows, columns = np.nonzero(part >= 0)
        edges, which = np.unique(rows * states + part[rows, columns], return_inverse=True)
        bytes_ = np.bincount(which, self._bytes[some][columns], len(edges)).astype(np.int64)
        order = bytes_.argsort()  # of the edges of a state the widest is written last
        sources, targets = np.divmod(edges[order], states)
        widths, after = np.zeros(states, dtype=np.int64), np.full(states, -1)
        widths[sources], after[sources] = bytes_[order], targets
        return widths, after

    def runs(self, least: int) -> list[Run]:
        """One run for most of the states whose width() is `least` or more, with as many characters as
        possible; and the run of no characters, unless the first serves all of them to their ends."""
        widths, after = self._widths
        wide = np.flatnonzero(widths >= least)
        if not len(wide):
            return []
        some = np.flatnonzero(self._bytes)
        along = self.delta[wide][:, some] == after[wide, None]
        rows = np.ascontiguousarray(np.packbits(along, axis=1))
        sets = Counter(rows.view(np.dtype((np.void, rows.shape[1]))).ravel().tolist()).most_common(_SETS)
        offered = np.array([list(row) for row, _ in sets], dtype=np.uint8).reshape(len(sets), -1)
        flags = np.unpackbits(offered, axis=1, count=len(some)).astype(np.int64)
        served = (flags @ (1 - flags).T == 0) @ np.array([count for _, count in sets])
        best = flags[(served * (flags @ self._bytes[some])).argmax()] > 0
        serves = along[:, best].all(axis=1)
        states = wide[serves]
        classes = (self.delta[states] == after[states, None]).all(axis=0)
        ends = np.logical_and.reduce(self.delta[:, classes] < 0, axis=1)
        run = Run(classes, np.full(len(after), -1), ends)
        run.after[states] = after[states]
        follow = after[states]
        whole = serves.all() and ((run.after[follow] >= 0) | run.ends[follow]).all()
        nothing = np.zeros_like(classes)
        none = Run(nothing, np.full(len(after), -1), np.ones(len(after), dtype=np.bool_))
        return [run] if whole else [run, none]

    @cached_property
    def _bytes(self) -> npt.NDArray[np.intp]:
        """How many ASCII bytes each class has."""
        return np.bincount(~np.minimum(self.utf8[0, :128], -1), minlength=self.delta.shape[1])


def compile_regex(pattern: str, limits: Limits = DEFAULT_LIMITS) -> ByteDfa:
    """The automaton of all UTF-8 texts that re.fullmatch(pattern, text) accepts. Raises BadConstraint
    (syntax, with the position; matches nothing) or UnsupportedConstraint (too large, or not regular)."""
    return compile_node(parse_regex(pattern), limits)


def parse_regex(pattern: str) -> Node:
    """The language of re.fullmatch(pattern, .); raises as compile_regex does."""
    if len(pattern) > MAX_PATTERN:
        raise BadConstraint(f"has {len(pattern)} characters; at most {MAX_PATTERN} are taken", where="regex")
    return parse(pattern)


def compile_node(node: Node, limits: Limits = DEFAULT_LIMITS) -> ByteDfa:
    """The automaton of a tree of languages; see compile_regex."""
    try:
        automaton = build(node, limits)
    except RecursionError:
        raise BadConstraint("groups are nested too deeply", where="regex") from None
    utf8 = utf8_table(automaton.intervals, automaton.delta.shape[1] - 1)
    return ByteDfa(automaton.delta, utf8, automaton.accepting, automaton.intervals)


def compile_choices(options: Sequence[str], limits: Limits = DEFAULT_LIMITS) -> ByteDfa:
    """The automaton of exactly these texts: a tree over their bytes. Raises BadConstraint."""
    if not options:
        raise BadConstraint("has no options", where="choices")
    try:
        texts = sorted({option.encode("utf-8") for option in options})
    except UnicodeEncodeError as error:
        raise BadConstraint(
            f"an option cannot be written as UTF-8: {error.object!r}", where="choices"
        ) from None
    meter = Meter(limits, "choices")
    used = {byte: number for number, byte in enumerate(sorted({byte for text in texts for byte in text}))}
    edges: list[tuple[int, int, int]] = []
    ends: set[int] = set()
    path, previous, states = [0], b"", 1
    for text in texts:
        shared = shared_prefix(previous, text)
        del path[shared + 1 :]
        meter.spend(1)
        for byte in text[shared:]:
            edges.append((path[-1], used[byte], states))
            path.append(states)
            states += 1
        ends.add(path[-1])
        previous = text
        meter.table(states, len(used))
    delta = np.full((states, len(used) + 1), -1, dtype=np.int32)
    if edges:
        sources, classes, targets = np.array(edges, dtype=np.int32).T
        delta[sources, classes] = targets
    accepting = np.zeros(states, dtype=np.bool_)
    accepting[list(ends)] = True
    entries = np.full((1, 256), ~len(used), dtype=np.int32)
    for byte, number in used.items():
        entries[0, byte] = ~number
    return ByteDfa(delta, entries, accepting)


def shared_prefix(one: bytes, other: bytes) -> int:
    """How many bytes two texts begin with in common."""
    size = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        size += 1
    return size


def _nodes_below(utf8: npt.NDArray[np.int32], width: int) -> npt.NDArray[np.bool_]:
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
