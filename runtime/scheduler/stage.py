"""Stage: which part of a request's way one scheduler goes with it, and what happens at its ends.

Stage itself does prompts and decoding: nothing comes from another engine or goes there. The stages of
runtime.disagg extend it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from runtime.cache.manager import CacheManager
from runtime.plan import Sample
from runtime.protocol.errors import RuntimeFault
from runtime.protocol.io_struct import FinishReason, TokenizedGenerateReqInput
from runtime.scheduler.requests.request import Request
from runtime.scheduler.scheduler_base import Counters, Deadlines
from runtime.scheduler.sessions import Sessions

Settled: TypeAlias = tuple[Request, RuntimeFault | None]
"""A request whose wait is over, and what went wrong with it."""


class Stage:
    """Called by the scheduler's thread; for each request at most once, except before_first_decode(),
    chunk_done(), offload() and restore(). None of them may block. This one keeps the account of times and
    tokens."""

    def __init__(
        self, manager: CacheManager, counters: Counters, deadlines: Deadlines[Request], sessions: Sessions
    ) -> None:
        self.manager = manager
        self._counters, self._deadlines, self._sessions = counters, deadlines, sessions

    @property
    def awaiting(self) -> bool:
        """Whether anything is awaited that comes from another engine: then poll() has to be called."""
        return False

    @property
    def delivered(self) -> bool:
        """Whether requests wait to be let in that have their KV, and slots, already."""
        return False

    def refused(self, source: TokenizedGenerateReqInput, fault: RuntimeFault) -> None:
        """It never became a request; an engine that waits for it should know."""

    def arrived(self, request: Request) -> None:
        """It is new, and waits. Raises RuntimeFault: it is answered with that."""

    def poll(self, now: float) -> Iterable[Settled]:
        """Look at what came from other engines. Returns those that holds() kept and that are over now
        (None), and those that cannot go on."""
        return ()

    def before_first_decode(self, request: Request) -> bool:
        """It is next to be let in, for the first time. False: it waits, others go on, and it is asked again.
        A decode stage only adopts here what was computed elsewhere (CacheManager.transfers). Slots that it
        pins for longer than this call are not available to the running requests, which may then fail."""
        return True

    def admitted(self, request: Request, now: float) -> None:
        """It holds slots, and `cached` of its prompt's tokens have KV."""
        request.timing.admitted(now)
        self._counters.prompt_tokens += request.prompt_len
        self._counters.cached += request.cached
        self._deadlines.admitted(request, now)

    def first_tokens(self) -> Iterable[tuple[Request, Sample | None]]:
        """The requests admitted since the last call whose KV came from another engine, and the first token
        if that came too."""
        return ()

    def chunk_done(self, request: Request) -> None:
        """More of its prompt has KV."""

    def prompt_done(self, request: Request, sample: Sample, now: float) -> None:
        """Its whole prompt has KV, in the cache but for a page that is not full, and `sample` is about to
        be taken as its first token. A prefill stage takes it here, and ends the request (Request.end)."""
        request.timing.sampled(now)

    def holds(self, request: Request) -> bool:
        """It is ready to be answered. True: it is not answered yet, leaves the batch, and keeps its slots
        until poll() returns it."""
        return False

    def offload(self, request: Request) -> None:
        """It is about to lose its slots, and will be let in again."""

    def restore(self, request: Request) -> None:
        """It was let in again, with slots for all its tokens, and `computed` of them have KV."""

    def closing(self, request: Request, reason: FinishReason) -> None:
        """It is over, and about to lose the slots it has."""

    def finished(self, request: Request, now: float) -> None:
        """It is over, however; what it held is free or in the cache."""
        if request.source.session_params is not None:
            self._sessions.end(request, now)
        self._counters.generated += request.produced
        self._counters.jumped += request.jumped
        if request.guide is not None:
            self._counters.rolled_back += request.guide.backtracks

    def void(self) -> Iterable[Settled]:
        """All slots are about to be given up, also those of requests that do not run. Returns the requests
        that cannot go on without."""
        return ()

    def state(self) -> Mapping[str, Any]:
        """Figures for Scheduler.state()."""
        return {}
