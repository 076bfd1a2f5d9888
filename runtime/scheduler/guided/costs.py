"""What following a request's constraint costs, in CPU seconds of the scheduler's thread. Limits nothing."""

from __future__ import annotations

import time

from runtime.scheduler.requests.request import Request


class Costs:
    """Shares the CPU time of a piece of work out among the requests it was done for, by the clock: a thread's
    own time is dear to ask for."""

    def __init__(self) -> None:
        self._cpu, self._at = time.thread_time(), time.perf_counter()
        self._taken: list[tuple[Request, float]] = []

    @property
    def any(self) -> bool:
        """Whether anything was done."""
        return bool(self._taken)

    def took(self, request: Request) -> None:
        """What was done since the last call was done for `request`."""
        now = time.perf_counter()
        self._taken.append((request, now - self._at))
        self._at = now

    def charge(self) -> None:
        whole = sum([seconds for _, seconds in self._taken])
        if whole > 0:
            share = (time.thread_time() - self._cpu) / whole
            for request, seconds in self._taken:
                if request.guide is not None:
                    request.guide.seconds += seconds * share
