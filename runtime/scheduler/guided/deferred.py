"""Late looks: of constrained requests that run beside free ones, what a sampled token means to the matcher,
what is forced behind it, and whether the output can still be completed is asked while the next pass runs, so
that the free ones need not wait for the answers. Knows no plans and no queues.

The sampled token goes into the next plan as it is. Where the look changes nothing, which is the usual case,
nothing was lost. Where it appends a jump, heals the seam, or closes the output, the row under way is void:
its draw is thrown away, KV of tokens that were taken back is written again, and the request goes on one step
later than it would have. Where the pass ends before all were looked at, the others' rows are void too, and
they wait for their look: constrained requests share the time that passes leave, and free ones wait for none
of them. A look whose searches take longer is broken off between two pieces and goes on in the next pass. One
piece of one look is done in every pass, whatever it takes.

Outputs are the same as with looks at once; a draw depends on its seed and place alone.
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
from runtime.scheduler.guided.advance import Progress
from runtime.scheduler.guided.costs import Shares
from runtime.scheduler.request import Request, defect

SHARE = 4
"""Looks are late where there is at least one free request for so many constrained ones: each jump costs a
constrained request a step, and all others gain the time of the look."""

Over: TypeAlias = Callable[[], bool]
"""Whether the pass that was launched has ended."""


class LateLooks:
    """`wanted`: whether there will be a time for them, after each launch. `on`: whether those of the step
    being settled are late."""

    def __init__(self, progress: Progress, manager: CacheManager) -> None:
        self._progress, self._manager = progress, manager
        self._requests: list[Request] = []
        self._begun: dict[str, Steps[FinishReason | None]] = {}  # looks that were broken off
        self.wanted = self.on = False

    @property
    def pending(self) -> bool:
        """Whether there is anything to look at."""
        return bool(self._requests)

    def beside(self, requests: Sequence[Request]) -> bool:
        """Whether the constrained ones among `requests` should not keep the others waiting."""
        if not self.wanted:
            return False
        bound = sum([request.matcher is not None for request in requests])
        return 0 < bound <= SHARE * (len(requests) - bound)

    def begin(self, requests: Sequence[Request]) -> None:
        """The results of `requests` are about to be looked at."""
        self.on = self.beside(requests)

    def accept(self, request: Request, sample: Sample) -> FinishReason | None:
        """Progress.accept() of what was sampled for it; where looks are late it is put on the list."""
        began = 0.0 if self.on else time.thread_time()  # dear, where it is asked for each token
        reason = self._progress.accept(
            request, sample.token, sample.logprob, sample.top, sample.token_ids, late=self.on
        )
        if request.late:
            self._requests.append(request)
        elif not self.on:
            request.grammar_s += time.thread_time() - began
        return reason

    def take(
        self, live: Mapping[str, Request], under_way: Collection[int], over: Over | None = None
    ) -> list[tuple[Request, RuntimeFault | None]]:
        """Look now: those that changed by it, with what went wrong. `under_way`: handles of the sequences
        whose pass is running, until `over`."""
        requests, self._requests = self._requests, []
        changed: list[tuple[Request, RuntimeFault | None]] = []
        shares = Shares()
        for request in requests:
            if live.get(request.rid) is not request or request.ending is not None:
                self._begun.pop(request.rid, None)
                continue
            flies = request.seq in under_way
            end = len(request.tokens)
            request.sound = end if flies else -1
            if shares.any and over is not None and over():
                request.waits = True
                self._requests.append(request)
                continue
            done, reason, fault = self._look(request, over)
            shares.took(request)
            request.waits = request.looking = not done
            if not done:
                self._requests.append(request)
                continue
            if reason is not None:
                request.end(reason)
            if reason is not None or fault is not None:
                changed.append((request, fault))
            elif request.sound == len(request.tokens) == end:
                request.sound = -1  # the row under way is as good as any
        shares.give()
        return changed

    def _look(
        self, request: Request, over: Over | None
    ) -> tuple[bool, FinishReason | None, RuntimeFault | None]:
        """Whether it is done, or was broken off because the pass was `over`; what came of it."""
        steps = self._begun.pop(request.rid, None) or self._progress.looking(request)
        try:
            while True:
                next(steps)
                if over is not None and over():
                    self._begun[request.rid] = steps
                    return False, None, None
        except StopIteration as end:
            return True, end.value, None
        except RuntimeFault as fault:
            return True, None, fault
        except Exception as error:  # noqa: BLE001 - it is this request's answer
            return True, None, defect("the grammar failed", error)

    def settle(self, request: Request) -> None:
        """The row of a request that changed meanwhile was computed: keep of its KV what is still true, and
        is not wanted again for what follows it."""
        keep = min(request.sound, request.computed, len(request.tokens) - (request.ending is None))
        request.sound = -1
        shrink(self._manager, request, keep)
