"""Stage: the part of a request that one scheduler serves, as hooks at its ends. Stage itself serves prompts
and decoding, without another engine. The stages of runtime.disagg extend it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

from runtime.cache.manager import CacheManager
from runtime.plan import Sample
from runtime.protocol.errors import RuntimeFault
from runtime.protocol.io_struct import FinishReason, TokenizedGenerateReqInput
from runtime.scheduler.requests.request import Request
from runtime.scheduler.scheduler_base import Counters, Deadlines
from runtime.scheduler.sessions import Sessions

Settled: TypeAlias = tuple[Request, RuntimeFault | None]
"""A request whose wait has ended, and its error."""


class SchedulerParts(NamedTuple):
    """The parts of a scheduler that its stage uses."""

    manager: CacheManager
    counters: Counters
    deadlines: Deadlines[Request]
    sessions: Sessions


class Stage:
    """Called by the scheduler's thread; for each request at most once, except before_first_decode(),
    chunk_done(), offload() and restore(). No hook may block. This class counts times and tokens."""

    def __init__(self, parts: SchedulerParts) -> None:
        self.manager, self._counters, self._deadlines, self._sessions = parts

    @property
    def awaiting(self) -> bool:
        """Whether it waits for another engine: then poll() has to be called."""
        return False

    @property
    def delivered(self) -> bool:
        """Whether requests wait for admission that have their KV, and slots, already."""
        return False

    def refused(self, source: TokenizedGenerateReqInput, fault: RuntimeFault) -> None:
        """It was not accepted; an engine that waits for it should know."""

    def arrived(self, request: Request) -> None:
        """It is new, and waits. A RuntimeFault that this raises is its answer."""

    def poll(self, now: float) -> Iterable[Settled]:
        """Look at what came from other engines. Returns requests that holds() kept and that are complete now
        (None), and those that cannot continue."""
        return ()

    def before_first_decode(self, request: Request) -> bool:
        """It may be admitted now, for the first time. False: it waits, and is asked again; others are tried.
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
        """Requests admitted since the last call with KV from elsewhere; the first token, if it came."""
        return ()

    def chunk_done(self, request: Request) -> None:
        """More of its prompt has KV."""

    def prompt_done(self, request: Request, sample: Sample, now: float) -> None:
        """Its whole prompt has KV, in the cache except for a page that is not full, and `sample` is about to
        become its first token. A prefill stage takes it here, and ends the request (Request.end)."""
        request.timing.sampled(now)

    def holds(self, request: Request) -> bool:
        """It is complete. True: it leaves the batch, and keeps its slots until poll() returns it."""
        return False

    def offload(self, request: Request) -> None:
        """It is about to lose its slots, and will be admitted again."""

    def restore(self, request: Request) -> None:
        """It was admitted again, with slots for all its tokens, and `computed` of them have KV."""

    def closing(self, request: Request, reason: FinishReason) -> None:
        """It has finished, and is about to lose its slots."""

    def finished(self, request: Request, now: float) -> None:
        """It has finished or failed; its slots are free or in the cache."""
        if request.source.session_params is not None:
            self._sessions.end(request, now)
        self._counters.generated += request.produced
        self._counters.jumped += request.jumped
        if request.guide is not None:
            self._counters.rolled_back += request.guide.backtracks

    def void(self) -> Iterable[Settled]:
        """All slots are about to be dropped, also those of requests that do not run. Returns the requests
        that cannot continue without them."""
        return ()

    def state(self) -> Mapping[str, Any]:
        """Figures for Scheduler.state()."""
        return {}
