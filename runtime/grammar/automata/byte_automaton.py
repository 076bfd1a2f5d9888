"""ByteAutomaton: what masks, jump-forward and matchers ask of a constraint's automaton over bytes.

A state is an int >= 0; the first is 0 and every state can reach a match. It does not know how the states are
stored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property

import numpy as np
import numpy.typing as npt

DEAD = -1
"""No state."""

_FORCED_KEPT = 4096
LONGEST_FORCED = 1 << 14
"""Bytes of one forced path; a longer one goes on from where it ends."""


class ByteAutomaton(ABC):
    """Immutable but for its caches; shared by threads."""

    nodes: int
    """state % nodes == 0 between two characters, and only there."""

    classes: int
    """Kinds of characters that are told apart."""

    @abstractmethod
    def step(self, state: int, byte: int) -> int:
        """The state after one byte, or DEAD."""

    @abstractmethod
    def accepts(self, state: int) -> bool:
        """Whether the bytes up to `state` are a whole match."""

    @abstractmethod
    def is_final(self, state: int) -> bool:
        """Whether no byte may follow. Every state reaches a match, so such a state accepts."""

    @abstractmethod
    def following(self, state: int) -> npt.NDArray[np.int64]:
        """int64 [256]: the state after each byte, DEAD where it is not allowed."""

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
        """(byte, state after it) where exactly one byte may follow and stopping is not allowed, else None."""
        if self.accepts(state):
            return None
        after = self.following(state)
        ways = np.flatnonzero(after != DEAD)
        return (int(ways[0]), int(after[ways[0]])) if len(ways) == 1 else None

    @cached_property
    def _forced(self) -> dict[int, tuple[bytes, int]]:
        return {}

    def forced(self, state: int) -> tuple[bytes, int]:
        """The longest unique byte path from `state`, of at most LONGEST_FORCED bytes, and where it ends. A
        match ends the path."""
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
