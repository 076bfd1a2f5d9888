"""Where requests are before they run: waiting for their grammar, then for a place. Knows no slots and no
plans."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from itertools import chain, islice
from typing import Protocol

from runtime.cache.base import PrefixCache
from runtime.grammar.base import Matcher
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import Aborted, InternalFault, RuntimeFault, UnsupportedConstraint
from runtime.scheduler.policies import Order
from runtime.scheduler.request import Request

WINDOW = 128  # requests a policy orders at a time, the oldest first


class Grammars(Protocol):
    """Compiles constraints off the scheduler's thread (runtime.grammar.manager)."""

    def submit(self, constraint: Constraint) -> Future[Matcher]: ...


class GrammarQueue:
    """Requests whose grammar is being compiled; everybody else goes on meanwhile."""

    def __init__(self, grammars: Grammars | None) -> None:
        self._grammars = grammars
        self._queue: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, request: Request, constraint: Constraint) -> None:
        request.future = Future()
        self._queue[request.seq] = request
        if self._grammars is None:
            request.future.set_exception(
                UnsupportedConstraint(
                    "no grammar backend is loaded", where=constraint.kind, hint="start with a grammar backend"
                )
            )
            return
        try:
            request.future = self._grammars.submit(constraint)
        except RuntimeFault as fault:
            request.future.set_exception(fault)

    def ready(self) -> Iterator[tuple[Request, Matcher | RuntimeFault]]:
        """Those that need wait no longer, taken out: with their matcher, or with why there is none."""
        for request in list(self._queue.values()):
            future = request.future
            if future is None or not future.done():
                continue
            del self._queue[request.seq]
            yield request, _outcome(future)

    def remove(self, request: Request) -> None:
        """Nothing happens when it is not in."""
        if self._queue.pop(request.seq, None) is not None and request.future is not None:
            request.future.cancel()


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


class WaitingQueue:
    """Requests ready to run, in order of arrival; retracted ones in front of all others, whatever the
    policy."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._queue: dict[int, Request] = {}
        self._front: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self._queue) + len(self._front)

    def add(self, request: Request) -> None:
        self._queue[request.seq] = request

    def put_back(self, request: Request) -> None:
        self._front = {request.seq: request, **self._front}

    def remove(self, request: Request) -> None:
        """Nothing happens when it is not in."""
        self._queue.pop(request.seq, None)
        self._front.pop(request.seq, None)

    def order(self, cache: PrefixCache, tick: int) -> list[Request]:
        """The order in which to try them now: the policy's, over a window of the oldest."""
        window = {
            request.arrival: _Candidate(request, cache, tick)
            for request in islice(self._queue.values(), WINDOW)
        }
        ordered = [window[candidate.arrival].request for candidate in self._order(list(window.values()))]
        return list(chain(self._front.values(), ordered))


class _Candidate:
    """A waiting request as policies see it (policies.Candidate)."""

    def __init__(self, request: Request, cache: PrefixCache, tick: int) -> None:
        self.request = request
        self.arrival = request.arrival
        self.waited = tick - request.added_tick
        self.priority = request.source.priority
        self.new_tokens = request.remaining
        self._cache = cache
        self._matched = -1

    @property
    def matched(self) -> int:
        if self._matched < 0:
            request = self.request
            self._matched = self._cache.probe(request.tokens[: request.matchable], request.source.extra_key)
        return self._matched
