"""What the frontend reports to observers: one call per event of a request. Counts nothing itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from runtime.protocol.errors import RuntimeFault


@dataclass(frozen=True, slots=True)
class Begun:
    """A request that was sent to the scheduler. began: time.monotonic() seconds; labels: the client's own."""

    rid: str
    prompt_tokens: int
    stream: bool
    began: float
    labels: Mapping[str, str] = field(default_factory=dict)


class Observer(Protocol):
    """Called by the thread that reads the engine's answers, or by the caller's: every method is quick, safe
    from any thread, and raises nothing. Seconds are the frontend's."""

    def on_begin(self, request: Begun) -> None: ...

    def on_first_token(self, request: Begun, seconds: float) -> None:
        """seconds: from the beginning to the first output with a token."""
        ...

    def on_tokens(self, request: Begun, count: int, seconds: float) -> None:
        """`count` more tokens; seconds: since the output before. Not called for the first."""
        ...

    def on_finish(self, request: Begun, meta: Mapping[str, Any], seconds: float) -> None:
        """meta: the counters of the answer's meta, finish_reason and queue_time included."""
        ...

    def on_abort(self, request: Begun, fault: RuntimeFault | None, seconds: float) -> None:
        """It failed with `fault`, or (None) the caller went away."""
        ...


class Observers:
    """All of them as one."""

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        self._all = list(observers)

    def add(self, observer: Observer) -> None:
        self._all = [*self._all, observer]

    def on_begin(self, request: Begun) -> None:
        for one in self._all:
            one.on_begin(request)

    def on_first_token(self, request: Begun, seconds: float) -> None:
        for one in self._all:
            one.on_first_token(request, seconds)

    def on_tokens(self, request: Begun, count: int, seconds: float) -> None:
        for one in self._all:
            one.on_tokens(request, count, seconds)

    def on_finish(self, request: Begun, meta: Mapping[str, Any], seconds: float) -> None:
        for one in self._all:
            one.on_finish(request, meta, seconds)

    def on_abort(self, request: Begun, fault: RuntimeFault | None, seconds: float) -> None:
        for one in self._all:
            one.on_abort(request, fault, seconds)


NOBODY: Observer = Observers()
