"""When to graft, to lower the learning rate and to end, and what to train more of, all by held-out figures.

The run has three parts: a plateau until every task is near its target (or most of the time is spent), a
decay of the learning rate, and an end when the figures reach the targets; otherwise shorter plateaus and
decays follow while there is time. Knows figures and clocks, nothing of models.
"""

from __future__ import annotations

from runtime.pocket.items import TARGETS

__all__ = ["Schedule", "adapted"]

_NEAR = 0.03
_FAR = 0.15
_SPENT = 0.62
_AGAIN = 0.4
_LOWEST = 0.02
# The tasks that a part of the mix teaches, where they are not called alike.
_TEACHES = {
    "doc_tools": ("tool_call", "tool_answer"),
    "doc_sums": ("arithmetic",),
    "doc_copies": ("extract",),
    "doc_completion": (),
    "repeat": (),
    "facts": ("facts", "followup"),
    "classify": ("sentiment", "topic"),
}


def adapted(mix: dict[str, float], figures: dict[str, float]) -> dict[str, float]:
    """The mix with more of what is below its target; parts without a task of their own keep their weight."""
    factors = {}
    for kind in mix:
        tasks = _TEACHES.get(kind, (kind,))
        missing = [max(0.0, min(1.0, TARGETS[task] + 0.03 - figures[task])) for task in tasks]
        factors[kind] = 0.6 + 2.4 * max(missing) if missing else 0.0
    taught = [factor for factor in factors.values() if factor]
    mean = sum(taught) / len(taught)
    return {kind: mix[kind] * min(2.0, (factors[kind] or mean) / mean) for kind in mix}


class Schedule:
    """`rate` gives the learning-rate factor of a step, `judge` reads the figures of a check."""

    def __init__(self, minutes: float, warmup: int, first: float = 1.0) -> None:
        self.minutes, self.warmup, self.high = minutes, warmup, first
        self.decay: tuple[int, int, float] | None = None
        """First step and length of the present decay, and the minutes spent when it began."""
        self._smooth: dict[str, float] = {}

    def rate(self, step: int, minutes: float) -> float:
        """The factor on the learning rates for this step, `minutes` after the start."""
        warm = min(1.0, (step + 1) / max(1, self.warmup))
        return self.high * warm * max(_LOWEST, 1.0 - self.progress(step, minutes))

    def progress(self, step: int, minutes: float) -> float:
        """How far the decay has come, 0 before it; the clock hurries it and ends it with the time."""
        if self.decay is None:
            return float(minutes >= self.minutes)
        first, length, began = self.decay
        return min(1.0, max((step - first) / length, (minutes - began) / max(0.01, self.minutes - began)))

    def _near(self) -> bool:
        """Whether all is close to its target, by figures smoothed over the checks, which have few items."""
        missing = [max(0.0, target - self._smooth[task]) for task, target in TARGETS.items()]
        return sum(missing) / len(missing) <= _NEAR and max(missing) <= _FAR

    def judge(self, figures: dict[str, float], step: int, minutes: float) -> bool:
        """Whether the run is over; begins a decay when it is time for one."""
        before = self._smooth or figures
        self._smooth = {task: (before[task] + figures[task]) / 2 for task in TARGETS}
        if self.progress(step, minutes) >= 1.0:
            if all(figures[task] >= target for task, target in TARGETS.items()) or minutes >= self.minutes:
                return True
            self.high, self.decay = _AGAIN, None
        due = self._near() or self.high < 1.0 or minutes >= _SPENT * self.minutes
        if self.decay is None and due:
            self.decay = (step, max(400, int(0.4 * step)), minutes)
        return False
