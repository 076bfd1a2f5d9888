"""A vocabulary seen through strings: which tokens begin with, end in or hold given text, as packed bits.

Also the two small automata that free text needs: words to watch for (Aho & Corasick 1975) and UTF-8. It knows
no constraint.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.grammar.masks.token_bits import token_bits
from runtime.protocol.vocabulary import Vocabulary

Bits = npt.NDArray[np.uint32]

_KEPT = 256
_CONTINUES = range(0x80, 0xC0)
_UTF8: tuple[dict[int, int], ...] = (
    {
        **dict.fromkeys(range(0x80), 0), **dict.fromkeys(range(0xC2, 0xE0), 1),
        **dict.fromkeys((*range(0xE1, 0xED), 0xEE, 0xEF), 2), **dict.fromkeys(range(0xF1, 0xF4), 3),
        0xE0: 4, 0xED: 5, 0xF0: 6, 0xF4: 7,
    },
    dict.fromkeys(_CONTINUES, 0),
    dict.fromkeys(_CONTINUES, 1),
    dict.fromkeys(_CONTINUES, 2),
    dict.fromkeys(range(0xA0, 0xC0), 1),
    dict.fromkeys(range(0x80, 0xA0), 1),
    dict.fromkeys(range(0x90, 0xC0), 2),
    dict.fromkeys(range(0x80, 0x90), 2),
)  # fmt: skip
"""By state, 0 = between characters: byte -> state after it (Unicode 15, table 3-7)."""


def utf8_step(state: int, byte: int) -> int:
    """The state after `byte`, -1 where it is not UTF-8."""
    return _UTF8[state].get(byte, -1)


class Triggers:
    """Watches a text for words. A state is the longest end of what was read that begins some word."""

    def __init__(self, words: Sequence[bytes]) -> None:
        self.words = tuple(words)
        self.prefix: list[bytes] = [b""]
        self._next: list[dict[int, int]] = [{}]
        self._fail = [0]
        self.ends: list[tuple[int, ...]] = [()]
        """By state: the numbers of the words that end there, ascending."""
        for number, word in enumerate(self.words):
            self._add(number, word)
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            for byte, after in self._next[state].items():
                self._fail[after] = self.step(self._fail[state], byte)
                waiting.append(after)
            self.ends[state] = tuple(sorted({*self.ends[state], *self.ends[self._fail[state]]}))

    def _add(self, number: int, word: bytes) -> None:
        state = 0
        for byte in word:
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
        """What would complete a word that has begun in `state`."""
        found: set[bytes] = set()
        while state:
            begun = self.prefix[state]
            found.update(word[len(begun) :] for word in self.words if word.startswith(begun))
            state = self._fail[state]
        return found


class TagSpace:
    """Made once for a vocabulary, used by every constraint. Thread-safe. All bits are uint32 [words]."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.bits = token_bits(vocabulary)
        self.texts = self.bits.texts
        self.ids = sorted(
            (token for token, data in enumerate(self.texts) if data), key=self.texts.__getitem__
        )
        self.sorted = [self.texts[token] for token in self.ids]
        self._ids = np.array(self.ids, dtype=np.int64)
        self.rank = np.zeros(len(self.texts), dtype=np.int64)
        self.rank[self._ids] = np.arange(len(self.ids))
        self._text = np.frombuffer(b"".join(self.texts), dtype=np.uint8)
        self._sizes = np.fromiter(map(len, self.texts), np.int64, len(self.texts))
        self._ends = np.cumsum(self._sizes)
        self._owner = np.repeat(np.arange(len(self.texts), dtype=np.int32), self._sizes)
        self.spoken = self.bits.pack(self._sizes > 0)
        self.everything = self.bits.seal(self.bits.pack(np.ones(self.bits.width, dtype=np.bool_)))
        self.utf8_prefixes = self._utf8()
        self._kept: OrderedDict[Any, Bits] = OrderedDict()
        self._lock = threading.Lock()

    def _of(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Flags of the tokens that the bytes at `places` of the joined text belong to."""
        flags = np.zeros(len(self.texts), dtype=np.bool_)
        flags[self._owner[places]] = True
        return flags

    def _holding(self, word: bytes) -> npt.NDArray[np.bool_]:
        """Flags of the tokens that hold `word`."""
        if not word:
            return self._sizes > 0
        places = np.flatnonzero(self._text == word[0])
        for number, byte in enumerate(word[1:], 1):
            places = places[places + number < len(self._text)]
            places = places[self._text[places + number] == byte]
        return self._of(places[self._owner[places] == self._owner[places + len(word) - 1]])

    def _ending(self, data: bytes) -> npt.NDArray[np.bool_]:
        """Flags of the tokens that end in `data`."""
        tokens = np.flatnonzero(self._sizes >= len(data))
        for number, byte in enumerate(data):
            tokens = tokens[self._text[self._ends[tokens] - len(data) + number] == byte]
        flags = np.zeros(len(self.texts), dtype=np.bool_)
        flags[tokens] = True
        return flags

    def _utf8(self) -> list[Bits]:
        """By state: the tokens that UTF-8 text may go on with."""
        flags = np.zeros((len(_UTF8), len(self.texts)), dtype=np.bool_)
        ascii_only = np.fromiter(map(bytes.isascii, self.texts), np.bool_, len(self.texts))
        flags[0] = ascii_only & (self._sizes > 0)
        for token in np.flatnonzero(~ascii_only).tolist():
            data = self.texts[token]
            for start in range(len(_UTF8)):
                state = start
                for byte in data:
                    state = utf8_step(state, byte)
                    if state < 0:
                        break
                flags[start, token] = state >= 0
        return [self.bits.pack(row) for row in flags]

    def _keep(self, key: Any, make: Callable[[], Bits]) -> Bits:
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return found
        found = make()
        with self._lock:
            self._kept[key] = found
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return found

    def _beginning(self, flags: npt.NDArray[np.bool_], word: bytes) -> None:
        """Flag the tokens that begin with `word`."""
        low = bisect_left(self.sorted, word)
        high = low
        end = _after(word)
        high = bisect_left(self.sorted, end) if end is not None else len(self.sorted)
        flags[self._ids[low:high]] = True

    def longest(self, data: bytes) -> int | None:
        """The longest token that `data` begins with."""
        for size in range(len(data), 0, -1):
            at = bisect_left(self.sorted, data[:size])
            if at < len(self.sorted) and self.sorted[at] == data[:size]:
                return self.ids[at]
        return None

    def along(self, data: bytes) -> Bits:
        """Tokens that `data` begins with, or that begin with it."""

        def make() -> Bits:
            flags = np.zeros(len(self.texts), dtype=np.bool_)
            self._beginning(flags, data)
            for size in range(1, len(data)):
                at = bisect_left(self.sorted, data[:size])
                while at < len(self.sorted) and self.sorted[at] == data[:size]:
                    flags[self.ids[at]] = True
                    at += 1
            return self.bits.pack(flags)

        return self._keep(("along", data), make)

    def holding(self, triggers: Triggers, state: int) -> Bits:
        """Tokens after which a word of `triggers` has ended somewhere, seen from `state`; no others are left
        out than those after which none has."""
        words = triggers.words

        def within() -> Bits:
            flags = np.zeros(len(self.texts), dtype=np.bool_)
            for word in words:
                flags |= self._holding(word)
            return self.bits.pack(flags)

        def begun() -> Bits:
            flags = np.zeros(len(self.texts), dtype=np.bool_)
            for rest in remainders:
                self._beginning(flags, rest)
            return self.bits.pack(flags)

        remainders = triggers.remainders(state)
        inside = self._keep(("within", words), within)
        return inside | self._keep(("begun", frozenset(remainders)), begun) if remainders else inside

    def ending_in(self, data: bytes) -> Bits:
        """Tokens with an end, shorter than the token, that `data` begins with or that begins with `data`."""

        def make() -> Bits:
            flags = self._holding(data)
            for size in range(1, len(data) + 1):
                flags |= self._ending(data[:size])
            return self.bits.pack(flags & (self._sizes > 1))

        return self._keep(("ending", data), make)

    def closing(self, closers: frozenset[int] | None) -> Bits:
        """Tokens of two bytes or more that hold one of `closers` before their last byte; None = any byte."""

        def make() -> Bits:
            if closers is None:
                return self.bits.pack(self._sizes > 1)
            listed = np.zeros(256, dtype=np.bool_)
            listed[list(closers)] = True
            places = np.flatnonzero(listed[self._text[:-1]])
            return self.bits.pack(self._of(places[self._owner[places] == self._owner[places + 1]]))

        return self._keep(("closing", closers), make)

    def in_order(self, bits: Bits) -> Iterable[tuple[bytes, int]]:
        """(bytes, id) of the tokens in `bits`, by their bytes."""
        ids = self.bits.ids(bits)
        for at in np.sort(self.rank[ids]).tolist():
            yield self.sorted[at], self.ids[at]


def _after(word: bytes) -> bytes | None:
    """The first string after all that begin with `word`, None if there is none."""
    stem = word.rstrip(b"\xff")
    return stem[:-1] + bytes((stem[-1] + 1,)) if stem else None
