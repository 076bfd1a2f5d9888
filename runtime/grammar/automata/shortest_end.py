"""ShortestEnds: the shortest text that leads from a state of an automaton to a match."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

from runtime.grammar.automata.dfa import ByteDfa

_RANGES = ((97, 122), (48, 57), (65, 90), (33, 126), (32, 32), (0, 0x10FFFF))
"""Candidates for the character of a class: letters, digits, signs, a space, any."""


class ShortestEnds:
    """The shortest texts of one automaton, computed once for all states, breadth-first from its matches."""

    def __init__(self, dfa: ByteDfa) -> None:
        self._dfa = dfa

    def text(self, state: int) -> bytes:
        """The shortest text from `state` to a match."""
        dfa, parts = self._dfa, bytearray()
        while state % dfa.nodes:  # within a character: any that can be completed
            byte = dfa.next_bytes(state)[0]
            parts.append(byte)
            state = dfa.step(state, byte)
        at = state // dfa.nodes
        while not dfa.accepting[at]:
            kind = int(self._way[at])
            parts += self._characters[kind]
            at = int(dfa.delta[at, kind])
        return bytes(parts)

    @cached_property
    def _way(self) -> npt.NDArray[np.int32]:
        """int32 [states]: the class of the next character of the shortest text from each."""
        delta = self._dfa.delta
        ranked = sorted(range(delta.shape[1] - 1), key=self._rank)
        sources, ranks = np.nonzero(delta[:, ranked] >= 0)
        kinds = np.array(ranked, dtype=np.int32)[ranks]
        targets = delta[sources, kinds]
        order = np.argsort(targets, kind="stable")
        sources, ranks, kinds = sources[order], ranks[order], kinds[order]
        starts = np.searchsorted(targets[order], np.arange(len(delta) + 1))
        way = np.full(len(delta), -1, dtype=np.int32)
        done = self._dfa.accepting.copy()
        layer = np.flatnonzero(done)
        while len(layer):
            edges = np.concatenate([np.arange(starts[one], starts[one + 1]) for one in layer.tolist()])
            edges = edges[~done[sources[edges]]]
            edges = edges[np.argsort(-ranks[edges], kind="stable")]
            way[sources[edges]] = kinds[edges]  # the best ranked is written last
            layer = np.unique(sources[edges])
            done[layer] = True
        return way

    def _rank(self, kind: int) -> tuple[int, bytes]:
        """Short and plain characters first."""
        char = self._characters[kind]
        plain = 0 if char.isalnum() else 1 if char.isascii() and char.decode().isprintable() else 4
        return len(char) + plain, char

    @cached_property
    def _characters(self) -> list[bytes]:
        """For each class one of its characters, a letter or digit if there is one."""
        chars: list[bytes] = [b""] * self._dfa.delta.shape[1]
        for first, last, kind in self._dfa.intervals:
            point = next(max(first, low) for low, high in _RANGES if max(first, low) <= min(last, high))
            char = chr(point).encode("utf-8", "replace")
            if not chars[kind] or (char.isalnum() and not chars[kind].isalnum()):
                chars[kind] = char
        for byte, entry in enumerate(self._dfa.utf8[0].tolist()):
            if entry < 0 and not chars[~entry]:
                chars[~entry] = bytes((byte,))
        return chars
