"""Liveness: constrained outputs end as their constraint requires. Takes output back at dead ends, and
completes it before max_new_tokens runs out. Samples nothing and knows no queues.

Backtracking. A matcher whose language is wider than its constraint may reach a state from which no token
leads on. Then its last steps are undone in the matcher, the output and the KV, and the token that led there
is forbidden. How often, and how many tokens in all, is bounded (SchedulerConfig).

Budget. From half of max_new_tokens on (streams and small budgets: from the start) a request holds a
completion: ids that complete its output within the remaining budget. It is checked again after a quarter of
the spare tokens; usually the held ids, or the rest of them, are still good and no search is needed. If a
search fails and the budget is large, it is repeated after 2, 4, 8 ... tokens. If the budget is small, the
output is cut back to where a completion was known, and that is appended without asking the model. The
generation ends with "length" then, even if min_new_tokens is not reached.

Text that was sent cannot be taken back: a stream is checked after every token, and only tokens before the
last step with a known completion are sent; if none is found, it lags by up to PATIENCE tokens.

Searches come in pieces: between two of them the caller may do other work, as long as the request stays as it
is.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import msgspec

from runtime.cache.manager import CacheManager
from runtime.config.scheduler import SchedulerConfig
from runtime.grammar.base import Completion, Matcher, Rejection, first_completion
from runtime.grammar.completion import Steps, at_once, follows, rest_of
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import BadConstraint, InternalFault
from runtime.protocol.io_struct import FinishReason
from runtime.scheduler.admission import shrink
from runtime.scheduler.guided.steps import cut, guide_of, mark
from runtime.scheduler.requests.request import Request
from runtime.scheduler.requests.stop import LENGTH

SMALL = 48  # max_new_tokens below which a completion is needed from the start
SPARE = 4  # a check follows after 1/SPARE of the spare tokens
TIGHT = 16  # fewer tokens than this, besides twice those of the held completion, are a small budget
PATIENCE = 16  # tokens between two searches that fail, at most, or a quarter of all
SEARCHES = 48  # searches for one request while it runs
LATER = 2  # earlier steps from which a completion is searched, if none is found from the last one
_KEPT = 256


class _Way(NamedTuple):
    """How to take output back: steps, the message's reason, and the `token` to forbid there (-1: none)."""

    back: int
    reason: str
    rejection: Rejection | None = None
    token: int = -1


