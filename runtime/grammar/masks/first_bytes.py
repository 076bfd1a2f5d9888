"""The bytes that a token mask lets a text go on with. Knows masks and vocabularies, no constraint."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from runtime.plan import TokenMask
from runtime.protocol.vocabulary import Vocabulary

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
