"""Which tokens of a vocabulary begin with, end in or contain a string, as packed bits; and the two small
automata of free text: strings to watch for (Aho & Corasick 1975) and UTF-8.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache

import numpy as np
import numpy.typing as npt

from runtime.grammar.automata.charset import SURROGATES, complement
from runtime.grammar.automata.utf8 import utf8_table
from runtime.grammar.masks.token_bits import Bits, Cache, token_bits
from runtime.protocol.vocabulary import Vocabulary

_KEPT = 256


@cache
def _utf8_states() -> list[list[int]]:
    """By state, 0 = between characters: the state after each byte, -1 if it is not UTF-8."""
    table = utf8_table(tuple((*span, 0) for span in complement(SURROGATES)), 1)
    # ~0: a character is complete, ~1: there is none.
    states: list[list[int]] = np.where(table < 0, table + 1, table).tolist()
    return states


def utf8_step(state: int, byte: int) -> int:
    """The state after `byte`, -1 if it is not UTF-8."""
    return _utf8_states()[state][byte]


class Triggers:
    """Watches a text for strings. A state is the longest end of the text that begins some string."""

    def __init__(self, strings: Sequence[bytes]) -> None:
        self.strings = tuple(strings)
        self.prefix: list[bytes] = [b""]
        self._next: list[dict[int, int]] = [{}]
        self._fail = [0]
        self.ends: list[tuple[int, ...]] = [()]
        """By state: the numbers of the strings that end there, ascending."""
        for number, string in enumerate(self.strings):
            self._add(number, string)
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            for byte, after in self._next[state].items():
                self._fail[after] = self.step(self._fail[state], byte)
                waiting.append(after)
            self.ends[state] = tuple(sorted({*self.ends[state], *self.ends[self._fail[state]]}))

    def _add(self, number: int, string: bytes) -> None:
        state = 0
        for byte in string:
            if byte not in self._next[state]:
                self._next[state][byte] = len(self.prefix)
                self.prefix.append(self.prefix[state] + bytes((byte,)))
                self._next.append({})
                self._fail.append(0)
                self.ends.append(())
            state = self._next[state][byte]
        self.ends[state] = (*self.ends[state], number)

    def step(self, state: int, byte: int) -> int:
        while state and byte not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(byte, 0)

    def remainders(self, state: int) -> set[bytes]:
        """What would complete a string that has begun in `state`."""
        ends: set[bytes] = set()
        while state:
            begun = self.prefix[state]
            ends.update(string[len(begun) :] for string in self.strings if string.startswith(begun))
            state = self._fail[state]
        return ends


@lru_cache(maxsize=4)
def tag_space(vocabulary: Vocabulary) -> TagSpace:
    """The TagSpace of `vocabulary`, shared."""
    return TagSpace(vocabulary)


class TagSpace:
    """A vocabulary prepared for free text, shared by all constraints. Thread-safe."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.bits = token_bits(vocabulary)
        self.texts = self.bits.texts
        self._sorted, self._ids = self.bits.ordered
        self._rank = np.zeros(len(self.texts), dtype=np.int64)
        self._rank[self._ids] = np.arange(len(self._ids))
        self._text = np.frombuffer(b"".join(self.texts), dtype=np.uint8)
        self._sizes = np.fromiter(map(len, self.texts), np.int64, len(self.texts))
        self._ends = np.cumsum(self._sizes)
        self._owner = np.repeat(np.arange(len(self.texts), dtype=np.int32), self._sizes)
        self.text_ids = self.bits.pack(self._sizes > 0)
        self.everything = self.bits.seal(self.bits.pack(np.ones(self.bits.width, dtype=np.bool_)))
        self.utf8_prefixes = self._utf8()
        self._kept: Cache[Bits] = Cache(_KEPT)

    def _flags(self, tokens: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        flags = np.zeros(len(self.texts), dtype=np.bool_)
        flags[tokens] = True
        return flags

    def _containing(self, string: bytes) -> npt.NDArray[np.bool_]:
        """Flags of the tokens that contain `string`."""
        if not string:
            return self._sizes > 0
        starts = np.flatnonzero(self._text == string[0])
        for number, byte in enumerate(string[1:], 1):
            starts = starts[starts + number < len(self._text)]
            starts = starts[self._text[starts + number] == byte]
        within = self._owner[starts] == self._owner[starts + len(string) - 1]
        return self._flags(self._owner[starts[within]])

    def _ending(self, data: bytes) -> npt.NDArray[np.bool_]:
        """Flags of the tokens that end in `data`."""
        tokens = np.flatnonzero(self._sizes >= len(data))
        for number, byte in enumerate(data):
            tokens = tokens[self._text[self._ends[tokens] - len(data) + number] == byte]
        return self._flags(tokens)

    def _utf8(self) -> list[Bits]:
        """By state: the tokens that UTF-8 text may continue with."""
        flags = np.zeros((len(_utf8_states()), len(self.texts)), dtype=np.bool_)
        ascii_only = np.fromiter(map(bytes.isascii, self.texts), np.bool_, len(self.texts))
        flags[0] = ascii_only & (self._sizes > 0)
        for token in np.flatnonzero(~ascii_only).tolist():
            data = self.texts[token]
            for start in range(len(_utf8_states())):
                state = start
                for byte in data:
                    state = utf8_step(state, byte)
                    if state < 0:
                        break
                flags[start, token] = state >= 0
        return [self.bits.pack(row) for row in flags]

    def _beginning(self, prefix: bytes) -> npt.NDArray[np.int64]:
        """The tokens that begin with `prefix`."""
        return self._ids[self.bits.beginning(prefix)]

    def along(self, data: bytes) -> Bits:
        """Tokens that `data` begins with, or that begin with it."""

        def make() -> Bits:
            flags = self._flags(self._beginning(data))
            for size in range(1, len(data)):
                tokens = self._beginning(data[:size])
                flags[tokens[self._sizes[tokens] == size]] = True
            return self.bits.pack(flags)

        return self._kept.get(("along", data), make)

    def holding(self, triggers: Triggers, state: int) -> Bits:
        """Tokens within which a string of `triggers` ends, coming from `state`."""
        strings, remainders = triggers.strings, triggers.remainders(state)

        def within() -> Bits:
            flags = np.zeros(len(self.texts), dtype=np.bool_)
            for string in strings:
                flags |= self._containing(string)
            return self.bits.pack(flags)

        def begun() -> Bits:
            return self.bits.pack_ids(np.concatenate([self._beginning(rest) for rest in remainders]))

        inside = self._kept.get(("within", strings), within)
        return inside | self._kept.get(("begun", frozenset(remainders)), begun) if remainders else inside

    def ending_in(self, data: bytes) -> Bits:
        """Tokens with an end, shorter than the token, that `data` begins with or that begins with `data`."""

        def make() -> Bits:
            flags = self._containing(data)
            for size in range(1, len(data) + 1):
                flags |= self._ending(data[:size])
            return self.bits.pack(flags & (self._sizes > 1))

        return self._kept.get(("ending", data), make)

    def closing(self, closers: frozenset[int] | None) -> Bits:
        """Tokens of two bytes or more with one of `closers` before their last byte; None = any byte."""

        def make() -> Bits:
            if closers is None:
                return self.bits.pack(self._sizes > 1)
            listed = np.zeros(256, dtype=np.bool_)
            listed[list(closers)] = True
            at = np.flatnonzero(listed[self._text[:-1]])
            return self.bits.pack(self._flags(self._owner[at[self._owner[at] == self._owner[at + 1]]]))

        return self._kept.get(("closing", closers), make)

    def in_order(self, bits: Bits) -> Iterable[tuple[bytes, int]]:
        """(bytes, id) of the tokens in `bits`, by their bytes."""
        ids = self.bits.ids(bits)
        for at in np.sort(self._rank[ids]).tolist():
            yield self._sorted[at], int(self._ids[at])
