"""Requests that need a matcher before they can run: their constraint compiled, asleep while the model
reasons, and what is forced from the start appended. Knows no slots and no plans.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future

from runtime.grammar.base import Matcher
from runtime.grammar.reasoner import Reasoning
from runtime.protocol.errors import BadRequest, RuntimeFault
from runtime.scheduler.guided.advance import Progress
from runtime.scheduler.queues import GrammarQueue
from runtime.scheduler.request import Request, defect


class Constrained:
    """`reasoning`: how the model ends its reasoning; None where that is not known."""

    def __init__(self, queue: GrammarQueue, progress: Progress, reasoning: Reasoning | None) -> None:
        self._queue, self._progress, self._reasoning = queue, progress, reasoning

    def add(self, request: Request) -> bool:
        """Whether the request waits here now; otherwise it needs no matcher."""
        source = request.source
        if source.constraint is not None:
            self._queue.add(request, source.constraint)
            return True
        if not source.require_reasoning or source.max_thinking_tokens is None:
            return False
        made: Future[Matcher] = Future()
        try:
            made.set_result(self._known().anything())
        except RuntimeFault as fault:
            made.set_exception(fault)
        self._queue.put(request, made)
        return True

    def ready(self) -> Iterator[tuple[Request, RuntimeFault | None]]:
        """Those that can run now, or what is wrong with them."""
        for request, outcome in self._queue.ready():
            if isinstance(outcome, RuntimeFault):
                yield request, outcome
                continue
            began = time.thread_time()
            try:
                self._begin(request, outcome)
            except RuntimeFault as fault:
                yield request, fault
            except Exception as error:  # noqa: BLE001 - it is this request's answer
                yield request, defect("the grammar failed", error)
            else:
                request.grammar_s = time.thread_time() - began
                yield request, None

    def _begin(self, request: Request, matcher: Matcher) -> None:
        source = request.source
        if source.constraint is not None:
            request.origin = matcher.origin
        if source.require_reasoning:
            matcher = self._known().wrap(
                matcher, thinking=True, max_thinking_tokens=source.max_thinking_tokens
            )
        request.matcher = matcher
        reason = self._progress.begin(request)
        if reason is not None:
            request.end(reason)

    def _known(self) -> Reasoning:
        if self._reasoning is None:
            raise BadRequest("it is not known how this model ends its reasoning", where="require_reasoning")
        return self._reasoning
