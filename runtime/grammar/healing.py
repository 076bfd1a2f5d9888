"""Token healing: the end of a prompt is tokenized anew together with what the model writes after it.

A prompt that ends inside of what would be one token ("http:", a trailing space) leaves the model with a
beginning it has never seen. So its last tokens are removed if some token could reach over their end, and the
model chooses the same token again, or one whose text begins with all that was removed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

from runtime.grammar.base import Matcher
from runtime.grammar.masks.token_bits import TokenBits, sift_tokens, token_bits
from runtime.plan import TokenMask
from runtime.protocol.vocabulary import Vocabulary

WORK = 4096
"""Bytes tried under a constraint for one mask. If that is not enough the prompt's token stays."""


class Healing:
    """removed: ids that have to come again, or one longer token instead of them. take() shortens it."""

    def __init__(self, removed: Sequence[int], vocabulary: Vocabulary) -> None:
        self._bits = token_bits(vocabulary)
        self._vocabulary = vocabulary
        self.removed = tuple(removed)

    @property
    def text(self) -> bytes:
        """The rest of the prompt's text."""
        return b"".join(self._vocabulary.tokens[token] for token in self.removed)

    def mask(self, matcher: Matcher | None) -> TokenMask:
        """The ids that may come next; `matcher` follows the text after the prompt, None: anything."""
        text = self.text
        if matcher is None:
            return _longer(self._vocabulary, text, self.removed[0])
        return self._bits.listed([self.removed[0], *_fitting(self._bits, text, matcher)])

    def take(self, token: int, matcher: Matcher | None) -> int | None:
        """Follow one token of mask(): how many of its bytes are the prompt's; None if it is not allowed."""
        text, data = self.text, self._vocabulary.tokens[token]
        if token == self.removed[0]:
            self.removed = self.removed[1:]
            return len(data)
        if len(data) <= len(text) or not data.startswith(text) or token in self._vocabulary.special:
            return None
        if matcher is not None and not matcher.advance_bytes(data[len(text) :]):
            return None
        self.removed = ()
        return len(text)


@lru_cache(maxsize=64)
def _longer(vocabulary: Vocabulary, text: bytes, first: int) -> TokenMask:
    bits = token_bits(vocabulary)
    return bits.listed([first, *(number for _, number in _beginning(bits, text))])


def _fitting(bits: TokenBits, text: bytes, matcher: Matcher) -> list[int]:
    """Ids whose text begins with `text` and continues as `matcher` allows; [] if that is too much work."""
    probe, followed, work = matcher.copy(), 0, 0

    def step(state: int, rest: bytes, at: int) -> tuple[int, int | None]:
        nonlocal followed, work
        work += 1
        taken = probe.advance_bytes(rest[at : at + 1])
        followed += taken
        return at + 1, followed if taken else None

    def go_back(state: int) -> None:
        nonlocal followed
        probe.rollback(followed - state)
        followed = state

    ids: list[int] = []
    tokens = ((data[len(text) :], number) for data, number in _beginning(bits, text))
    for number, valid in sift_tokens(tokens, 0, step, go_back):
        if work > WORK:
            return []
        if valid:
            ids.append(number)
    return ids


def _beginning(bits: TokenBits, text: bytes) -> Iterator[tuple[bytes, int]]:
    """(text, id) of the tokens that begin with `text` and are longer, in the order of their texts."""
    texts, ids = bits.ordered
    span = bits.beginning(text)
    for data, number in zip(texts[span], ids[span].tolist()):
        if len(data) > len(text):
            yield data, number
