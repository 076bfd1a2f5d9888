"""Guided decoding: what the scheduler does for constrained requests, and the only file of this folder that
others enter. Requests without a constraint come here only if the end of their prompt is healed, or
min_new_tokens forbids ids.

Deferred advance: if constrained requests run beside free ones, the matcher follows a sampled token while the
next pass runs, which has the token as it is. Usually that changes nothing. If it appends forced text, heals
the seam or completes the output, the row under way is void: its draw is dropped, and the request continues
one step later than it would have. If the pass ends before all were advanced, the rows of the others are void
too, and they wait for their turn; an advance whose searches take longer continues in the next pass. Outputs
are the same as without; a draw depends on its seed and step alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, TypeAlias

import msgspec

from runtime.cache.manager import CacheManager
from runtime.config.scheduler import SchedulerConfig
from runtime.grammar.base import Matcher
from runtime.grammar.completion import Steps
from runtime.grammar.manager import MASK_S, GrammarManager, Histogram
from runtime.grammar.reasoner import ReasonerMatcher, Reasoning
from runtime.plan import Row, Sample, StepResult, TokenMask
from runtime.protocol.errors import Aborted, BadRequest, InternalFault, RuntimeFault, UnsupportedConstraint
from runtime.protocol.io_struct import FinishReason
from runtime.protocol.vocabulary import Vocabulary
from runtime.scheduler.admission import shrink
from runtime.scheduler.guided.advance import Advance, Encode
from runtime.scheduler.guided.liveness import completion_ready
from runtime.scheduler.guided.masks import full, masks_of
from runtime.scheduler.guided.steps import Costs, guide_of
from runtime.scheduler.guided.throttle import Pass, Throttle
from runtime.scheduler.requests.components import Guide
from runtime.scheduler.requests.request import Request, defect
from runtime.scheduler.stage import Settled

__all__ = ["Encode", "GuidedDecoding", "PassDone", "ended"]

SHARE = 4
"""Constrained requests are deferred if there is at least one free request for so many of them: each jump
costs one of them a step, and all others gain the time of the advance."""

PassDone: TypeAlias = Callable[[], bool]
"""Whether the pass that was launched has ended."""


class GuidedDecoding:
    """`grammars`: compiles constraints off the scheduler's thread; None refuses constraints. `reasoning`: how
    the model ends its reasoning; None if that is not known. overlapped: whether the scheduler's thread works
    while passes run, so that run_deferred() has its time then. compiling: the requests that wait for their
    grammar, by seq."""

    def __init__(
        self,
        config: SchedulerConfig,
        manager: CacheManager,
        vocabulary: Vocabulary,
        encode: Encode,
        grammars: GrammarManager | None,
        reasoning: Reasoning | None,
    ) -> None:
        self.overlapped = False
        self._manager, self._grammars, self._reasoning = manager, grammars, reasoning
        self._liveness = config.liveness
        self._advance = Advance(vocabulary, encode, manager, config)
        self.compiling: dict[int, tuple[Request, Future[Matcher]]] = {}
        self._deferred: list[Request] = []
        self._interrupted: dict[str, Steps[FinishReason | None]] = {}
        self._defers = False  # in the step being settled
        self._throttle = Throttle()
        self._everything = full(len(vocabulary))
        self._mask_seconds = Histogram(MASK_S)

    # -- before a request runs -------------------------------------------------------------------------------

    def add(self, request: Request) -> bool:
        """Whether the request waits here for its matcher now; otherwise it needs none."""
        source = request.source
        if source.constraint is None and (not source.require_reasoning or source.max_thinking_tokens is None):
            return False
        future: Future[Matcher] = Future()
        try:
            if source.constraint is None:
                future.set_result(self._known_reasoning().anything())
            elif self._grammars is not None:
                future = self._grammars.submit(source.constraint)
            else:
                raise UnsupportedConstraint(
                    "no grammar backend is loaded", where=source.constraint.kind,
                    hint="start with a grammar backend",
                )  # fmt: skip
        except RuntimeFault as fault:
            future.set_exception(fault)
        self.compiling[request.seq] = request, future
        return True

    def remove(self, request: Request) -> None:
        """It waits no longer; nothing happens if it did not."""
        waiting = self.compiling.pop(request.seq, None)
        if waiting is not None:
            waiting[1].cancel()

    def ready(self) -> Iterator[Settled]:
        """The requests that can run now, or have failed, taken out."""
        for request, future in list(self.compiling.values()):
            if not future.done() or request.seq not in self.compiling:
                continue
            outcome = _outcome(future)
            if self._liveness and isinstance(outcome, Matcher) and not completion_ready(request, outcome):
                continue
            del self.compiling[request.seq]
            yield request, outcome if isinstance(outcome, RuntimeFault) else self._begin(request, outcome)

    def _begin(self, request: Request, matcher: Matcher) -> RuntimeFault | None:
        """The request has its matcher; returns its error."""
        began = time.thread_time()
        guide = request.guide = Guide(matcher)
        source = request.source
        try:
            if source.constraint is not None:
                guide.origin = matcher.origin
            if source.require_reasoning:
                guide.matcher = self._known_reasoning().wrap(
                    matcher, thinking=True, max_thinking_tokens=source.max_thinking_tokens
                )
            reason = self._advance.begin(request)
            if reason is not None:
                request.end(reason)
        except RuntimeFault as fault:
            return fault
        except Exception as error:  # noqa: BLE001 - it is this request's answer
            return defect("the grammar failed", error)
        guide.seconds = time.thread_time() - began
        return None

    def _known_reasoning(self) -> Reasoning:
        if self._reasoning is None:
            raise BadRequest("it is not known how this model ends its reasoning", where="require_reasoning")
        return self._reasoning

    # -- planning --------------------------------------------------------------------------------------------

    def idle(self) -> None:
        """Nothing runs now."""
        self._throttle.idle()

    def skips(self, running: Sequence[Request]) -> bool:
        """Whether constrained requests skip the next pass of `running`, to make up for their cost."""
        return self._beside(running) and self._throttle.skip()

    def _beside(self, requests: Sequence[Request]) -> bool:
        """Whether masks are filled only while the model computes: with few constrained requests among many
        free ones, the free ones must not wait for masks."""
        if not self.overlapped:
            return False
        bound = sum([request.guide is not None for request in requests])
        return 0 < bound <= SHARE * (len(requests) - bound)

    # -- the step --------------------------------------------------------------------------------------------

    def masks(
        self, requests: Sequence[Request], rows: Sequence[Row], pass_done: PassDone | None
    ) -> tuple[dict[int, TokenMask], dict[int, RuntimeFault]]:
        """Masks by row of the plan, and the errors of grammars, by the handle of their sequence. Beside free
        requests no more is done once the pass has ended."""
        began = time.perf_counter()
        pass_done = pass_done if self._beside(requests) else None
        masks, faults = masks_of(requests, rows, self._everything, pass_done)
        if masks:
            self._mask_seconds.observe(time.perf_counter() - began)
        return masks, faults

    def landed(
        self,
        requests: Sequence[Request],
        rows: Sequence[Row],
        present: int,
        running: Sequence[Request],
        result: StepResult,
        now: float,
    ) -> None:
        """The pass ended `now`; its results are about to be settled. present: how many requests ran at the
        time of the plan, in it or not; running: those that run now."""
        if self.overlapped:
            what = _measured(requests, rows, present)
            self._throttle.observe(what, result, now, beside=self._beside(running))
        self._defers = self._beside(requests)

    def accept(self, request: Request, sample: Sample, *, at_once: bool = False) -> FinishReason | None:
        """Append a sampled token, and what it forces (`at_once`: now, even if that could be deferred); why
        the generation ended, if it did. Raises InternalFault when the token could not have been sampled,
        BadConstraint at a dead end."""
        guide, defers = request.guide, self._defers and not at_once
        began = 0.0 if defers else time.thread_time()  # costly, if it is called for each token
        reason = self._advance.accept(request, sample, defer=defers)
        if guide is not None:
            if guide.unread:
                self._deferred.append(request)
            elif not defers:
                guide.seconds += time.thread_time() - began
        return reason

    def settle(self, request: Request) -> bool:
        """A row of the request was computed. Returns whether its sample is void, because the request changed
        meanwhile: then only the KV is kept that is still right and need not be computed again for its
        logits."""
        if request.intact:
            return False
        guide = guide_of(request)
        keep = min(guide.valid_length, request.computed, len(request.tokens) - (request.ending is None))
        guide.valid_length = -1
        shrink(self._manager, request, keep)
        return True

    @property
    def has_deferred(self) -> bool:
        """Whether run_deferred() has anything to do."""
        return bool(self._deferred or self._interrupted)

    def run_deferred(
        self, live: Mapping[str, Request], under_way: Collection[int], pass_done: PassDone | None = None
    ) -> list[Settled]:
        """Advance what accept() deferred, until the pass has ended: the requests that changed by it.
        `under_way`: handles of the sequences of that pass."""
        requests, self._deferred = self._deferred, []
        changed: list[Settled] = []
        costs = Costs()
        for request in requests:
            if live.get(request.rid) is not request or request.ending is not None:
                self._interrupted.pop(request.rid, None)
                continue
            guide, end = guide_of(request), len(request.tokens)
            guide.valid_length = end if request.seq in under_way else -1
            if costs.any and pass_done is not None and pass_done():
                guide.waits = True
                self._deferred.append(request)
                continue
            done, reason, fault = self._advance_one(request, pass_done)
            costs.add(request)
            guide.waits = guide.interrupted = not done
            if not done:
                self._deferred.append(request)
                continue
            if reason is not None:
                request.end(reason)
            if reason is not None or fault is not None:
                changed.append((request, fault))
            elif guide.valid_length == len(request.tokens) == end:
                guide.valid_length = -1  # the row under way is as good as any
        costs.charge()
        return changed

    def _advance_one(
        self, request: Request, pass_done: PassDone | None
    ) -> tuple[bool, FinishReason | None, RuntimeFault | None]:
        """Whether it is complete (else it was interrupted because the pass had ended), and its outcome."""
        steps = self._interrupted.pop(request.rid, None) or self._advance.advance_steps(request)
        try:
            while True:
                next(steps)
                if pass_done is not None and pass_done():
                    self._interrupted[request.rid] = steps
                    return False, None, None
        except StopIteration as end:
            return True, end.value, None
        except RuntimeFault as fault:
            return True, None, fault
        except Exception as error:  # noqa: BLE001 - it is this request's answer
            return True, None, defect("the grammar failed", error)

    def state(self) -> dict[str, Any]:
        return {"grammar_mask_seconds": self._mask_seconds.state()}


def ended(request: Request, reason: FinishReason) -> FinishReason:
    """`reason`, and `unfinished` if the constraint would have continued."""
    if request.guide is None or reason.type == "abort":
        return reason
    matcher = request.guide.matcher
    try:
        if matcher.may_stop():
            return reason
    except RuntimeFault:
        return msgspec.structs.replace(reason, unfinished="constraint")
    asleep = isinstance(matcher, ReasonerMatcher) and matcher.asleep
    return msgspec.structs.replace(reason, unfinished="reasoning" if asleep else "constraint")


def _outcome(future: Future[Matcher]) -> Matcher | RuntimeFault:
    try:
        return future.result(timeout=0)
    except RuntimeFault as fault:
        return fault
    except CancelledError:
        return Aborted("the compilation of its constraint was cancelled", where="constraint")
    except Exception as error:  # noqa: BLE001
        return InternalFault(
            f"compiling the constraint failed: {type(error).__name__}: {error}", where="constraint"
        )


def _measured(requests: Sequence[Request], rows: Sequence[Row], present: int) -> Pass:
    computes = jumps = False
    masked = 0
    for request, row in zip(requests, rows):
        masked += row.masked
        if len(row.tokens) - row.drafts > 1:
            prompt = row.position < request.publish_to
            computes, jumps = computes or prompt, jumps or not prompt
    return Pass(len(rows), present, masked, computes, jumps)
