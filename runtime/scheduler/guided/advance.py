"""Advance: the matcher follows a sampled token, and text that it forces is appended (jump-forward). Knows no
slots and no queues.

Jump-forward: if the constraint allows one continuation only, its text is appended as tokens at once and
computed with the token before it (the compressed FSM of Zheng et al., "SGLang", section 4). A request that
does not jump gets the same tokens, one by one, as `pending`: so its text is the same.
"""

from __future__ import annotations

from collections.abc import Callable

from runtime.cache.manager import CacheManager
from runtime.config.scheduler import SchedulerConfig
from runtime.grammar.completion import Steps
from runtime.grammar.jump_plan import CONTEXT, JumpPlanner
from runtime.plan import Sample
from runtime.protocol.errors import InternalFault
from runtime.protocol.io_struct import FinishReason
from runtime.protocol.vocabulary import Vocabulary
from runtime.scheduler.guided.liveness import Liveness
from runtime.scheduler.guided.steps import drop_last, guide_of, mark
from runtime.scheduler.requests.request import Request
from runtime.scheduler.requests.stop import STOP, Seen

Encode = Callable[[str], list[int]]


class Advance:
    """Takes constrained requests from token to token. `manager`: frees KV of output taken back."""

    def __init__(
        self, vocabulary: Vocabulary, encode: Encode, manager: CacheManager, config: SchedulerConfig
    ) -> None:
        self._vocabulary = vocabulary
        self._planner = JumpPlanner(vocabulary, encode)
        self._jump_forward = config.jump_forward
        self._liveness = Liveness(manager, config)

    def begin(self, request: Request) -> FinishReason | None:
        """The request has its matcher, nothing is generated yet: append what is forced from the start."""
        if request.ending:
            return None
        if guide_of(request).matcher.is_terminated():
            return STOP
        self._liveness.begin(request)
        reason = (
            self._jump(request, (), request.seen) if request.healing is None else self._jump_seam(request)
        )
        return self._liveness.after(request, reason)

    def accept(self, request: Request, sample: Sample, *, defer: bool = False) -> FinishReason | None:
        """Append a sampled token, and what it forces; why the generation ended, if it did. `defer`: the
        matcher may follow it later, in advance(), if that is possible. Raises InternalFault when the token
        could not have been sampled."""
        if request.healing is not None:
            return self._accept_healed(request, sample)
        guide, token = guide_of(request), sample.token
        if guide.dead_end:  # the token is void
            return self._liveness.backtrack(request)
        if guide.pending:
            if token != guide.pending.pop(0):
                raise _against_mask(token)
            return self._liveness.after(request, self._append(request, sample))
        guide.unread = True
        mark(request, token)
        request.decode_steps += 1
        request.append(token, sample.logprob, sample.top, sample.token_ids)
        if defer and not request.returns_logprobs and request.hidden == "none":
            # What may well be the last token is not computed.
            guide.waits = token in request.rule.ids or len(request.tokens) >= request.limit
            return None
        return self.advance(request)

    def advance(self, request: Request) -> FinishReason | None:
        """Follow the last token, and append what it forces; result and errors as of accept()."""
        return self._liveness.after(request, self._followed(request))

    def advance_steps(self, request: Request) -> Steps[FinishReason | None]:
        """advance() in pieces. Between two of them nothing may happen to the request, except that it ends."""
        reason = self._followed(request)
        if not self._liveness.is_due(request, reason):
            return reason
        return (yield from self._liveness.checked(request, reason))

    def _followed(self, request: Request) -> FinishReason | None:
        """advance() without the check of liveness."""
        guide, before, token = guide_of(request), request.seen, request.tokens[-1]
        guide.unread = False
        if not guide.matcher.advance(token):
            raise _against_mask(token)
        reason = request.stopped(token, grammar_done=guide.matcher.is_terminated())
        return reason or self._jump(request, (token,), before)

    def _append(self, request: Request, sample: Sample) -> FinishReason | None:
        request.decode_steps += 1
        request.append(sample.token, sample.logprob, sample.top, sample.token_ids)
        return request.stopped(sample.token, grammar_done=_ended(request))

    def _accept_healed(self, request: Request, sample: Sample) -> FinishReason | None:
        """Append a token that was sampled for the end of the prompt: the prompt's, or a longer one."""
        healing, guide, token = request.healing, request.guide, sample.token
        assert healing is not None
        size = healing.take(token, None if guide is None else guide.matcher)
        if size is None:
            raise InternalFault(f"token {token} does not begin with the prompt's end", where="sampler")
        if not healing.removed:
            request.healing = None
        reason = None
        if size == len(self._vocabulary.tokens[token]):
            request.settle_prompt(token)
        else:
            request.skip = size
            reason = self._append(request, sample)
            if guide is not None:
                # The known completion begins at the constraint's start, which has passed.
                self._liveness.renew(request, request.remaining)
        if request.healing is None and guide is not None:
            reason = self._liveness.after(request, reason or self._jump(request, (), request.seen))
        request.plain = request.is_plain
        return reason

    def _jump_seam(self, request: Request) -> FinishReason | None:
        """If the constraint leaves no choice at the end of the prompt: tokenize that end and the forced text
        together, and append the tokens that are certain."""
        healing, guide = request.healing, guide_of(request)
        assert healing is not None
        probe, left, limit = guide.matcher.copy(), healing.text, request.remaining + len(healing.removed)
        jump = self._planner.plan(probe, (), limit, _context(request, len(request.tokens)), left)
        if jump is None:
            return None
        same = 0
        while same < min(len(healing.removed), len(jump.ids)) and jump.ids[same] == healing.removed[same]:
            same += 1
        rest = list(jump.ids[same:])
        for token in healing.removed[:same]:
            left = left[len(self._vocabulary.tokens[token]) :]
        if rest and left and not self._vocabulary.tokens[rest[0]].startswith(left):
            return None  # the prompt itself is tokenized otherwise than it came
        for token in healing.removed[:same]:
            request.settle_prompt(token)
        healing.removed = () if rest else healing.removed[same:]
        if not healing.removed:
            request.healing = None
        if not rest:
            return None
        guide.matcher, request.skip = probe, len(left)
        self._liveness.renew(request, request.remaining - len(rest))
        return self._append_forced(request, rest, 0)

    def _jump(self, request: Request, last: tuple[int, ...], before: Seen) -> FinishReason | None:
        """Append the text that is forced now. `last`: the output ids that healing may replace (neither
        computed nor sent); `before`: what the stop rule had seen before them."""
        end = len(request.tokens) - len(last)
        context = _context(request, end)
        jump = self._planner.plan(guide_of(request).matcher, last, request.remaining, context)
        if jump is None:
            return None
        mark(request)
        if jump.replaced:
            drop_last(request)
            request.seen = before
            if request.returns_logprobs:
                request.rewind()  # the healed token's log-probability comes from the position before it
        return self._append_forced(request, list(jump.ids), jump.replaced)

    def _append_forced(self, request: Request, ids: list[int], replaced: int) -> FinishReason | None:
        """Append the tokens of a jump, the first `replaced` instead of a sampled one; of a request that does
        not jump only those, and the others are pending."""
        jumps = self._jump_forward and request.source.jump_forward
        count = len(ids) if jumps else replaced
        pending = guide_of(request).pending = ids
        for index in range(count):
            token = pending.pop(0)
            request.append(token, None, later=True, forced=index >= replaced)
            reason = request.stopped(token, grammar_done=_ended(request))
            if reason:
                return reason
        return None


def _context(request: Request, end: int) -> tuple[int, ...]:
    """The ids before index `end` that a jump looks at."""
    return request.ids(max(0, end - CONTEXT), end)


def _ended(request: Request) -> bool:
    """Whether the grammar has ended with the tokens so far."""
    guide = request.guide
    return guide is not None and not guide.pending and guide.matcher.is_terminated()


def _against_mask(token: int) -> InternalFault:
    return InternalFault(f"token {token} was sampled against its grammar's mask", where="sampler")
