"""SchedulerBase: what every scheduler does with its requests besides computing them. It counts and answers
them, ends those that are cancelled or late, pauses, and takes new settings.

Scheduler (generations) and EmbeddingScheduler (texts for an encoder) extend it. Knows no slots and no plans.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, TypeVar

from runtime.config.scheduler import TUNABLE, SchedulerConfig
from runtime.protocol.control import PauseMode
from runtime.protocol.errors import Aborted, DeadlineExceeded, RuntimeFault
from runtime.protocol.io_struct import FinishReason, TokenOutput
from runtime.scheduler.outbox import Outbox
from runtime.scheduler.report import Counters
from runtime.scheduler.requests.expiry import Deadlines
from runtime.scheduler.requests.request import LiveRequest, failure, named

R = TypeVar("R", bound=LiveRequest[Any])


class SchedulerBase(ABC, Generic[R]):
    """`clock`: seconds. tunable: settings that may change while requests run."""

    tunable: ClassVar[tuple[str, ...]] = TUNABLE

    def __init__(self, config: SchedulerConfig, clock: Callable[[], float]) -> None:
        self.config, self._clock = config, clock
        self._live: dict[str, R] = {}
        self._counters = Counters()
        self._deadlines: Deadlines[R] = Deadlines(config.queue_timeout_s, config.running_timeout_s)
        self._outbox = Outbox(clock)
        self._paused: PauseMode | None = None

    @abstractmethod
    def _close(self, request: R, reason: FinishReason, *, keep: bool) -> None:
        """Free what it holds, and answer it. `keep`: what was computed is right and may stay cached."""

    def _fail(self, request: R, fault: RuntimeFault, *, keep: bool = True) -> None:
        """Answer with an error and free everything."""
        self._counters.failed += 1
        self._counters.aborted += type(fault) is Aborted
        self._counters.timed_out += type(fault) is DeadlineExceeded
        self._close(request, failure(fault), keep=keep)

    def abort(self, rid: str | None, *, prefix: bool = False, message: str | None = None) -> int:
        """Cancel the request `rid`, all whose ids begin with it (`prefix`; an empty one names none), or all
        there are (None), wherever they are; unknown ones are finished already. `message`: their error.
        What they held is freed at once, or at the commit of the step they are part of. How many that are."""
        requests = named(self._live, rid, prefix)
        for request in requests:
            self._fail(request, Aborted(message or "the request was cancelled", where=request.rid))
        return len(requests)

    def give_up(self, fault: RuntimeFault) -> list[TokenOutput]:
        """Every request ends with `fault`; what drain() gives. No result may follow."""
        for request in list(self._live.values()):
            self._fail(request, fault, keep=False)
        return self.drain()

    def drain(self) -> list[TokenOutput]:
        """Outputs not fetched yet, each once: those of the last step, and what was rejected, aborted,
        timed out or ended without a step. To be called before the next commit()."""
        return self._outbox.drain()

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished, or any output not fetched."""
        return bool(self._live or self._outbox)

    @property
    def paused(self) -> PauseMode | None:
        """How, or None."""
        return self._paused

    def pause(self, mode: PauseMode) -> None:
        """Start nothing until resume(). "abort" cancels all there are; otherwise they wait. Requests that
        come meanwhile wait (their deadlines hold; time on the clocks of queue_timeout_s and running_timeout_s
        stands still)."""
        self._paused = mode
        self._deadlines.pause(self._clock())
        if mode == "abort":
            self.abort(None, message="generation was paused")

    def resume(self) -> None:
        """Go on after pause(). Nothing happens when not paused."""
        self._paused = None
        self._deadlines.resume(self._clock())

    def tune(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Change settings while running (those of `tunable`); their values now. Raises BadRequest, and
        changes nothing, for an unknown name or a bad value."""
        self.config = self.config.tuned(values, self.tunable)
        return {name: getattr(self.config, name) for name in self.tunable}
