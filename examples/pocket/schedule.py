"""How the learning rate falls, when a run ends, and what it trains more of.

A run is one long round and then short ones, while there is time, until held-out figures reach the targets.
In a round the learning rate falls to nearly nothing: over the second half of the first, over the whole of
the others. Knows figures and clocks, nothing of models.
"""

from __future__ import annotations

from examples.pocket.items import TARGETS

__all__ = ["Schedule", "adapted"]

_LOWEST = 0.02
# The first round ends after this part of the time, however few tokens were seen.
_FIRST = 0.75
# Later rounds: their learning-rate factor and their length, as a part of the first one's tokens.
_AGAIN, _SHORT = 0.6, 0.2
# The tasks that a part of the mix teaches, where they are not called alike.
_TEACHES = {
    "doc_tools": ("tool_call", "tool_answer"),
    "doc_sums": ("arithmetic",),
    "doc_copies": ("extract",),
    "doc_styles": ("facts",),
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
        factors[kind] = 0.6 + 6 * max(missing) if missing else 0.0
    taught = [factor for factor in factors.values() if factor]
    mean = sum(taught) / len(taught)
    return {kind: mix[kind] * min(2.0, (factors[kind] or mean) / mean) for kind in mix}


class Schedule:
    """`rate` gives the learning-rate factor of a step, `judge` reads the figures of a check."""

    def __init__(self, minutes: float, tokens: int, warmup: int, short: bool = False) -> None:
        """`tokens` of the first round; `short`: begin with a short round, from weights that are trained."""
        self.minutes, self.tokens, self.warmup = minutes, tokens, warmup
        self._high, self._flat, self._until = 1.0, 0.5, _FIRST * minutes
        self._began, self._length = (0, 0.0), tokens
        if short:
            self._next(0, 0.0)

    def _next(self, tokens: int, minutes: float) -> None:
        self._high, self._flat, self._until = _AGAIN, 0.0, self.minutes
        self._began, self._length = (tokens, minutes), max(1, int(_SHORT * self.tokens))

    def progress(self, tokens: int, minutes: float) -> float:
        """How much of the round is over, by tokens or by the clock, whichever says more."""
        seen, spent = tokens - self._began[0], minutes - self._began[1]
        return min(1.0, max(seen / self._length, spent / max(0.01, self._until - self._began[1])))

    def rate(self, step: int, tokens: int, minutes: float) -> float:
        """The factor on the learning rates for this step."""
        left = (1.0 - self.progress(tokens, minutes)) / (1.0 - self._flat)
        return self._high * min(1.0, (step + 1) / max(1, self.warmup)) * max(_LOWEST, min(1.0, left))

    def judge(self, figures: dict[str, float], tokens: int, minutes: float) -> bool:
        """Whether the run is over, asked at the end of a round; if not, the next round begins."""
        reached = all(figures[task] >= target for task, target in TARGETS.items())
        if reached or minutes >= self.minutes:
            return True
        self._next(tokens, minutes)
        return False
