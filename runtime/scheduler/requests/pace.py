"""Pace: what one more token costs in a pass, from what passes took. Knows numbers only.

A pass of n tokens takes about base + each * n. Where reading the weights is what takes the time, `each` is
small against `base`, and guesses are nearly free; where many requests run, each token costs its share, and a
guess must be right as often as that.
"""

from __future__ import annotations

KEPT = 0.98  # of what was seen, from pass to pass
SPREAD = 0.5  # variance of token counts below which nothing is learnt about `each`
OUTLIER = 4.0  # a pass that took so many times what was expected was held up by something else


class Pace:
    def __init__(self) -> None:
        self._weight = self._n = self._t = self._nn = self._nt = 0.0
        self._ratio = 0.0  # each / base

    def observe(self, tokens: int, seconds: float) -> None:
        """A pass that computed no prompts. 0 seconds: not measured."""
        if seconds <= 0:
            return
        if self._weight > 8 and seconds > OUTLIER * self._t / self._weight:
            return
        self._weight = KEPT * self._weight + 1
        self._n = KEPT * self._n + tokens
        self._t = KEPT * self._t + seconds
        self._nn = KEPT * self._nn + tokens * tokens
        self._nt = KEPT * self._nt + tokens * seconds
        mean_n, mean_t = self._n / self._weight, self._t / self._weight
        variance = self._nn / self._weight - mean_n * mean_n
        if self._weight > 4 and variance > SPREAD:
            each = max(0.0, (self._nt / self._weight - mean_n * mean_t) / variance)
            base = mean_t - each * mean_n
            self._ratio = each / base if base > 0.01 * mean_t else each / (0.01 * mean_t)

    def price(self, rows: int) -> float:
        """Which share of a token's own time in a pass of `rows` tokens one more takes: how often a guess must
        be right to gain anything. 0 as long as nothing is known."""
        cost = self._ratio * rows
        return cost / (1.0 + cost)
