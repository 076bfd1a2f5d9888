"""Requests that need a matcher before they can run: their constraint compiled, asleep while the model
reasons, and what is forced from the start appended. Knows no slots and no plans.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from typing import Protocol

from runtime.grammar.base import Matcher
from runtime.grammar.reasoner import Reasoning
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import (
    Aborted,
    BadRequest,
    InternalFault,
    RuntimeFault,
    UnsupportedConstraint,
)
from runtime.scheduler.guided.advance import Advance
from runtime.scheduler.guided.liveness import completion_ready
from runtime.scheduler.requests.components import Guide
from runtime.scheduler.requests.request import Request, defect


class Grammars(Protocol):
    """Compiles constraints off the scheduler's thread (runtime.grammar.manager)."""

    def submit(self, constraint: Constraint) -> Future[Matcher]: ...


class Compilation:
    """Everybody else goes on meanwhile. `grammars`: None refuses constraints. `reasoning`: how the model ends
    its reasoning; None where that is not known. `liveness`: whether those that need a completion from the
    start (see there) wait for that as well."""

    def __init__(
        self, grammars: Grammars | None, advance: Advance, reasoning: Reasoning | None, *, liveness: bool
    ) -> None:
        self._grammars, self._advance, self._reasoning = grammars, advance, reasoning
        self._liveness = liveness
        self._queue: dict[int, tuple[Request, Future[Matcher]]] = {}

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, request: Request) -> bool:
        """Whether the request waits here now; otherwise it needs no matcher."""
        source = request.source
        if source.constraint is None and (not source.require_reasoning or source.max_thinking_tokens is None):
            return False
        made: Future[Matcher] = Future()
        try:
            if source.constraint is not None:
                made = self._submitted(source.constraint)
            else:
                made.set_result(self._known().anything())
        except RuntimeFault as fault:
            made.set_exception(fault)
        self._queue[request.seq] = request, made
        return True

    def remove(self, request: Request) -> None:
        """Nothing happens when it is not in."""
        found = self._queue.pop(request.seq, None)
        if found is not None:
            found[1].cancel()

    def ready(self) -> Iterator[tuple[Request, RuntimeFault | None]]:
        """Those that can run now, taken out, or what is wrong with them."""
        for request, future in list(self._queue.values()):
            if not future.done() or request.seq not in self._queue:
                continue
            outcome = _outcome(future)
            if self._liveness and isinstance(outcome, Matcher) and not completion_ready(request, outcome):
                continue
            del self._queue[request.seq]
            yield request, outcome if isinstance(outcome, RuntimeFault) else self._begun(request, outcome)

    def _begun(self, request: Request, matcher: Matcher) -> RuntimeFault | None:
        """The request has its matcher; what is wrong with it."""
        began = time.thread_time()
        guide = request.guide = Guide(matcher)
        source = request.source
        try:
            if source.constraint is not None:
                guide.origin = matcher.origin
            if source.require_reasoning:
                guide.matcher = self._known().wrap(
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

    def _submitted(self, constraint: Constraint) -> Future[Matcher]:
        if self._grammars is None:
            raise UnsupportedConstraint(
                "no grammar backend is loaded", where=constraint.kind, hint="start with a grammar backend"
            )
        return self._grammars.submit(constraint)

    def _known(self) -> Reasoning:
        if self._reasoning is None:
            raise BadRequest("it is not known how this model ends its reasoning", where="require_reasoning")
        return self._reasoning


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
