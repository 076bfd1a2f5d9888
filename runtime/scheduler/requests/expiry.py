"""Deadlines: which requests have had their time. Knows no queues and no slots.

A request brings the time that it has left; that passes whatever happens. The limits on queueing and running
count only while the scheduler is not paused.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from typing import Generic

from runtime.protocol.errors import DeadlineExceeded
from runtime.scheduler.requests.request import R

_Entry = tuple[float, int, str]  # (when, seq, rid)


class Deadlines(Generic[R]):
    """Times are seconds of the scheduler's clock. `queue_s`: from a request's coming to its first admission;
    `running_s`: from there to its end; None: no limit."""

    def __init__(self, queue_s: float | None, running_s: float | None) -> None:
        self._queue_s, self._running_s = queue_s, running_s
        self._own: list[_Entry] = []
        self._queued: list[_Entry] = []
        self._running: list[_Entry] = []
        self._stood_still = 0.0  # how long the scheduler was paused in all
        self._paused_at: float | None = None

    def came(self, request: R, now: float) -> None:
        if request.source.time_left_s is not None:
            heapq.heappush(self._own, (now + request.source.time_left_s, request.seq, request.rid))
        if self._queue_s is not None:
            when = self._counted(now) + self._queue_s
            heapq.heappush(self._queued, (when, request.seq, request.rid))

    def admitted(self, request: R, now: float) -> None:
        """For the first time."""
        if self._running_s is not None:
            when = self._counted(now) + self._running_s
            heapq.heappush(self._running, (when, request.seq, request.rid))

    def pause(self, now: float) -> None:
        if self._paused_at is None:
            self._paused_at = now

    def resume(self, now: float) -> None:
        if self._paused_at is not None:
            self._stood_still += now - self._paused_at
            self._paused_at = None

    def due(self, now: float, live: Mapping[str, R]) -> Iterator[tuple[R, DeadlineExceeded]]:
        """The live requests whose time is over by `now`, each once, with what to tell them."""
        if not (self._own or self._queued or self._running):
            return
        counted = self._counted(now)
        for heap, at, what in (
            (self._own, now, "not finished in the time it was given"),
            (self._queued, counted, f"not let in within {self._queue_s} s"),
            (self._running, counted, f"not finished within {self._running_s} s of running"),
        ):
            while heap and heap[0][0] <= at:
                _, seq, rid = heapq.heappop(heap)
                request = live.get(rid)
                if request is None or request.seq != seq or (heap is self._queued and request.cached >= 0):
                    continue
                since = f"{now - request.timing.added_at:.1f} s after it came"
                text = f"{what}: {since}{request.progress}"
                hint = "try again later" if request.cached < 0 else "allow more time, or ask for fewer tokens"
                yield request, DeadlineExceeded(text, where=rid, hint=hint)

    def _counted(self, now: float) -> float:
        return (now if self._paused_at is None else self._paused_at) - self._stood_still
