"""Stage: which part of a request's way one scheduler goes with it, and what happens at its ends."""

from __future__ import annotations

from typing import Protocol

from runtime.scheduler.requests.request import Request


class Stage(Protocol):
    """Called by the scheduler's thread, for each request at most once but for before_first_decode(). None of
    them may block."""

    def before_first_decode(self, request: Request) -> bool:
        """It is next to be let in, for the first time. False: it waits, others go on, and it is asked again.
        Who decodes only adopts here what was computed elsewhere (cache.transfer). What it pins for longer
        than this call is out of reach of the requests that run, and they may fail for lack of it."""
        ...

    def admitted(self, request: Request, now: float) -> None:
        """It holds slots, and `cached` of its prompt's tokens have KV."""
        ...

    def prompt_done(self, request: Request, now: float) -> None:
        """Its whole prompt has KV, in the cache but for a page that is not full, and its first token is about
        to be taken. Who computes prompts only exports them here, and ends the request (Request.end)."""
        ...

    def finished(self, request: Request, now: float) -> None:
        """It is over, however; what it held is free or in the cache."""
        ...
