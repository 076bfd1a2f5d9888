"""Prompts and decoding in one scheduler: nothing comes from elsewhere or goes there."""

from __future__ import annotations

from runtime.cache.manager import CacheManager
from runtime.scheduler.report import Counters
from runtime.scheduler.requests.expiry import Deadlines
from runtime.scheduler.requests.request import Request
from runtime.scheduler.sessions import Sessions
from runtime.scheduler.stages.base import Stage


class Unified(Stage):
    """Keeps the account of times and tokens; other stages extend it."""

    def __init__(
        self, manager: CacheManager, counters: Counters, deadlines: Deadlines, sessions: Sessions
    ) -> None:
        self.manager = manager
        self._counters, self._deadlines, self._sessions = counters, deadlines, sessions

    def before_first_decode(self, request: Request) -> bool:
        return True

    def admitted(self, request: Request, now: float) -> None:
        request.timing.admitted(now)
        self._counters.prompt_tokens += request.prompt_len
        self._counters.cached += request.cached
        self._deadlines.admitted(request, now)

    def prompt_done(self, request: Request, now: float) -> None:
        request.timing.sampled(now)

    def finished(self, request: Request, now: float) -> None:
        if request.source.session_params is not None:
            self._sessions.end(request, now)
        self._counters.generated += request.produced
        self._counters.jumped += request.jumped
        if request.guide is not None:
            self._counters.rolled_back += request.guide.backtracks
