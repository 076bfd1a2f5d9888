"""Prompts and decoding in one scheduler: nothing comes from elsewhere or goes there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from runtime.cache.manager import CacheManager
from runtime.plan import Sample
from runtime.protocol.errors import RuntimeFault
from runtime.protocol.io_struct import FinishReason, TokenizedGenerateReqInput
from runtime.scheduler.report import Counters
from runtime.scheduler.requests.expiry import Deadlines
from runtime.scheduler.requests.request import Request
from runtime.scheduler.sessions import Sessions
from runtime.scheduler.stages.base import Settled, Stage


class Unified(Stage):
    """Keeps the account of times and tokens; other stages extend it."""

    def __init__(
        self, manager: CacheManager, counters: Counters, deadlines: Deadlines[Request], sessions: Sessions
    ) -> None:
        self.manager = manager
        self._counters, self._deadlines, self._sessions = counters, deadlines, sessions

    @property
    def awaiting(self) -> bool:
        return False

    @property
    def delivered(self) -> bool:
        return False

    def refused(self, source: TokenizedGenerateReqInput, fault: RuntimeFault) -> None:
        return

    def arrived(self, request: Request) -> None:
        return

    def poll(self, now: float) -> Iterable[Settled]:
        return ()

    def before_first_decode(self, request: Request) -> bool:
        return True

    def admitted(self, request: Request, now: float) -> None:
        request.timing.admitted(now)
        self._counters.prompt_tokens += request.prompt_len
        self._counters.cached += request.cached
        self._deadlines.admitted(request, now)

    def first_tokens(self) -> Iterable[tuple[Request, Sample | None]]:
        return ()

    def chunk_done(self, request: Request) -> None:
        return

    def prompt_done(self, request: Request, sample: Sample, now: float) -> None:
        request.timing.sampled(now)

    def holds(self, request: Request) -> bool:
        return False

    def offload(self, request: Request) -> None:
        return

    def restore(self, request: Request) -> None:
        return

    def closing(self, request: Request, reason: FinishReason) -> None:
        return

    def finished(self, request: Request, now: float) -> None:
        if request.source.session_params is not None:
            self._sessions.end(request, now)
        self._counters.generated += request.produced
        self._counters.jumped += request.jumped
        if request.guide is not None:
            self._counters.rolled_back += request.guide.backtracks

    def void(self) -> Iterable[Settled]:
        return ()

    def state(self) -> Mapping[str, Any]:
        return {}
