"""Guided decoding: what the scheduler asks of constrained decoding, and all it knows of it. Requests without
a constraint come by here only where their prompt's end is healed, or min_new_tokens forbids ids.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from runtime.cache.manager import CacheManager
from runtime.config.scheduler import SchedulerConfig
from runtime.grammar.manager import MASK_S, Histogram
from runtime.grammar.reasoner import ReasonerMatcher, Reasoning
from runtime.plan import Sample, StepResult, TokenMask
from runtime.protocol.errors import RuntimeFault
from runtime.protocol.io_struct import FinishReason
from runtime.protocol.vocabulary import Vocabulary
from runtime.scheduler.batching import Flight
from runtime.scheduler.guided.advance import Advance, Encode
from runtime.scheduler.guided.compilation import Compilation, Grammars
from runtime.scheduler.guided.deferred import DeferredAdvance, Over
from runtime.scheduler.guided.masks import full, masks_of
from runtime.scheduler.guided.throttle import Pass, Throttle
from runtime.scheduler.requests.request import Request

__all__ = ["Encode", "Grammars", "GuidedDecoding", "Over", "ended"]


class GuidedDecoding:
    """`grammars`, `reasoning`, `encode`: see Scheduler. Its length: how many requests wait for their
    grammar."""

    def __init__(
        self,
        config: SchedulerConfig,
        manager: CacheManager,
        vocabulary: Vocabulary,
        encode: Encode,
        grammars: Grammars | None,
        reasoning: Reasoning | None,
    ) -> None:
        advance = Advance(vocabulary, encode, manager, config)
        self._compilation = Compilation(grammars, advance, reasoning, liveness=config.liveness)
        self._deferred = DeferredAdvance(advance, manager)
        self._throttle = Throttle()
        self._everything = full(len(vocabulary))
        self._mask_seconds = Histogram(MASK_S)

    # -- before a request runs -------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._compilation)

    def add(self, request: Request) -> bool:
        """Whether the request waits here for its grammar now; otherwise it needs none."""
        return self._compilation.add(request)

    def ready(self) -> Iterator[tuple[Request, RuntimeFault | None]]:
        """Those that need wait no longer, taken out, with what is wrong with them."""
        return self._compilation.ready()

    def remove(self, request: Request) -> None:
        """It waits no longer; nothing happens when it did not."""
        self._compilation.remove(request)

    # -- planning --------------------------------------------------------------------------------------------

    @property
    def overlapped(self) -> bool:
        """Whether the scheduler's thread works while passes run, so that run_deferred() has its time then."""
        return self._deferred.overlapped

    @overlapped.setter
    def overlapped(self, value: bool) -> None:
        self._deferred.overlapped = value

    def idle(self) -> None:
        """Nothing runs now."""
        self._throttle.idle()

    def skips(self, running: Sequence[Request]) -> bool:
        """Whether constrained requests skip the next pass of `running`, for the free ones' sake."""
        return self._deferred.beside(running) and self._throttle.skip()

    # -- the step --------------------------------------------------------------------------------------------

    def masks(
        self, flight: Flight, over: Over | None
    ) -> tuple[dict[int, TokenMask], dict[int, RuntimeFault]]:
        """Masks by row of the plan, and what is wrong with grammars that failed, by the handle of their
        sequence. Where free ones are beside, no more is done once the pass is `over`."""
        began = time.perf_counter()
        over = over if self._deferred.beside(flight.requests) else None
        masks, faults = masks_of(flight.requests, flight.rows, self._everything, over)
        if masks:
            self._mask_seconds.observe(time.perf_counter() - began)
        return masks, faults

    def landed(self, flight: Flight, running: Sequence[Request], result: StepResult, now: float) -> None:
        """The pass ended `now`; its results are about to be settled."""
        if self._deferred.overlapped:
            beside = self._deferred.beside(running)
            self._throttle.observe(_measured(flight), result, now, beside=beside)
        self._deferred.begin(flight.requests)

    def settle(self, request: Request) -> bool:
        """A row of the request was computed. Whether what it sampled is void."""
        return self._deferred.settle(request)

    def accept(self, request: Request, sample: Sample, *, at_once: bool = False) -> FinishReason | None:
        """Append a sampled token, and what it forces (`at_once`: now, even where that might be put off); why
        the generation ended, if it did. Raises InternalFault when the token could not have been sampled,
        BadConstraint at a dead end."""
        return self._deferred.accept(request, sample, at_once=at_once)

    @property
    def has_deferred(self) -> bool:
        """Whether run_deferred() has anything to do."""
        return self._deferred.pending

    def run_deferred(
        self, live: Mapping[str, Request], under_way: Collection[int], over: Over | None
    ) -> list[tuple[Request, RuntimeFault | None]]:
        """What accept() put off, until the pass is `over`: the requests that changed by it, with what went
        wrong. `under_way`: handles of the sequences of that pass."""
        return self._deferred.run(live, under_way, over)

    # -- reports ---------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {"grammar_mask_seconds": self._mask_seconds.state()}


def ended(request: Request, reason: FinishReason) -> FinishReason:
    """`reason`, and what the output breaks off in where its constraint would have gone on."""
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


def _measured(flight: Flight) -> Pass:
    computes = jumps = False
    masked = 0
    for request, row in zip(flight.requests, flight.rows):
        masked += row.masked
        if len(row.tokens) - row.drafts > 1:
            prompt = row.position < request.publish_to
            computes, jumps = computes or prompt, jumps or not prompt
    return Pass(len(flight.rows), flight.present, masked, computes, jumps)
