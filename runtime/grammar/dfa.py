"""ByteDfa: the byte-level automaton of a constraint, from a regular expression or from a list of choices.

A state is one int: (state of the character automaton) * nodes + (node of the UTF-8 table), so that the
product is never written out: a length bound of thousands of Unicode characters costs one small row each. It
does not know tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from runtime.grammar.automaton import CharDfa, Limits, Meter, build
from runtime.grammar.regex_syntax import parse
from runtime.grammar.utf8 import utf8_table
from runtime.protocol.errors import BadConstraint

DEAD = -1
DEFAULT_LIMITS = Limits()
MAX_PATTERN = 1 << 17
"""Characters of a pattern; longer ones would take seconds in `re`'s own parser."""
_FORCED_KEPT = 4096
_PRODUCT_LIMIT = 1 << 21


@dataclass(frozen=True, eq=False)
class ByteDfa:
    """delta: int32 [states, classes + 1], -1 = no way on, the last column all -1. utf8: int32 [nodes, 256],
    see utf8_table. accepting: bool [states]. Immutable, shared by threads. The first state is 0; DEAD is no
    state."""

    delta: npt.NDArray[np.int32]
    utf8: npt.NDArray[np.int32]
    accepting: npt.NDArray[np.bool_]

    @cached_property
    def nodes(self) -> int:
        return len(self.utf8)

    @cached_property
    def pattern_of(self) -> npt.NDArray[np.intp]:
        """Per character state, which row of `open_nodes` is its own: states that allow the same classes
        share one."""
        return self._patterns[1]

    @cached_property
    def open_nodes(self) -> npt.NDArray[np.bool_]:
        """bool [patterns, nodes]: whether some character that goes on from node n is allowed."""
        return self._patterns[0]

    @cached_property
    def _patterns(self) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.intp]]:
        allowed = self.delta >= 0
        _, firsts, pattern_of = np.unique(
            np.packbits(allowed, axis=1), axis=0, return_index=True, return_inverse=True
        )
        rows = allowed[firsts]
        nodes, width = len(self.utf8), self.delta.shape[1]
        below = np.zeros((nodes, width), dtype=np.bool_)
        at, byte = np.nonzero(self.utf8 < 0)
        below[at, ~self.utf8[at, byte]] = True
        for node in (*range(1, nodes), 0):  # a node's children have smaller numbers; the root comes last
            inner = np.unique(self.utf8[node])
            inner = inner[inner >= 0]
            if len(inner):
                below[node] |= below[inner].any(axis=0)
        return (rows.astype(np.float32) @ below.T.astype(np.float32)) > 0, pattern_of.reshape(-1)

    @cached_property
    def product(self) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.int32]] | None:
        """The written-out byte automaton, where it is small: (kind of each byte [256], the state after each
        kind [states * nodes, kinds], DEAD where not allowed); else None."""
        _, firsts, kind_of = np.unique(self.utf8, axis=1, return_index=True, return_inverse=True)
        states, nodes, kinds = len(self.delta), self.nodes, len(firsts)
        if states * nodes * kinds > _PRODUCT_LIMIT:
            return None
        entries = self.utf8[:, firsts]
        leaf = entries < 0
        after = self.delta[:, np.where(leaf, ~entries, -1)]
        inner = np.where(leaf, 0, entries)
        here = np.arange(states, dtype=np.int32)[:, None, None] * nodes + inner
        table = np.where(
            leaf,
            np.where(after >= 0, after * nodes, DEAD),
            np.where(self.open_nodes[self.pattern_of][:, inner], here, DEAD),
        )
        return kind_of.reshape(-1), table.reshape(states * nodes, kinds).astype(np.int32)

    @cached_property
    def _forced(self) -> dict[int, tuple[bytes, int]]:
        return {}

    def step(self, state: int, byte: int) -> int:
        """The state after one byte, or DEAD."""
        at, node = divmod(state, self.nodes)
        entry = int(self.utf8[node, byte])
        if entry >= 0:
            return at * self.nodes + entry if self.open_nodes[self.pattern_of[at], entry] else DEAD
        after = int(self.delta[at, ~entry])
        return after * self.nodes if after >= 0 else DEAD

    def walk(self, state: int, data: bytes) -> int:
        """The state after all of `data`, or DEAD."""
        for byte in data:
            state = self.step(state, byte)
            if state == DEAD:
                return DEAD
        return state

    def accepts(self, state: int) -> bool:
        """Whether the bytes up to `state` are a whole match."""
        at, node = divmod(state, self.nodes)
        return node == 0 and bool(self.accepting[at])

    def is_final(self, state: int) -> bool:
        """Whether no byte may follow. Every state reaches a match, so such a state accepts."""
        at, node = divmod(state, self.nodes)
        return node == 0 and not self.open_nodes[self.pattern_of[at], 0]

    def following(self, state: int) -> npt.NDArray[np.int64]:
        """int64 [256]: the state after each byte, DEAD where it is not allowed."""
        at, node = divmod(state, self.nodes)
        entries = self.utf8[node].astype(np.int64)
        leaf = entries < 0
        after = self.delta[at, np.where(leaf, ~entries, -1)].astype(np.int64)
        inner = leaf | self.open_nodes[self.pattern_of[at], np.where(leaf, 0, entries)]
        return np.where(leaf, np.where(after >= 0, after * self.nodes, DEAD),
                        np.where(inner, at * self.nodes + entries, DEAD))  # fmt: skip

    def next_bytes(self, state: int) -> list[int]:
        return [int(byte) for byte in np.flatnonzero(self.following(state) != DEAD)]

    def only_byte(self, state: int) -> tuple[int, int] | None:
        """(byte, state after it) where exactly one byte may follow and stopping is not allowed, else None."""
        if self.accepts(state):
            return None
        after = self.following(state)
        ways = np.flatnonzero(after != DEAD)
        return (int(ways[0]), int(after[ways[0]])) if len(ways) == 1 else None

    def forced(self, state: int) -> tuple[bytes, int]:
        """The longest unique byte path from `state`, and where it ends. Finite: each state can reach a
        match, and a match ends the path."""
        known = self._forced.get(state)
        if known is None:
            if len(self._forced) >= _FORCED_KEPT:
                self._forced.clear()
            path, at = bytearray(), state
            while (only := self.only_byte(at)) is not None:
                path.append(only[0])
                at = only[1]
            known = self._forced[state] = bytes(path), at
        return known


def compile_regex(pattern: str, limits: Limits = DEFAULT_LIMITS) -> ByteDfa:
    """The automaton of all UTF-8 texts that re.fullmatch(pattern, text) accepts.

    Raises BadConstraint (syntax, with the position; too large; matches nothing) or UnsupportedConstraint.
    """
    if len(pattern) > MAX_PATTERN:
        raise BadConstraint(f"has {len(pattern)} characters; at most {MAX_PATTERN} are taken", where="regex")
    try:
        automaton = build(parse(pattern), limits)
    except RecursionError:
        raise BadConstraint("groups are nested too deeply", where="regex") from None
    return _with_utf8(automaton)


def _with_utf8(automaton: CharDfa) -> ByteDfa:
    classes = automaton.delta.shape[1] - 1
    return ByteDfa(automaton.delta, utf8_table(automaton.intervals, classes), automaton.accepting)


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
        shared = next(
            (i for i, (a, b) in enumerate(zip(previous, text)) if a != b), min(len(previous), len(text))
        )
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
