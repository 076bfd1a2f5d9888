"""Token masks: bits over the vocabulary, from a request's grammar and its min_new_tokens. Changes no
request."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from runtime.plan import TokenMask
from runtime.scheduler.request import Request


def without(mask: TokenMask, ids: Iterable[int]) -> TokenMask:
    """`mask` with `ids` forbidden too; a new one, the given one is shared."""
    bits = mask.bits.copy()
    gone = np.fromiter(ids, dtype=np.int64)
    gone = gone[(gone >= 0) & (gone < 32 * len(bits))]
    np.bitwise_and.at(bits, gone >> 5, ~(np.uint32(1) << (gone & 31).astype(np.uint32)))
    allowed = None if mask.allowed is None else mask.allowed[~np.isin(mask.allowed, gone)]
    return TokenMask(bits, allowed)


def full(vocab_size: int) -> TokenMask:
    """Every id below `vocab_size` allowed."""
    words = -(-vocab_size // 32)
    bits = np.full(words, 0xFFFFFFFF, dtype=np.uint32)
    if vocab_size % 32:
        bits[-1] = (1 << (vocab_size % 32)) - 1
    return TokenMask(bits)


def is_empty(mask: TokenMask) -> bool:
    return not (mask.bits.any() if mask.allowed is None else len(mask.allowed))


def mask_of(request: Request, everything: TokenMask) -> TokenMask | None:
    """What `request` may sample next; None = anything. Empty where its grammar has come to a dead end.

    Where the grammar leaves nothing but ids that min_new_tokens forbids, the grammar wins.
    """
    forbidden = request.rule.masked_ids(request.produced)
    if request.matcher is None:
        return without(everything, forbidden) if forbidden else None
    mask = request.matcher.mask()
    if not forbidden or is_empty(mask):
        return mask
    rest = without(mask, forbidden)
    return mask if is_empty(rest) else rest
