"""Hooks: functions that receive an event at the begin and at the end of every call of a backend.

with hooks.subscribed(print):
    program.run(...)
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from sglang_dsl.errors import ProgramError
from sglang_dsl.ir import Source

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CallEvent:
    """One call of a backend.

    phase          "begin", "end" (meta is set) or "error" (error is set)
    number         the same in both events of a call, unique in this process
    kind, name     gen, select or tool; and the name of its variable, or of the tool
    branch         () for the program itself, (2,) for its third fork, ...
    index          the position of the item in a batch
    step           how many calls its branch had made before
    seconds        from begin to end, monotonic
    first_token_s  seconds to the first piece of a stream
    replayed       whether the answer came from a record
    run            the run of a program it belongs to: a number, unique in this process
    request        returns what was requested, in the format of a record
    reply          for an "end": the answer
    """

    phase: Literal["begin", "end", "error"]
    number: int
    program: str
    kind: str
    name: str | None
    branch: tuple[int, ...]
    step: int
    index: int | None = None
    backend: str | None = None
    source: Source | None = None
    seconds: float = 0.0
    first_token_s: float | None = None
    replayed: bool = False
    meta: Mapping[str, Any] = field(default_factory=dict)
    error: ProgramError | BaseException | None = None
    run: int = 0
    request: Callable[[], dict[str, Any]] | None = None
    reply: Callable[[], dict[str, Any]] | None = None


Hook: TypeAlias = Callable[[CallEvent], object]

TRACEPARENT: ContextVar[str | None] = ContextVar("sglang_dsl_traceparent", default=None)
"""The span of the current call, as W3C's header `traceparent`. Telemetry sets it when a call begins, and
backends send it to the bundled server."""


class Hooks:
    """The hooks of this process. They run on the language's event loop; their exceptions are logged."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.listeners: tuple[Hook, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.listeners)

    def subscribe(self, hook: Hook) -> Callable[[], None]:
        """Call `hook` for every event from now on. Returns a function that ends this."""
        with self._lock:
            self.listeners = (*self.listeners, hook)

        def end() -> None:
            with self._lock:
                listeners = list(self.listeners)
                if hook in listeners:
                    listeners.remove(hook)
                self.listeners = tuple(listeners)

        return end

    @contextmanager
    def subscribed(self, hook: Hook) -> Iterator[None]:
        """subscribe() for the duration of a block."""
        end = self.subscribe(hook)
        try:
            yield
        finally:
            end()

    def tell(self, event: CallEvent) -> None:
        """Call all hooks with an event."""
        for hook in self.listeners:
            try:
                hook(event)
            except Exception:
                log.exception("a hook failed")


hooks = Hooks()
subscribe, subscribed = hooks.subscribe, hooks.subscribed
