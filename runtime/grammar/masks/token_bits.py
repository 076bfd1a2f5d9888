"""TokenBits: sets of a vocabulary's ids as packed words, the form in which masks travel."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from runtime.grammar.masks.mask_cache import MaskCache
from runtime.plan import TokenMask
from runtime.protocol.vocabulary import Vocabulary

SPARSE = 16
"""A mask that allows fewer than 1/SPARSE of the ids also lists them."""

_FEW = 6
_SEALED_BYTES = 8 << 20

Bits = npt.NDArray[np.uint32]


@lru_cache(maxsize=4)
def token_bits(vocabulary: Vocabulary) -> TokenBits:
    """That of `vocabulary`, made once for all who ask: a process has one vocabulary."""
    return TokenBits(vocabulary)


class TokenBits:
    """`texts`: the bytes of each id, b"" for ids that never are text. All arrays it gives out are read
    only."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        silent = vocabulary.special | vocabulary.eos
        self.texts = tuple(b"" if number in silent else data for number, data in enumerate(vocabulary.tokens))
        self.width = len(vocabulary)
        self.words = -(-self.width // 32)
        self._sealed = MaskCache(_SEALED_BYTES)
        self.stop_only = self.listed(sorted(vocabulary.eos))

    def pack(self, flags: npt.NDArray[np.bool_]) -> Bits:
        """`flags` [width] as words."""
        padded = np.zeros(self.words * 32, dtype=np.bool_)
        padded[: self.width] = flags
        return np.packbits(padded, bitorder="little").view("<u4").astype(np.uint32)

    def listed(self, ids: Iterable[int]) -> TokenMask:
        """The mask of exactly `ids`."""
        return self.seal(self.words_of(ids))

    def words_of(self, ids: Iterable[int]) -> Bits:
        flags = np.zeros(self.width, dtype=np.bool_)
        flags[ids if isinstance(ids, np.ndarray) else list(ids)] = True
        return self.pack(flags)

    def seal(self, bits: Bits) -> TokenMask:
        """The mask of `bits`, cut to the vocabulary, listed too where it is sparse. Takes the array over.

        A document comes to the same set again and again: one listed before is given out again."""
        bits = bits[: self.words]
        if self.width % 32:
            bits[-1] &= np.uint32((1 << (self.width % 32)) - 1)
        key = bits.tobytes()
        return self._sealed.get(key, lambda: self._mask_of(np.frombuffer(key, dtype=np.uint32)))

    def _mask_of(self, bits: Bits) -> TokenMask:
        wide = _wide(bits)
        words = wide.nonzero()[0]
        most = len(words) * wide.itemsize * 8  # cheaper than counting the bits
        if most * SPARSE >= self.width and int(np.bitwise_count(wide).sum()) * SPARSE >= self.width:
            return TokenMask(bits, None)
        allowed = _few(wide, words) if len(words) <= _FEW else self.ids(bits)
        allowed.flags.writeable = False
        return TokenMask(bits, allowed)

    @staticmethod
    def ids(bits: Bits) -> npt.NDArray[np.int64]:
        """The ids in `bits`, ascending."""
        wide = _wide(bits)
        set_words = wide != 0
        if np.count_nonzero(set_words) * 4 > len(wide):
            flags = np.unpackbits(bits.view(np.uint8), bitorder="little")
            return flags.view(np.bool_).nonzero()[0]
        words = set_words.nonzero()[0]
        flags = np.unpackbits(wide[words].view(np.uint8), bitorder="little")
        places = flags.view(np.bool_).nonzero()[0]
        shift = 3 + wide.itemsize.bit_length() - 1
        found: npt.NDArray[np.int64] = (words.take(places >> shift) << shift) + (places & ((1 << shift) - 1))
        return found

    @staticmethod
    def count(mask: TokenMask) -> int:
        return int(np.bitwise_count(mask.bits).sum())

    def without(self, mask: TokenMask, ids: Iterable[int]) -> TokenMask:
        """`mask` less `ids`; a new one."""
        bits = mask.bits.copy()
        for token in ids:
            bits[token >> 5] &= ~np.uint32(1 << (token & 31))
        return self.seal(bits)


def _few(wide: npt.NDArray[np.unsignedinteger], words: npt.NDArray[np.intp]) -> npt.NDArray[np.int64]:
    """The ids in `words` of `wide`: with so few, quicker than by arrays."""
    each = wide.itemsize * 8
    found: list[int] = []
    for word, value in zip(words.tolist(), wide[words].tolist()):
        while value:
            last = value & -value
            found.append(word * each + last.bit_length() - 1)
            value ^= last
    return np.array(found, dtype=np.int64)


def _wide(bits: Bits) -> npt.NDArray[np.unsignedinteger]:
    """The same words, two in one where that goes."""
    return bits.view(np.uint64) if len(bits) % 2 == 0 else bits


_NONE = 256


def first_bytes(mask: TokenMask, vocabulary: Vocabulary) -> frozenset[int]:
    """The bytes that the texts of the allowed ids begin with; an eos has no text."""
    first = _first(vocabulary)
    if mask.allowed is not None:
        found = first[mask.allowed[mask.allowed < len(first)]]
    else:
        flags = np.unpackbits(np.ascontiguousarray(mask.bits).view(np.uint8), bitorder="little")
        found = first[np.flatnonzero(flags[: len(first)])]
    return frozenset(np.flatnonzero(np.bincount(found, minlength=_NONE + 1)[:_NONE]).tolist())


@lru_cache(maxsize=4)
def _first(vocabulary: Vocabulary) -> npt.NDArray[np.int64]:
    """The first byte of each id, _NONE for ids that are no text."""
    silent = vocabulary.special | vocabulary.eos
    texts = (b"" if number in silent else data for number, data in enumerate(vocabulary.tokens))
    return np.fromiter((data[0] if data else _NONE for data in texts), dtype=np.int64, count=len(vocabulary))
