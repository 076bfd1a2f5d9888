"""Token masks: bits over the vocabulary, from a request's grammar and its min_new_tokens. Of a request it
changes only what its guide records about its mask."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from runtime.grammar.base import Matcher
from runtime.plan import Row, TokenMask
from runtime.protocol.errors import BadConstraint, RuntimeFault
from runtime.scheduler.guided.steps import Costs
from runtime.scheduler.requests.components import Guide
from runtime.scheduler.requests.request import Request, defect

GRAMMAR_S, GRAMMAR_TOKEN_S = 3.0, 0.03
"""CPU seconds that following one request's constraint may take: in any case, and for each token."""


def without(mask: TokenMask, ids: Iterable[int]) -> TokenMask:
    """A copy of `mask` that forbids `ids` too."""
    bits = mask.bits.copy()
    forbidden = np.fromiter(ids, dtype=np.int64)
    forbidden = forbidden[(forbidden >= 0) & (forbidden < 32 * len(bits))]
    np.bitwise_and.at(bits, forbidden >> 5, ~(np.uint32(1) << (forbidden & 31).astype(np.uint32)))
    allowed = None if mask.allowed is None else mask.allowed[~np.isin(mask.allowed, forbidden)]
    return TokenMask(bits, allowed)


def full(vocab_size: int) -> TokenMask:
    """Every id below `vocab_size` allowed."""
    bits = np.full(-(-vocab_size // 32), 0xFFFFFFFF, dtype=np.uint32)
    if vocab_size % 32:
        bits[-1] = (1 << (vocab_size % 32)) - 1
    return TokenMask(bits)


def only(token: int, size: int) -> TokenMask:
    """The mask of one id, of `size` 32-bit numbers."""
    bits = np.zeros(size, dtype=np.uint32)
    bits[token >> 5] = np.uint32(1) << np.uint32(token & 31)
    return TokenMask(bits, np.array([token], dtype=np.int64))


def is_empty(mask: TokenMask) -> bool:
    return not (mask.bits.any() if mask.allowed is None else len(mask.allowed))


def mask_of(request: Request, everything: TokenMask) -> TokenMask | None:
    """What `request` may sample next; None = anything. Empty if its grammar is at a dead end. If the grammar
    allows only ids that min_new_tokens forbids, the grammar wins."""
    guide = request.guide
    if request.healing is not None:
        return request.healing.mask(None if guide is None else guide.matcher)
    forbidden = request.rule.masked_ids(request.produced)
    if guide is None:
        return without(everything, forbidden) if forbidden else None
    if guide.pending:
        return only(guide.pending[0], len(everything.bits))
    return _of_grammar(guide, guide.matcher, 0, forbidden)


def _of_grammar(guide: Guide, matcher: Matcher, ahead: int, forbidden: frozenset[int]) -> TokenMask:
    """The mask of its matcher, which is `ahead` steps further than the request."""
    mask = matcher.mask()
    if guide.banned and (banned := guide.banned.get(len(guide.marks) + ahead)):
        mask = without(mask, banned)
    if not forbidden or is_empty(mask):
        return mask
    rest = without(mask, forbidden)
    return mask if is_empty(rest) else rest


def masks_behind(
    request: Request,
    drafts: Sequence[int],
    mask: TokenMask,
    everything: TokenMask,
    pass_done: Callable[[], bool] | None = None,
) -> tuple[TokenMask, ...]:
    """The masks behind each of `drafts`, as long as the grammar accepts them and something may follow;
    `mask`: the one before them. No more are computed once the pass has ended."""
    guide = request.guide
    if guide is not None and guide.pending:
        return ()  # its matcher has passed these already
    matcher = None if guide is None else guide.matcher.copy()
    masks: list[TokenMask] = []
    for ahead, token in enumerate(drafts, 1):
        if not mask.allows(token) or (pass_done is not None and pass_done()):
            break
        forbidden = request.rule.masked_ids(request.produced + ahead)
        if guide is None or matcher is None:
            mask = without(everything, forbidden) if forbidden else everything
        else:
            try:
                if not matcher.advance(token):
                    break
                mask = _of_grammar(guide, matcher, ahead, forbidden)
            except RuntimeFault:
                break  # it is not certain that the output comes this far
            if is_empty(mask):
                break
        masks.append(mask)
    return tuple(masks)


def can_wait(request: Request) -> bool:
    """Whether nothing is lost if its last token is computed again."""
    return not request.returns_logprobs and request.hidden == "none" and request.healing is None


def check_cost(request: Request, guide: Guide) -> None:
    """Raises BadConstraint if following the request's constraint holds up all others: a grammar can be small,
    and still take a second for every token."""
    if guide.seconds > GRAMMAR_S + GRAMMAR_TOKEN_S * request.produced:
        raise BadConstraint(
            f"is too complex to follow: {guide.seconds:.1f} s of computing for {request.produced} tokens",
            where=request.source.constraint.kind if request.source.constraint else "constraint",
            hint="simplify it: fewer ambiguous or nested repeats",
        )


def masks_of(
    requests: Sequence[Request],
    rows: Sequence[Row],
    everything: TokenMask,
    pass_done: Callable[[], bool] | None = None,
) -> tuple[dict[int, TokenMask], dict[int, RuntimeFault]]:
    """Masks by row, and the errors of grammars that failed, by `seq`. Requests whose grammar allows nothing
    are at a `dead_end`, and may sample anything. When the forward pass has finished, the remaining
    constrained rows are skipped in this step (see decoding.py); they come first in the next."""
    masks: dict[int, TokenMask] = {}
    faults: dict[int, RuntimeFault] = {}
    costs: Costs | None = None
    order: Sequence[int] = range(len(requests))
    if pass_done is not None:
        late = [0 if request.guide is None else request.guide.late_masks for request in requests]
        order = sorted(order, key=lambda index: -late[index])
    for index in order:
        request = requests[index]
        guide = request.guide
        # The sample of a request that changed since the launch is void.
        free = guide is None and not request.rule.min_new_tokens and request.healing is None
        if free or not rows[index].sample or not request.intact:
            continue
        costs = costs or Costs()
        if pass_done is not None and guide is not None and costs.any and can_wait(request) and pass_done():
            guide.valid_length = len(request.tokens)
            guide.late_masks += 1
            continue
        try:
            if guide is not None:
                guide.late_masks = 0
                check_cost(request, guide)
            mask = mask_of(request, everything)
            empty = mask is not None and is_empty(mask)
            if guide is not None:
                guide.dead_end = empty
            if empty:
                continue  # whatever is sampled is thrown away: see Liveness.backtrack
            if mask is not None and rows[index].drafts:
                drafts = rows[index].tokens[-rows[index].drafts :]
                mask = mask._replace(behind=masks_behind(request, drafts, mask, everything, pass_done))
        except RuntimeFault as fault:
            faults[request.seq] = fault
            continue
        except Exception as error:  # noqa: BLE001 - it is this request's answer
            faults[request.seq] = defect("the grammar failed", error)
            continue
        finally:
            costs.add(request)
        if mask is not None:
            masks[index] = mask
    if costs is not None:
        costs.charge()
    return masks, faults
