"""Stage: which part of a request's way one scheduler goes with it, and what happens at its ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeAlias

from runtime.plan import Sample
from runtime.protocol.errors import RuntimeFault
from runtime.protocol.io_struct import FinishReason, TokenizedGenerateReqInput
from runtime.scheduler.requests.request import Request

Settled: TypeAlias = tuple[Request, RuntimeFault | None]
"""A request whose wait is over, and what went wrong with it."""


class Stage(Protocol):
    """Called by the scheduler's thread; for each request at most once, but for before_first_decode(),
    chunk_done(), offload() and restore(). None of them may block."""

    @property
    def awaiting(self) -> bool:
        """Whether anything is awaited that comes from elsewhere: poll() wants to be called then."""
        ...

    @property
    def delivered(self) -> bool:
        """Whether requests wait to be let in that have their KV, and slots, already."""
        ...

    def refused(self, source: TokenizedGenerateReqInput, fault: RuntimeFault) -> None:
        """It never became a request: whoever waits for it elsewhere should know."""
        ...

    def arrived(self, request: Request) -> None:
        """It is new, and waits. Raises RuntimeFault: it is answered with that."""
        ...

    def poll(self, now: float) -> Iterable[Settled]:
        """Look what came from elsewhere. Those that holds() kept and that are over now (None), and those that
        cannot go on."""
        ...

    def before_first_decode(self, request: Request) -> bool:
        """It is next to be let in, for the first time. False: it waits, others go on, and it is asked again.
        Who decodes only adopts here what was computed elsewhere (cache.transfer). What it pins for longer
        than this call is out of reach of the requests that run, and they may fail for lack of it."""
        ...

    def admitted(self, request: Request, now: float) -> None:
        """It holds slots, and `cached` of its prompt's tokens have KV."""
        ...

    def first_tokens(self) -> Iterable[tuple[Request, Sample | None]]:
        """Of those admitted since it was asked last, whose KV came from elsewhere: the first token, where
        that came too."""
        ...

    def chunk_done(self, request: Request) -> None:
        """More of its prompt has KV."""
        ...

    def prompt_done(self, request: Request, sample: Sample, now: float) -> None:
        """Its whole prompt has KV, in the cache but for a page that is not full, and `sample` is about to
        be taken as its first token. Who computes prompts only takes it here, and ends the request
        (Request.end)."""
        ...

    def holds(self, request: Request) -> bool:
        """It is ready to be answered. True: it is not, it leaves the batch and keeps its slots until poll()
        gives it."""
        ...

    def offload(self, request: Request) -> None:
        """It is about to lose its slots, and will be let in again."""
        ...

    def restore(self, request: Request) -> None:
        """It was let in again, with slots for all its tokens, and `computed` of them have KV."""
        ...

    def closing(self, request: Request, reason: FinishReason) -> None:
        """It is over, and about to lose what slots it has."""
        ...

    def finished(self, request: Request, now: float) -> None:
        """It is over, however; what it held is free or in the cache."""
        ...

    def void(self) -> Iterable[Settled]:
        """All slots are about to be given up, those of requests that do not run included. Those that cannot
        go on without."""
        ...

    def state(self) -> Mapping[str, Any]:
        """Figures about it."""
        ...
