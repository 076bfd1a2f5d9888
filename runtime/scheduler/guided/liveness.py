"""Liveness: constrained outputs end as their constraint wants. Takes output back where nothing may follow it,
and leads it to an end before max_new_tokens runs out. Samples nothing and knows no queues.

Backtracking. A language that is wider than its constraint may lead to a place where nothing is left that may
follow. Then the steps that led there are undone in the matcher, the output and the KV, what was taken there
is forbidden, and generation goes on. How often, and how many tokens in all, is bounded (SchedulerConfig).

Budget. From half of max_new_tokens on (streams and small budgets: from the start) a request holds ids that
would complete its output, known to fit into what is left when they were found. Whether there still are such
ids is asked again after a quarter of the tokens to spare: rarely while there are many, at every token in the
end. Usually the ids held, or an end of them, are still good and no search is needed. Where none is found, and
there is room, is asked again after 2, 4, 8 ... tokens. Where room is short the output is cut back to where a
completion was known, or to a later place from which one is found at once, and that is appended without asking
the model.

What was sent cannot be taken back. A request that streams is asked after every token besides, and only tokens
before the last place with a known completion are sent; where none is found the stream lags behind by up to
PATIENCE tokens. If in the end it is closed from there, the output may differ from that of a request which
does not stream.

The generation then ends, even where min_new_tokens is not reached: the constraint goes before it, as
everywhere. It ends with "length", since the model did not write the completion. A stop string or stop id
within the completion ends the output there, and is cut from the text as usual. Completions hold no eos, so an
eos needs no room.

Searches come in pieces: whoever asks may let other things happen between two of them, as long as these leave
the request as it is.
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

SMALL = 48  # max_new_tokens below which a completion is wanted from the start
SPARE = 4  # the share of the tokens to spare after which is asked again
TIGHT = 16  # fewer tokens than this, besides twice those of the completion held, are a short room
PATIENCE = 16  # tokens after which is asked again when no completion was found, at most, or a quarter of all
SEARCHES = 48  # searches for one request while it runs
LATER = 2  # places from which a completion is looked for, when none is found from the last one
_KEPT = 256


class _Way(NamedTuple):
    """How to go back: `back` steps; `reason` for people; `token` to forbid there if the matcher cannot."""

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
        """The request has its matcher, at its start. Without a completion that fits nothing is promised."""
        if not self._config.liveness or request.source.constraint is None or request.ending:
            return
        guide = guide_of(request)
        later = _wanted(request, guide.matcher)
        if later is None or request.source.require_reasoning or request.heal is not None:
            self._from_start(request, request.source.constraint)
            return
        # Most outputs end by themselves: nothing is looked for before half of the tokens are used, and of
        # small budgets at once. What streams is checked before it is sent.
        guide.completion = later
        many = request.params.max_new_tokens
        guide.check_at = many // 2 if many >= SMALL else 0
        if request.stream:
            ids = later.get()
            if ids is not None and len(ids) > many:  # the one that is known is not the shortest
                ids = guide.matcher.closing(many)
            guide.sure_held = ids or ()
            if not guide.sure_held:
                guide.completion = None

    def _start_search(self, request: Request, *, here: bool = True) -> Steps[None]:
        """A completion is wanted now: from `here`, or else the one from the start."""
        guide = guide_of(request)
        later, guide.completion = guide.completion, None
        if later is None:
            return
        room = request.remaining - len(guide.pending)
        ids = (yield from self._searched(request, guide.matcher, (), room)) if here and room > 0 else None
        if ids is not None:
            guide.held, guide.held_at = ids, len(guide.marks)
            guide.check_at = request.produced + max(1, (room - len(ids)) // SPARE)
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

    def again(self, request: Request, room: int) -> None:
        """The output of a request that holds a completion begins elsewhere than was thought: one from here,
        in `room` ids."""
        guide = guide_of(request)
        if guide.held is not None:
            guide.held, guide.check_at = guide.matcher.closing(room), request.produced

    def after(self, request: Request, reason: FinishReason | None) -> FinishReason | None:
        """A step of the request was appended, with what it forces; `reason`: why it would end now. Why it
        does."""
        if self.is_content(request, reason):
            return reason
        return at_once(self.asked(request, reason))

    def is_content(self, request: Request, reason: FinishReason | None) -> bool:
        """Whether after() has nothing to ask, and gives `reason`: the usual case."""
        guide = guide_of(request)
        if reason is not None:
            return reason.type != "length"
        if guide.pending:
            return True  # asked when all are appended, as of a request that jumps: a stop may be among them
        if request.produced >= guide.check_at and (guide.completion or guide.held is not None):
            return False
        known = guide.sure_at if guide.completion is not None else max(guide.held_at, guide.sure_at)
        wanted = guide.completion is not None or guide.held is not None
        return not (request.stream and wanted and known < len(guide.marks))

    def asked(self, request: Request, reason: FinishReason | None) -> Steps[FinishReason | None]:
        """after() in pieces, where it is not content."""
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
            whole = matcher.may_stop() and not guide.pending
            return reason if whole else (yield from self._complete(request)) or reason
        if request.produced >= guide.check_at:
            end = yield from self._check(request, matcher)
            if end is not None:
                return end
        if request.stream and max(guide.held_at, guide.sure_at) < len(guide.marks):
            yield from self._check_stream(request, matcher)
        return None

    def _check(self, request: Request, matcher: Matcher) -> Steps[FinishReason | None]:
        """Hold on to a completion from here, or to the one known before as long as there is room to look
        again."""
        guide = guide_of(request)
        held, room = guide.held or (), request.remaining - len(guide.pending)
        ids = self._followed(request, matcher, held, guide.held_at, room)
        if ids is None:
            ids = yield from self._searched(request, matcher, held, room, found=guide.held_at > 0)
        if ids is not None:
            guide.held, guide.held_at, guide.misses = ids, len(guide.marks), 0
            guide.check_at = request.produced + max(1, (room - len(ids)) // SPARE)
            return None
        if room < 2 * len(held) + TIGHT:
            return (yield from self._complete(request))
        guide.misses += 1
        wait = min(1 << min(guide.misses, 12), max(PATIENCE, room // SPARE))
        guide.check_at = request.produced + wait
        return None

    def _check_stream(self, request: Request, matcher: Matcher) -> Steps[None]:
        """Whether what there is may be sent. Keeps its own completion, so that a stream is checked when
        another request is, and comes out the same."""
        guide = guide_of(request)
        if request.produced < guide.tell_at:
            return
        room = request.remaining - len(guide.pending)
        held, at = guide.held or (), guide.held_at
        if guide.held is None or guide.sure_at > at:
            held, at = guide.sure_held, guide.sure_at
        ids = self._followed(request, matcher, held, at, room)
        if ids is None:
            ids = yield from self._searched(request, matcher, held, room, found=at > 0)
        if ids is not None:
            guide.sure_held, guide.sure_at, guide.silent = ids, len(guide.marks), 0
            return
        guide.silent += 1
        guide.tell_at = request.produced + min(1 << min(guide.silent, 8), PATIENCE)

    @staticmethod
    def _searched(
        request: Request, matcher: Matcher, held: tuple[int, ...], room: int, *, found: bool = False
    ) -> Steps[tuple[int, ...] | None]:
        """A part of the completion held, or another one, unless the request has had its share of searches.
        found: `held` was found at a later place than the start. If its part is too long, nothing is looked
        for: others would hardly be shorter, and a search that fails takes five times as long as others."""
        guide = guide_of(request)
        place = len(guide.marks)
        if guide.searches >= SEARCHES:
            return None
        ids = yield from rest_of(matcher, held)
        if ids is not None and len(ids) <= room:
            return ids
        if (found and ids is not None) or guide.hopeless(place, room):
            return None
        guide.searches += 1
        ids = yield from matcher.closing_steps(room)
        if ids is None:
            guide.missed = place, room
        return ids

    @staticmethod
    def _followed(
        request: Request, matcher: Matcher, held: tuple[int, ...], at: int, room: int
    ) -> tuple[int, ...] | None:
        """The completion `held` after `at` steps, or what is left of it where the output went along it, if it
        is good here."""
        guide = guide_of(request)
        if matcher.may_stop():
            return ()
        options = [held]
        if at < len(guide.marks):
            taken = request.tokens[guide.marks[at].length :].tolist()
            if taken == list(held[: len(taken)]) and not guide.pending:
                options.insert(0, held[len(taken) :])
        for ids in options:
            if ids and len(ids) <= room and follows(matcher, ids):
                return ids
        return None

    def _complete(self, request: Request) -> Steps[FinishReason | None]:
        """Cut back to where a completion is known, and append it. None where too much was sent already:
        nothing can be promised any more."""
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
        """A completion from a later place than the one known, where one is found at once."""
        guide = guide_of(request)
        steps = len(guide.marks) - guide.held_at
        back, spare = 1, LATER
        while back < steps and spare:
            place = matcher.copy()
            place.rollback(back)
            step = guide.marks[-back]
            room = request.params.max_new_tokens - (step.length - request.prompt_len)
            rest = yield from rest_of(place, guide.held or ())
            found = rest if rest is not None and len(rest) <= room else None
            known = rest is not None and guide.held_at  # as in _searched(): others would hardly be shorter
            if found is None and not known and not guide.hopeless(len(guide.marks) - back, room):
                found = yield from place.closing_steps(room)
            if found is not None:
                guide.held, guide.held_at = found, len(guide.marks) - back
                return
            back, spare = 2 * back, spare - 1

    # -- backtracking ----------------------------------------------------------------------------------------

    def backtrack(self, request: Request) -> FinishReason | None:
        """Nothing may follow what was generated: take it back as far as there is another choice. Why the
        request ends, where the tries are used up and a completion is known. Raises BadConstraint where none
        is."""
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
        guide.check_at = guide.tell_at = min(guide.check_at, request.produced)
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
        """The output of the last `back` steps is taken back, and its KV; the last token that stays is
        computed again, for what follows it."""
        guide = guide_of(request)
        if back:
            guide.backtracks += 1
            guide.taken_back += cut(request, back)
        if not request.intact:
            return  # its pass is running; DeferredAdvance.settle() does it then
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
    """Whether `request` can begin: the completion of its constraint is known, if it needs one from the start.
    Has it looked for."""
    later = _wanted(request, matcher)
    needs = request.stream or request.params.max_new_tokens < SMALL or request.source.require_reasoning
    if later is None or not needs:
        return True
    later.want()
    return later.ready


def _wanted(request: Request, matcher: Matcher) -> Completion | None:
    """What looks for a completion; None where one that fits is known from compiling, or nothing can look."""
    origin = matcher.origin
    fits = origin.shortest is not None and len(origin.shortest) <= request.params.max_new_tokens
    return None if fits else origin.completion
