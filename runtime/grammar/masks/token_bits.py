"""TokenBits: sets of a vocabulary's ids as packed words, the form in which masks travel; and its tokens by
their text.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import cached_property, lru_cache
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from runtime.grammar.automata.dfa import shared_prefix
from runtime.plan import TokenMask
from runtime.protocol.vocabulary import Vocabulary

SPARSE = 16
"""A mask that allows fewer than 1/SPARSE of the ids also lists them."""

LONGEST = 32
"""Bytes of a token that is looked up by its text."""

_FEW = 6
_SEALED_BYTES = 8 << 20
_NO_TEXT = 256

Bits = npt.NDArray[np.uint32]
Value = TypeVar("Value")
State = TypeVar("State")


class Cache(Generic[Value]):
    """Values by key; the longest unused are dropped when the sizes of all exceed `limit`. Thread-safe."""

    def __init__(self, limit: int, size: Callable[[Value], int] = lambda value: 1) -> None:
        self._limit, self._size, self._used = limit, size, 0
        self._values: OrderedDict[Hashable, Value] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        with self._lock:
            known = self._values.get(key)
            if known is not None:
                self._values.move_to_end(key)
                return known
        value = make()  # outside of the lock: two threads may make the same one, which is harmless
        with self._lock:
            if key not in self._values:
                self._values[key] = value
                self._used += self._size(value)
            while self._used > self._limit and len(self._values) > 1:
                self._used -= self._size(self._values.popitem(last=False)[1])
        return value


def mask_bytes(mask: TokenMask) -> int:
    return int(mask.bits.nbytes) + (0 if mask.allowed is None else int(mask.allowed.nbytes)) + 400


@lru_cache(maxsize=4)
def token_bits(vocabulary: Vocabulary) -> TokenBits:
    """The TokenBits of `vocabulary`, shared: a process has one vocabulary."""
    return TokenBits(vocabulary)


class TokenBits:
    """`texts`: the bytes of each id, b"" for ids without text. All arrays it returns are read only."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        silent = vocabulary.special | vocabulary.eos
        self.texts = tuple(b"" if number in silent else data for number, data in enumerate(vocabulary.tokens))
        self.width = len(vocabulary)
        self.word_count = -(-self.width // 32)
        self._sealed: Cache[TokenMask] = Cache(_SEALED_BYTES, mask_bytes)
        self.stop_only = self.listed(sorted(vocabulary.eos))

    # -- sets of ids -----------------------------------------------------------------------------------------

    def pack(self, flags: npt.NDArray[np.bool_]) -> Bits:
        """`flags` [width] as words."""
        padded = np.zeros(self.word_count * 32, dtype=np.bool_)
        padded[: self.width] = flags
        return np.packbits(padded, bitorder="little").view("<u4").astype(np.uint32)

    def listed(self, ids: Iterable[int]) -> TokenMask:
        """The mask of exactly `ids`."""
        return self.seal(self.pack_ids(ids))

    def pack_ids(self, ids: Iterable[int]) -> Bits:
        flags = np.zeros(self.width, dtype=np.bool_)
        flags[ids if isinstance(ids, np.ndarray) else list(ids)] = True
        return self.pack(flags)

    def seal(self, bits: Bits) -> TokenMask:
        """The mask of `bits`, cut to the vocabulary, with a list of ids if it is sparse. Takes the array
        over. Equal masks are shared: a document comes to the same set again and again."""
        bits = bits[: self.word_count]
        if self.width % 32:
            bits[-1] &= np.uint32((1 << (self.width % 32)) - 1)
        key = bits.tobytes()
        return self._sealed.get(key, lambda: self._mask_of(np.frombuffer(key, dtype=np.uint32)))

    def _mask_of(self, bits: Bits) -> TokenMask:
        wide = _wide(bits)
        nonzero = wide.nonzero()[0]
        most = len(nonzero) * wide.itemsize * 8  # cheaper than counting the bits
        if most * SPARSE >= self.width and int(np.bitwise_count(wide).sum()) * SPARSE >= self.width:
            return TokenMask(bits, None)
        allowed = _few(wide, nonzero) if len(nonzero) <= _FEW else self.ids(bits)
        allowed.flags.writeable = False
        return TokenMask(bits, allowed)

    @staticmethod
    def ids(bits: Bits) -> npt.NDArray[np.int64]:
        """The ids in `bits`, ascending."""
        wide = _wide(bits)
        used = wide != 0
        if np.count_nonzero(used) * 4 > len(wide):
            flags = np.unpackbits(bits.view(np.uint8), bitorder="little")
            return flags.view(np.bool_).nonzero()[0]
        nonzero = used.nonzero()[0]
        flags = np.unpackbits(wide[nonzero].view(np.uint8), bitorder="little")
        positions = flags.view(np.bool_).nonzero()[0]
        shift = 3 + wide.itemsize.bit_length() - 1
        first = nonzero.take(positions >> shift) << shift
        ids: npt.NDArray[np.int64] = first + (positions & ((1 << shift) - 1))
        return ids

    @staticmethod
    def count(mask: TokenMask) -> int:
        return int(np.bitwise_count(mask.bits).sum())

    def without(self, mask: TokenMask, ids: Iterable[int]) -> TokenMask:
        """`mask` less `ids`; a new one."""
        bits = mask.bits.copy()
        for token in ids:
            bits[token >> 5] &= ~np.uint32(1 << (token & 31))
        return self.seal(bits)

    # -- tokens by their text --------------------------------------------------------------------------------

    @cached_property
    def ordered(self) -> tuple[list[bytes], npt.NDArray[np.int64]]:
        """The texts in ascending order, and their ids."""
        ids = sorted((token for token, data in enumerate(self.texts) if data), key=self.texts.__getitem__)
        return [self.texts[token] for token in ids], np.array(ids, dtype=np.int64)

    def beginning(self, prefix: bytes) -> slice:
        """The texts in `ordered` that begin with `prefix`."""
        texts = self.ordered[0]
        stem = prefix.rstrip(b"\xff")
        low = bisect_left(texts, prefix)
        if not stem:  # nothing comes after them
            return slice(low, len(texts))
        return slice(low, bisect_left(texts, stem[:-1] + bytes((stem[-1] + 1,)), low))

    @cached_property
    def id_of(self) -> dict[bytes, int]:
        """The smallest id of each text of at most LONGEST bytes."""
        ids: dict[bytes, int] = {}
        for token, data in enumerate(self.texts):
            if data and len(data) <= LONGEST:
                ids.setdefault(data, token)
        return ids

    @cached_property
    def deepest(self) -> int:
        """Bytes of the longest token."""
        return max(map(len, self.texts), default=0)

    @cached_property
    def single_bytes(self) -> frozenset[int]:
        """The bytes that are tokens by themselves."""
        return frozenset(data[0] for data in self.texts if len(data) == 1)

    def pieces(self, data: bytes) -> list[int] | None:
        """The fewest ids that spell `data`; None if it cannot be spelled."""
        best: list[tuple[int, int] | None] = [(0, -1)] + [None] * len(data)  # (ids so far, the last of them)
        ids_by_text, longest = self.id_of, min(LONGEST, self.deepest)
        for at in range(len(data)):
            here = best[at]
            if here is None:
                continue
            for size in range(1, min(longest, len(data) - at) + 1):
                token = ids_by_text.get(data[at : at + size])
                after = best[at + size]
                if token is not None and (after is None or here[0] + 1 < after[0]):
                    best[at + size] = (here[0] + 1, token)
        ids: list[int] = []
        at = len(data)
        while at:
            step = best[at]
            if step is None:
                return None
            ids.append(step[1])
            at -= len(self.texts[step[1]])
        return ids[::-1]

    def first_bytes(self, mask: TokenMask) -> frozenset[int]:
        """The bytes that the texts of the allowed ids begin with."""
        ids = self.ids(mask.bits) if mask.allowed is None else mask.allowed
        first = self._first[ids[ids < self.width]]
        return frozenset(np.flatnonzero(np.bincount(first, minlength=_NO_TEXT + 1)[:_NO_TEXT]).tolist())

    @cached_property
    def _first(self) -> npt.NDArray[np.int64]:
        """The first byte of each id, or _NO_TEXT."""
        return np.array([data[0] if data else _NO_TEXT for data in self.texts], dtype=np.int64)


def sift_tokens(
    tokens: Iterable[tuple[bytes, int]], start: State,
    step: Callable[[State, bytes, int], tuple[int, State | None]], go_back: Callable[[State], object],
) -> Iterator[tuple[int, bool]]:  # fmt: skip
    """Each id of `tokens`, (bytes, id) in the order of their bytes, and whether it may follow `start`; what
    texts begin with in common is followed once.

    `step` follows some bytes of a text from an index on: the index after them, and the state, None if they
    are not allowed. An index behind the end allows the text without a state after it. `go_back` returns to
    an earlier state; in the end to `start`.
    """
    path, before, dead = [(0, start)], b"", b""
    for data, token in tokens:
        if not dead or not data.startswith(dead):
            shared = shared_prefix(before, data)
            while path[-1][0] > shared:
                path.pop()
            at, state = path[-1]
            go_back(state)
            before, dead = data, b""
            while at < len(data):
                at, after = step(state, data, at)
                if after is None:
                    dead = data[:at]
                    break
                state = after
                path.append((at, state))
        yield token, not dead
    go_back(start)


def _few(wide: npt.NDArray[np.unsignedinteger], nonzero: npt.NDArray[np.intp]) -> npt.NDArray[np.int64]:
    """The ids in the words `nonzero` of `wide`: if they are few, faster than with arrays."""
    each = wide.itemsize * 8
    ids: list[int] = []
    for number, value in zip(nonzero.tolist(), wide[nonzero].tolist()):
        while value:
            last = value & -value
            ids.append(number * each + last.bit_length() - 1)
            value ^= last
    return np.array(ids, dtype=np.int64)


def _wide(bits: Bits) -> npt.NDArray[np.unsignedinteger]:
    """The words as pairs, if their number is even."""
    return bits.view(np.uint64) if len(bits) % 2 == 0 else bits
