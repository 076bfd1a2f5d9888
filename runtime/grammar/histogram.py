"""Counts of durations, in the form in which monitoring systems read them. Knows no system."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

COMPILE_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
MASK_S = (2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1)


class Histogram:
    """How many durations were at most each of `bounds` (seconds, ascending), their number and their sum. One
    thread observes; others may read, and see a state of a moment ago."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def state(self) -> dict[str, Any]:
        """{"buckets": [[bound, durations up to it], ...], "count", "sum"}; the last bound is None."""
        buckets: list[list[float | int | None]] = []
        total = 0
        for bound, count in zip((*self._bounds, None), self._counts, strict=True):
            total += count
            buckets.append([bound, total])
        return {"buckets": buckets, "count": total, "sum": self._sum}