class Liveness:
    def __init__(self, manager: CacheManager, config: SchedulerConfig) -> None:
        self._manager, self._config = manager, config
        self._shortest: OrderedDict[tuple[Constraint, bool], tuple[int, ...] | None] = OrderedDict()

    # -- the budget ------------------------------------------------------------------------------------------

    def begin(self, request: Request) -> None:
        """The request has its matcher. Without a completion that fits its end is not guaranteed."""
        if not self._config.liveness or request.source.constraint is None or request.ending:
            return
        guide = guide_of(request)
        later = _completion_of(request, guide.matcher)
        if later is None or request.source.require_reasoning or request.healing is not None:
            self._from_start(request, request.source.constraint)
            return
        # Most outputs end by themselves: large budgets are not searched before half of the tokens are used.
        # Streamed text is checked before it is sent.
        guide.completion = later
        many = request.params.max_new_tokens
        guide.check_at = many // 2 if many >= SMALL else 0
        if request.stream:
            ids = later.get()
            if ids is not None and len(ids) > many:  # it need not be the shortest
                ids = guide.matcher.closing(many)
            guide.sure_held = ids or ()
            if not guide.sure_held:
                guide.completion = None

    def _start_search(self, request: Request, *, here: bool = True) -> Steps[None]:
        """Search a completion now: from `here`, or else the one from the start."""
        guide = guide_of(request)
        later, guide.completion = guide.completion, None
        if later is None:
            return
        budget = request.remaining - len(guide.pending)
        ids = (yield from self._searched(request, guide.matcher, (), budget)) if here and budget > 0 else None
        if ids is not None:
            guide.held, guide.held_at = ids, len(guide.marks)
            guide.check_at = request.produced + max(1, (budget - len(ids)) // SPARE)
            return
        ids = yield from later.steps()
        fits = ids is not None and len(ids) <= request.params.max_new_tokens
        guide.held, guide.held_at, guide.check_at = (ids if fits else None), 0, request.produced

    def _from_start(self, request: Request, constraint: Constraint) -> None:
        guide = guide_of(request)
        origin = guide.matcher.origin
        key = constraint, bool(request.source.require_reasoning)
        if origin.searched and not key[1]:
            ids: tuple[int, ...] | None = origin.shortest
        elif key in self._shortest:
            ids = self._shortest[key]
        else:
            start = guide.matcher.copy()
            start.rollback(len(guide.marks))
            ids = self._shortest[key] = first_completion(start).ids
            if len(self._shortest) > _KEPT:
                self._shortest.popitem(last=False)
        fits = ids is not None and len(ids) <= request.params.max_new_tokens
        guide.held, guide.held_at, guide.check_at = (ids if fits else None), 0, 0

    def renew(self, request: Request, budget: int) -> None:
        """The held completion does not fit: search one from here, of at most `budget` ids."""
        guide = guide_of(request)
        if guide.held is not None:
            guide.held, guide.check_at = guide.matcher.closing(budget), request.produced

    def after(self, request: Request, reason: FinishReason | None) -> FinishReason | None:
        """A step was appended, with the text it forces. Returns why the request ends; `reason`: so far."""
        if not self.is_due(request, reason):
            return reason
        return at_once(self.checked(request, reason))

    def is_due(self, request: Request, reason: FinishReason | None) -> bool:
        """Whether after() has anything to check; usually it has not, and returns `reason`."""
        guide = guide_of(request)
        if reason is not None:
            return reason.type == "length"
        if guide.pending:
            return False  # checked when all are appended, as after a jump: a stop may be among them
        if request.produced >= guide.check_at and (guide.completion or guide.held is not None):
            return True
        known = guide.sure_at if guide.completion is not None else max(guide.held_at, guide.sure_at)
        needed = guide.completion is not None or guide.held is not None
        return request.stream and needed and known < len(guide.marks)

    def checked(self, request: Request, reason: FinishReason | None) -> Steps[FinishReason | None]:
        """after() in pieces, if it is due."""
        guide = guide_of(request)
        matcher = guide.matcher
        if guide.completion is not None:
            if reason is None and request.produced < guide.check_at:
                if request.stream and guide.sure_at < len(guide.marks):
                    yield from self._check_stream(request, matcher)
                return None
            yield from self._start_search(request)
        if guide.held is None:
            return reason
        if reason is not None:
            complete = matcher.may_stop() and not guide.pending
            return reason if complete else (yield from self._complete(request)) or reason
        if request.produced >= guide.check_at:
            end = yield from self._check(request, matcher)
            if end is not None:
                return end
        if request.stream and max(guide.held_at, guide.sure_at) < len(guide.marks):
            yield from self._check_stream(request, matcher)
        return None

    def _check(self, request: Request, matcher: Matcher) -> Steps[FinishReason | None]:
        """Hold a completion from here, or keep the known one while the budget allows another search."""
        guide = guide_of(request)
        held, budget = guide.held or (), request.remaining - len(guide.pending)
        ids = self._still_good(request, matcher, held, guide.held_at, budget)
        if ids is None:
            ids = yield from self._searched(request, matcher, held, budget, later=guide.held_at > 0)
        if ids is not None:
            guide.held, guide.held_at, guide.misses = ids, len(guide.marks), 0
            guide.check_at = request.produced + max(1, (budget - len(ids)) // SPARE)
            return None
        if budget < 2 * len(held) + TIGHT:
            return (yield from self._complete(request))
        guide.misses += 1
        wait = min(1 << min(guide.misses, 12), max(PATIENCE, budget // SPARE))
        guide.check_at = request.produced + wait
        return None

    def _check_stream(self, request: Request, matcher: Matcher) -> Steps[None]:
        """Find out how much may be sent. Holds a completion of its own, so that the other checks, and the
        output, are the same as without streaming."""
        guide = guide_of(request)
        if request.produced < guide.stream_check_at:
            return
        budget = request.remaining - len(guide.pending)
        held, at = guide.held or (), guide.held_at
        if guide.held is None or guide.sure_at > at:
            held, at = guide.sure_held, guide.sure_at
        ids = self._still_good(request, matcher, held, at, budget)
        if ids is None:
            ids = yield from self._searched(request, matcher, held, budget, later=at > 0)
        if ids is not None:
            guide.sure_held, guide.sure_at, guide.stream_misses = ids, len(guide.marks), 0
            return
        guide.stream_misses += 1
        guide.stream_check_at = request.produced + min(1 << min(guide.stream_misses, 8), PATIENCE)

    @staticmethod
    def _searched(
        request: Request, matcher: Matcher, held: tuple[int, ...], budget: int, *, later: bool = False
    ) -> Steps[tuple[int, ...] | None]:
        """A part of the held completion, or another one, unless the request has used up its searches. later:
        `held` was found after the start. If its part is too long, there is no search: other completions would
        hardly be shorter, and a search that fails takes five times as long as others."""
        guide = guide_of(request)
        step = len(guide.marks)
        if guide.searches >= SEARCHES:
            return None
        ids = yield from rest_of(matcher, held)
        if ids is not None and len(ids) <= budget:
            return ids
        if (later and ids is not None) or guide.hopeless(step, budget):
            return None
        guide.searches += 1
        ids = yield from matcher.closing_steps(budget)
        if ids is None:
            guide.missed = step, budget
        return ids

    @staticmethod
    def _still_good(
        request: Request, matcher: Matcher, held: tuple[int, ...], at: int, budget: int
    ) -> tuple[int, ...] | None:
        """The completion `held` after `at` steps, or its rest, if that completes the output here."""
        guide = guide_of(request)
        if matcher.may_stop():
            return ()
        options = [held]
        if at < len(guide.marks):
            since = request.tokens[guide.marks[at].length :].tolist()
            if since == list(held[: len(since)]) and not guide.pending:
                options.insert(0, held[len(since) :])
        for ids in options:
            if ids and len(ids) <= budget and follows(matcher, ids):
                return ids
        return None

    def _complete(self, request: Request) -> Steps[FinishReason | None]:
        """Cut back to where a completion is known, and append it. None if too much was sent already."""
        guide = guide_of(request)
        matcher = guide.matcher
        if guide.sure_at > guide.held_at:
            guide.held, guide.held_at = guide.sure_held, guide.sure_at
        yield from self._hold_later(request, matcher)
        back = len(guide.marks) - guide.held_at
        if back and guide.length_before(back) < request.prompt_len + request.sent:
            guide.held = None
            return None
        if back:
            matcher.rollback(back)
        self._cut(request, back)
        guide.closed_by_budget = True
        held, guide.held = guide.held or (), None
        for token in held:
            if not matcher.advance(token):
                raise InternalFault(f"token {token} of a completion does not fit", where="liveness")
            mark(request)
            request.append(token, None, later=True, forced=True)
            reason = request.stopped(token)
            if reason is not None and reason.type == "stop":
                return msgspec.structs.replace(reason, type="length")  # `matched` is still cut from the text
        return LENGTH

    @staticmethod
    def _hold_later(request: Request, matcher: Matcher) -> Steps[None]:
        """Hold a completion from a later step than the known one, if one is found at once."""
        guide = guide_of(request)
        steps = len(guide.marks) - guide.held_at
        back, spare = 1, LATER
        while back < steps and spare:
            earlier = matcher.copy()
            earlier.rollback(back)
            step = len(guide.marks) - back
            budget = request.params.max_new_tokens - (guide.marks[step].length - request.prompt_len)
            rest = yield from rest_of(earlier, guide.held or ())
            ids = rest if rest is not None and len(rest) <= budget else None
            known = rest is not None and guide.held_at  # as in _searched(): others would hardly be shorter
            if ids is None and not known and not guide.hopeless(step, budget):
                ids = yield from earlier.closing_steps(budget)
            if ids is not None:
                guide.held, guide.held_at = ids, step
                return
            back, spare = 2 * back, spare - 1

    # -- backtracking ----------------------------------------------------------------------------------------

    def backtrack(self, request: Request) -> FinishReason | None:
        """No token may follow the output: take it back to the last step with another choice. Returns why the
        request ends, if the attempts are used up and a completion is known. Raises BadConstraint if none is
        known."""
        guide = guide_of(request)
        matcher = guide.matcher
        guide.dead_end = False
        way = self._way(request, matcher)
        most = max(self._config.max_taken_back, 4 * request.params.max_new_tokens)
        spent = guide.backtracks >= self._config.max_rejections or guide.taken_back >= most
        sent = way.back > 0 and guide.length_before(way.back) < request.prompt_len + request.sent
        if spent or sent or way.back == 0:
            at_once(self._start_search(request, here=False))
            known = guide.held is not None and guide.held_at <= len(guide.marks)
            if known and (end := at_once(self._complete(request))) is not None:
                return end
            raise self._hopeless(request, way, sent=sent and not spent)
        if way.rejection is not None:
            matcher.retract(way.rejection)
        else:
            matcher.rollback(way.back)
            at = len(guide.marks) - way.back
            guide.banned[at] = guide.banned.get(at, frozenset()) | {way.token}
        self._cut(request, way.back)
        if guide.held is not None and guide.held_at > len(guide.marks) and request.source.constraint:
            self._from_start(request, request.source.constraint)
        guide.check_at = guide.stream_check_at = min(guide.check_at, request.produced)
        guide.sure_at = min(guide.sure_at, len(guide.marks))
        return None

    @staticmethod
    def _way(request: Request, matcher: Matcher) -> _Way:
        rejection = matcher.verdict()
        if rejection is not None:
            return _Way(rejection.back, rejection.reason, rejection)
        reason = "no token of the vocabulary can follow"
        for back, step in enumerate(reversed(guide_of(request).marks), 1):
            if step.token >= 0:
                return _Way(back, reason, token=step.token)
        return _Way(0, reason)

    def _cut(self, request: Request, back: int) -> None:
        """Take the last `back` steps back; the last token that stays is computed again for its logits."""
        guide = guide_of(request)
        if back:
            guide.backtracks += 1
            guide.taken_back += cut(request, back)
        if not request.intact:
            return  # its pass is running; GuidedDecoding.settle() does it then
        shrink(self._manager, request, min(request.computed, len(request.tokens) - 1))
        if request.hidden == "all":
            del request.states[request.computed :]

    def _hopeless(self, request: Request, way: _Way, *, sent: bool) -> BadConstraint:
        guide = guide_of(request)
        tries = f"{guide.backtracks} times, {guide.taken_back} tokens in all"
        limit = f"at most {self._config.max_rejections} times"
        if sent:
            tries += "; what comes before was sent already"
        if way.back == 0:
            tries, limit = tries + "; there was no other choice", ""
        exact = guide.matcher.origin.exact
        return BadConstraint(
            f"what was generated cannot be kept after {request.produced} generated tokens: {way.reason} "
            f"(output was taken back {tries}{f'; {limit}' if limit else ''})",
            where=request.source.constraint.kind if request.source.constraint else "constraint",
            hint="the constraint leads to a dead end for this tokenizer"
            if exact
            else "try another seed, or a schema that says the same with fewer conditions on whole values",
        )


def completion_ready(request: Request, matcher: Matcher) -> bool:
    """Whether `request` has the completion that it needs from the start. Starts the search."""
    later = _completion_of(request, matcher)
    needs = request.stream or request.params.max_new_tokens < SMALL or request.source.require_reasoning
    if later is None or not needs:
        return True
    later.want()
    return later.ready


def _completion_of(request: Request, matcher: Matcher) -> Completion | None:
    """The search of a completion; None if one that fits is known from compiling, or there is no search."""
    origin = matcher.origin
    fits = origin.shortest is not None and len(origin.shortest) <= request.params.max_new_tokens
    return None if fits else origin.completion
