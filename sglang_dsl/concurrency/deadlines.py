"""Deadlines of many tasks on one event loop, behind few timers. Knows no programs and no backends.

Nearly all calls end long before their deadline. A timer of its own for each (asyncio.timeout) is made, put in
order and taken back for nothing; here deadlines that fall close together share one: they are rounded up to
a 64th of the time allowed, or less, so that the timers of one length are never more than 129, whatever number
of calls there is. A call may be cut short that much later than it says, never sooner.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Callable
from typing import Any

_SHORTEST_S = 1e-3


class Deadline:
    """Of the task that began it. `expired`: it has passed, and the task was cancelled for it."""

    __slots__ = ("_before", "_due", "expired", "task")

    def __init__(self, task: asyncio.Task[Any] | None, due: set[Deadline]) -> None:
        assert task is not None
        self.task, self._due, self.expired = task, due, False
        self._before = task.cancelling()
        due.add(self)

    def end(self, error: BaseException | None) -> bool:
        """The work has ended, with `error` or without. Whether that error is this deadline's doing and nobody
        else's; the task then counts as not cancelled."""
        self._due.discard(self)
        if not self.expired:
            return False
        return self.task.uncancel() <= self._before and isinstance(error, asyncio.CancelledError)


class Deadlines:
    """Of one loop; used on its thread. `running`: what tells the task that runs on it."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        running: Callable[[asyncio.AbstractEventLoop], asyncio.Task[Any] | None] = asyncio.current_task,
    ) -> None:
        self._loop, self._running = loop, running
        self._due: dict[float, set[Deadline]] = {}

    def begin(self, limit_s: float) -> Deadline:
        """The calling task is cancelled in `limit_s` seconds, unless the deadline has ended by then."""
        grain = _grain(limit_s)
        when = math.ceil((self._loop.time() + limit_s) / grain) * grain
        due = self._due.get(when)
        if due is None:
            due = self._due[when] = set()
            self._loop.call_at(when, self._pass, when)
        return Deadline(self._running(self._loop), due)

    def _pass(self, when: float) -> None:
        for deadline in self._due.pop(when):
            deadline.expired = True
            deadline.task.cancel()


@functools.lru_cache(maxsize=64)
def _grain(limit_s: float) -> float:
    """A power of 2, between a 128th and a 64th of the limit."""
    return math.ldexp(1.0, math.frexp(max(limit_s, _SHORTEST_S))[1] - 7)
