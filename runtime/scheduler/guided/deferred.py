"""Deferred grammar advance: of constrained requests that run beside free ones, what a sampled token means to
the matcher, what is forced behind it, and whether the output can still be completed is asked while the next
pass runs, so that the free ones need not wait for the answers. Knows no plans and no queues.

The sampled token goes into the next plan as it is. Where the advance changes nothing, which is the usual
case, nothing was lost. Where it appends a jump, heals the seam, or completes the output, the row under way is
void: its draw is thrown away, KV of tokens that were taken back is written again, and the request goes on one
step later than it would have. Where the pass ends before all were advanced, the others' rows are void too,
and they wait for their turn: constrained requests share the time that passes leave, and free ones wait for
none of them. An advance whose searches take longer is interrupted between two pieces and goes on in the next
pass. One piece of one advance is done in every pass, whatever it takes.

Outputs are the same as without; a draw depends on its seed and place alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeAlias

from runtime.cache.manager import CacheManager
from runtime.grammar.completion import Steps
from runtime.plan import Sample
from runtime.protocol.errors import RuntimeFault
from runtime.protocol.io_struct import FinishReason
from runtime.scheduler.admission import shrink
from runtime.scheduler.guided.advance import Advance
from runtime.scheduler.guided.steps import Costs, guide_of
from runtime.scheduler.requests.request import Request, defect

SHARE = 4
"""Constrained requests are deferred where there is at least one free request for so many of them: each jump
costs one of them a step, and all others gain the time of the advance."""

Over: TypeAlias = Callable[[], bool]
"""Whether the pass that was launched has ended."""


class DeferredAdvance:
    """`overlapped`: whether there will be a time for it, after each launch."""

    def __init__(self, advance: Advance, manager: CacheManager) -> None:
        self._advance, self._manager = advance, manager
        self._requests: list[Request] = []
        self._interrupted: dict[str, Steps[FinishReason | None]] = {}
        self._defers = False  # those of the step being settled
        self.overlapped = False

    @property
    def pending(self) -> bool:
        """Whether anybody is to be advanced."""
        return bool(self._requests or self._interrupted)

    def beside(self, requests: Sequence[Request]) -> bool:
        """Whether the constrained ones among `requests` should not keep the others waiting."""
        if not self.overlapped:
            return False
        bound = sum([request.guide is not None for request in requests])
        return 0 < bound <= SHARE * (len(requests) - bound)

    def begin(self, requests: Sequence[Request]) -> None:
        """The results of `requests` are about to be settled."""
        self._defers = self.beside(requests)

    def accept(self, request: Request, sample: Sample, *, at_once: bool = False) -> FinishReason | None:
        """Advance.accept(), of what was sampled for it; deferred where that is possible and it is not to be
        done `at_once`."""
        guide, defers = request.guide, self._defers and not at_once
        began = 0.0 if defers else time.thread_time()  # dear, where it is asked for each token
        reason = self._advance.accept(request, sample, defer=defers)
        if guide is not None:
            if guide.unread:
                self._requests.append(request)
            elif not defers:
                guide.seconds += time.thread_time() - began
        return reason

    def run(
        self, live: Mapping[str, Request], under_way: Collection[int], over: Over | None = None
    ) -> list[tuple[Request, RuntimeFault | None]]:
        """Advance now: those that changed by it, with what went wrong. `under_way`: handles of the sequences
        whose pass is running, until `over`."""
        requests, self._requests = self._requests, []
        changed: list[tuple[Request, RuntimeFault | None]] = []
        costs = Costs()
        for request in requests:
            if live.get(request.rid) is not request or request.ending is not None:
                self._interrupted.pop(request.rid, None)
                continue
            guide, end = guide_of(request), len(request.tokens)
            guide.valid_length = end if request.seq in under_way else -1
            if costs.any and over is not None and over():
                guide.waits = True
                self._requests.append(request)
                continue
            done, reason, fault = self._run(request, over)
            costs.took(request)
            guide.waits = guide.interrupted = not done
            if not done:
                self._requests.append(request)
                continue
            if reason is not None:
                request.end(reason)
            if reason is not None or fault is not None:
                changed.append((request, fault))
            elif guide.valid_length == len(request.tokens) == end:
                guide.valid_length = -1  # the row under way is as good as any
        costs.charge()
        return changed

    def _run(
        self, request: Request, over: Over | None
    ) -> tuple[bool, FinishReason | None, RuntimeFault | None]:
        """Whether it is done, or was interrupted because the pass was `over`; what came of it."""
        steps = self._interrupted.pop(request.rid, None) or self._advance.advance_steps(request)
        try:
            while True:
                next(steps)
                if over is not None and over():
                    self._interrupted[request.rid] = steps
                    return False, None, None
        except StopIteration as end:
            return True, end.value, None
        except RuntimeFault as fault:
            return True, None, fault
        except Exception as error:  # noqa: BLE001 - it is this request's answer
            return True, None, defect("the grammar failed", error)

    def settle(self, request: Request) -> bool:
        """A row of the request was computed. Whether what it sampled is void, because the request changed
        meanwhile: then only that of its KV is kept which is still true, and not wanted again for what follows
        it."""
        if request.intact:
            return False
        guide = guide_of(request)
        keep = min(guide.valid_length, request.computed, len(request.tokens) - (request.ending is None))
        guide.valid_length = -1
        shrink(self._manager, request, keep)
        return True
