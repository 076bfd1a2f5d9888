"""Token healing: the end of a prompt is tokenized anew together with what the model writes after it.

A prompt that ends in the middle of what would be one token ("http:", a word's own space) leaves the model
with a beginning it has never seen. So the prompt's last tokens are taken off where some token of the
vocabulary could reach over their end, and the model chooses again: either the same token, or one whose text
begins with all that was taken off and goes on. It knows no requests; what stands before is not its business.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from runtime.grammar.base import Matcher
from runtime.grammar.masks.token_bits import token_bits
from runtime.plan import TokenMask
from runtime.protocol.vocabulary import Vocabulary

WORK = 4096
"""Bytes tried under a constraint for one mask. Where that is not enough the prompt's own token stays."""


class Healing:
    """`given`: the ids taken off; they are to come again, or one longer token in their place. Changes with
    take()."""

    def __init__(self, given: Sequence[int], vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.given = tuple(given)

    @property
    def text(self) -> bytes:
        """What is still to come of the prompt's text."""
        return b"".join(self._vocabulary.tokens[token] for token in self.given)

    def mask(self, matcher: Matcher | None) -> TokenMask:
        """The ids that may come next; `matcher` follows what stands behind the prompt, None: anything."""
        text = self.text
        if matcher is None:
            return _longer(self._vocabulary, text, self.given[0])
        ids = [self.given[0], *_fitting(self._vocabulary, text, matcher)]
        return token_bits(self._vocabulary).listed(ids)

    def take(self, token: int, matcher: Matcher | None) -> int | None:
        """Follow one token of mask(). How many bytes of its text are the prompt's; all of them where it is
        the prompt's own token. None, and no change: it may not come."""
        text, data = self.text, self._vocabulary.tokens[token]
        if token == self.given[0]:
            self.given = self.given[1:]
            return len(data)
        if len(data) <= len(text) or not data.startswith(text) or token in self._vocabulary.special:
            return None
        if matcher is not None and not matcher.advance_bytes(data[len(text) :]):
            return None
        self.given = ()
        return len(text)


@lru_cache(maxsize=64)
def _longer(vocabulary: Vocabulary, text: bytes, own: int) -> TokenMask:
    ids = [own, *(number for _, number in _beginning(vocabulary, text))]
    return token_bits(vocabulary).listed(ids)


def _fitting(vocabulary: Vocabulary, text: bytes, matcher: Matcher) -> list[int]:
    """Ids whose text begins with `text` and goes on as `matcher` allows; [] where that is too much work."""
    probe, ids = matcher.copy(), []
    path = refused = b""  # the bytes that `probe` has followed; a beginning that it did not take
    work = 0
    for data, number in _beginning(vocabulary, text):
        rest = data[len(text) :]
        if refused and rest.startswith(refused):
            continue
        shared = _common(path, rest)
        if shared < len(path):
            probe.rollback(len(path) - shared)
            path = path[:shared]
        refused = b""
        for byte in rest[shared:]:
            work += 1
            if not probe.advance_bytes(bytes((byte,))):
                refused = path + bytes((byte,))
                break
            path += bytes((byte,))
        else:
            ids.append(number)
        if work > WORK:
            return []
    return ids


def _common(one: bytes, other: bytes) -> int:
    size = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        size += 1
    return size


def _beginning(vocabulary: Vocabulary, text: bytes) -> Iterator[tuple[bytes, int]]:
    """(text, id) of the tokens that begin with `text` and are longer, in the order of their texts."""
    texts, ids = _ordered(vocabulary)
    at = bisect_left(texts, text)
    while at < len(texts) and texts[at].startswith(text):
        if len(texts[at]) > len(text):
            yield texts[at], int(ids[at])
        at += 1


@lru_cache(maxsize=4)
def _ordered(vocabulary: Vocabulary) -> tuple[list[bytes], npt.NDArray[np.int64]]:
    silent = vocabulary.special | vocabulary.eos
    pairs = sorted(
        (data, number) for number, data in enumerate(vocabulary.tokens) if data and number not in silent
    )
    return [data for data, _ in pairs], np.array([number for _, number in pairs], dtype=np.int64)
