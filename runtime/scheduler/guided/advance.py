"""What a sampled token means for its request: grammar, stop conditions, jump-forward. Knows no slots and no
queues.

Jump-forward: where the constraint leaves one continuation only, its text is appended as tokens at once and
computed together with the token before it, as one short extend (the compressed FSM of Zheng et al.,
"SGLang", section 4; tokens healed at the seam by runtime.grammar.jump_plan).

A request that does not jump gets the same tokens, one by one: what a jump would have appended is sampled
with no choice. Its text would differ otherwise, since a model goes on differently after another tokenization
of the same text, and forced text has many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from runtime.cache.manager import CacheManager
from runtime.config.scheduler import SchedulerConfig
from runtime.grammar.base import Matcher
from runtime.grammar.completion import Steps
from runtime.grammar.jump_plan import CONTEXT, JumpPlanner
from runtime.grammar.reasoner import ReasonerMatcher
from runtime.protocol.errors import InternalFault, RuntimeFault
from runtime.protocol.io_struct import FinishReason
from runtime.protocol.vocabulary import Vocabulary
from runtime.scheduler.guided.liveness import Liveness
from runtime.scheduler.request import Request
from runtime.scheduler.stop import STOP, Seen

Encode = Callable[[str], list[int]]


def ended(reason: FinishReason, matcher: Matcher | None) -> FinishReason:
    """`reason`, and what the output breaks off in where its matcher would have gone on."""
    if matcher is None or reason.type == "abort":
        return reason
    try:
        if matcher.may_stop():
            return reason
    except RuntimeFault:
        return msgspec.structs.replace(reason, unfinished="constraint")
    asleep = isinstance(matcher, ReasonerMatcher) and matcher.asleep
    return msgspec.structs.replace(reason, unfinished="reasoning" if asleep else "constraint")


class Progress:
    """Takes requests from token to token. `manager`: for the KV of output that is taken back."""

    def __init__(
        self, vocabulary: Vocabulary, encode: Encode, manager: CacheManager, config: SchedulerConfig
    ) -> None:
        self.vocabulary = vocabulary
        self._planner = JumpPlanner(vocabulary, encode)
        self._jump_forward = config.jump_forward
        self._liveness = Liveness(manager, config, self._stopped)

    def begin(self, request: Request) -> FinishReason | None:
        """The request has its matcher, nothing is generated yet: append what is forced from the start."""
        if request.matcher is None or request.ending:
            return None
        if request.matcher.is_terminated():
            return STOP
        self._liveness.begin(request)
        reason = self._jump(request, (), request.seen) if request.heal is None else self._jump_seam(request)
        return self._liveness.after(request, reason)

    def accept(
        self,
        request: Request,
        token: int,
        logprob: float | None,
        top: Sequence[tuple[int, float]],
        ids: Sequence[float] = (),
        *,
        late: bool = False,
    ) -> FinishReason | None:
        """Append a sampled token, and what it forces; why the generation ended, if it did. `late`: what it
        means may be left to look(), where nothing stands against it. Raises InternalFault when the token
        could not have been sampled."""
        if not 0 <= token < len(self.vocabulary):
            raise InternalFault(
                f"token {token} is not in the vocabulary of {len(self.vocabulary)}", where="sampler"
            )
        if request.heal is not None:
            return self._heal(request, token, logprob, top, ids)
        matcher = request.matcher
        if matcher is None:
            request.decode_steps += 1
            request.append(token, logprob, top, ids)
            return self._stopped(request, token, False)
        if request.stuck:  # the token is of no meaning
            return self._liveness.turn_back(request)
        if request.owed:
            return self._liveness.after(request, self._pay(request, token, logprob, top, ids))
        request.late = True
        request.mark(token)
        request.decode_steps += 1
        request.append(token, logprob, top, ids)
        if late and not request.return_logprob and request.hidden == "none":
            # What may well be the last token is not computed.
            request.waits = token in request.rule.ids or len(request.tokens) >= request.limit
            return None
        return self.look(request)

    def look(self, request: Request) -> FinishReason | None:
        """What the last token, just appended, means to its matcher, and what it forces; result and errors as
        of accept()."""
        return self._liveness.after(request, self._followed(request))

    def looking(self, request: Request) -> Steps[FinishReason | None]:
        """look() in pieces. Between two of them nothing else may happen to the request, but that it ends."""
        reason = self._followed(request)
        if self._liveness.is_content(request, reason):
            return reason
        return (yield from self._liveness.asked(request, reason))

    def _followed(self, request: Request) -> FinishReason | None:
        """Follow the last token, and append what it forces; why it would end."""
        matcher, before, token, request.late = request.matcher, request.seen, request.tokens[-1], False
        assert matcher is not None
        if not matcher.advance(token):
            raise InternalFault(f"token {token} was sampled against its grammar's mask", where="sampler")
        reason = self._stopped(request, token, matcher.is_terminated())
        return reason or self._jump(request, (token,), before)

    def _stopped(self, request: Request, token: int, grammar_done: bool) -> FinishReason | None:
        rule = request.rule
        matched = None
        if rule.reads_text:
            data = self.vocabulary.tokens[token]
            if request.skip and request.produced == 1:
                data = data[request.skip :]
            matched, request.seen = rule.read(request.seen, data)
        return rule.finish(token, matched, request.produced, grammar_done)

    def _heal(
        self,
        request: Request,
        token: int,
        logprob: float | None,
        top: Sequence[tuple[int, float]],
        ids: Sequence[float],
    ) -> FinishReason | None:
        """A token was sampled for the end of the prompt: the prompt's own, or a longer one."""
        heal, matcher = request.heal, request.matcher
        assert heal is not None
        size = heal.take(token, matcher)
        if size is None:
            raise InternalFault(f"token {token} does not begin with the prompt's end", where="sampler")
        if not heal.given:
            request.heal = None
        reason = None
        if size == len(self.vocabulary.tokens[token]):
            request.settle_prompt(token)
        else:
            request.skip = size
            request.decode_steps += 1
            request.append(token, logprob, top, ids)
            if request.held is not None and matcher is not None:
                # The completion known begins at the constraint's start, and some of that is behind us.
                request.held, request.check_at = matcher.closing(request.remaining), request.produced
            reason = self._stopped(request, token, matcher is not None and matcher.is_terminated())
        if request.heal is None and matcher is not None:
            reason = self._liveness.after(request, reason or self._jump(request, (), request.seen))
        request.plain = request.is_plain
        return reason

    def _jump_seam(self, request: Request) -> FinishReason | None:
        """Where the constraint leaves no choice at the end of the prompt, its end and the forced text are
        tokenized together, and what is certain of it is appended."""
        heal, matcher = request.heal, request.matcher
        assert heal is not None
        assert matcher is not None
        probe, left, limit = matcher.copy(), heal.text, request.remaining + len(heal.given)
        jump = self._planner.plan(probe, (), limit, request.tokens[-CONTEXT:], left)
        if jump is None:
            return None
        same = 0
        while same < min(len(heal.given), len(jump.ids)) and jump.ids[same] == heal.given[same]:
            same += 1
        rest = list(jump.ids[same:])
        for token in heal.given[:same]:
            left = left[len(self.vocabulary.tokens[token]) :]
        if rest and left and not self.vocabulary.tokens[rest[0]].startswith(left):
            return None  # the prompt itself is tokenized otherwise than it came
        for token in heal.given[:same]:
            request.settle_prompt(token)
        heal.given = () if rest else heal.given[same:]
        if not heal.given:
            request.heal = None
        if not rest:
            return None
        request.matcher, request.skip = probe, len(left)
        if request.held is not None:
            request.held = probe.closing(request.remaining - len(rest))
        return self._append_forced(request, rest, 0)

    def _pay(
        self,
        request: Request,
        token: int,
        logprob: float | None,
        top: Sequence[tuple[int, float]],
        ids: Sequence[float],
    ) -> FinishReason | None:
        """The first of the ids owed was sampled."""
        if token != request.owed.pop(0):
            raise InternalFault(f"token {token} was sampled against its grammar's mask", where="sampler")
        request.decode_steps += 1
        request.append(token, logprob, top, ids)
        return self._stopped(request, token, _ended(request))

    def _jump(self, request: Request, last: tuple[int, ...], before: Seen) -> FinishReason | None:
        """`last`: the output ids that healing may replace (not computed, not told); `before`: what was seen
        before them."""
        matcher = request.matcher
        if matcher is None:
            return None
        end = len(request.tokens) - len(last)
        context = request.tokens[max(0, end - CONTEXT) : end]
        jump = self._planner.plan(matcher, last, request.remaining, context)
        if jump is None:
            return None
        request.mark()
        if jump.replaced:
            request.drop_last()
            request.seen = before
            if request.return_logprob:
                request.rewind()  # the healed token's log-probability comes from the position before it
        return self._append_forced(request, list(jump.ids), jump.replaced)

    def _append_forced(self, request: Request, ids: list[int], replaced: int) -> FinishReason | None:
        """Append the tokens of a jump, the first `replaced` in place of a sampled one; of a request that does
        not jump only those, and the others are owed."""
        jumps = self._jump_forward and request.source.jump_forward
        count = len(ids) if jumps else replaced
        request.owed = ids
        for index in range(count):
            token = request.owed.pop(0)
            request.append(token, None, later=True)
            request.jumped += index >= replaced
            reason = self._stopped(request, token, _ended(request))
            if reason:
                return reason
        return None


def _ended(request: Request) -> bool:
    """Whether the grammar is done with the tokens there are."""
    assert request.matcher is not None
    return not request.owed and request.matcher.is_terminated()
