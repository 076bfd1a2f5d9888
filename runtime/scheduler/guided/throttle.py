"""Throttle: measures what constrained requests cost the free ones beside them, and lets them skip passes to
make up for it. No output depends on it: a draw depends on its seed and its step alone.

Free requests should get as far beside constrained ones as beside as many free ones. The usual time of a pass
is learned from all passes: a line through the seconds of forward passes by rows, and from passes without
masks the time of sampling a row and the time between two passes. What a pass takes beyond it is a deficit of
the constrained requests, which skip passes while it lasts, but not more than LEAST - 1 in a row.

Measured by benchmarks.grammars.mixed_load (20 free and 20 constrained requests, 2 cores, 20 rounds of each
rule): free requests generate 1.25 times as many tokens a second as with "a constrained request whose mask was
late twice skips one pass", which is no better than no rule; constrained ones 0.62 to 0.87 times as many.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.plan import StepResult

LEAST = 4
_KEPT = 0.98  # how much of what was learned is kept from one pass to the next
_SPREAD = 0.02  # of the number of rows: standard deviation by mean, below which all have the same
_LOOK = 8  # of so many passes one is skipped as long as none without masks was seen
_ENOUGH = 3.0  # passes, by weight
_ABOVE = 0.1
"""The weight of times above the line, relative to those below: the line is to be the time of undisturbed
passes. (An expectile, Newey & Powell 1987.)"""
_ALLOWED = 1.04  # usual passes that one may take: the estimate is on the low side
_CREDIT = 2.0  # usual passes of time saved that are remembered at most
_LONGEST = 4.0  # usual passes: a longer one was delayed by something else


@dataclass(slots=True)
class Pass:
    """rows: how many are in it, `masked` of them with a mask. present: requests that run, in it or not.
    computes: a prompt is computed in it, so its time is not comparable. jumps: a row has several tokens
    for another reason."""

    rows: int
    present: int
    masked: int
    computes: bool
    jumps: bool


class Throttle:
    """Times are seconds of one clock."""

    def __init__(self) -> None:
        self.deficit = 0.0
        self._last = -1.0  # when the pass before ended; < 0: there was a break
        self._sums = [0.0] * 5  # weight, rows, seconds, rows * rows, rows * seconds
        self._row = self._masked_row = self._between = -1.0
        self._skipped = self._queries = 0

    def idle(self) -> None:
        """Nothing runs now: the time until the next pass does not count."""
        self._last = -1.0

    def skip(self) -> bool:
        """Whether constrained requests skip the next pass, in which free ones run."""
        self._queries += 1
        unknown = self._row < 0 and self._queries % _LOOK == 0
        if (unknown or self.deficit > 0) and self._skipped < LEAST - 1:
            self._skipped += 1
            return True
        self._skipped = 0
        return False

    def observe(self, what: Pass, result: StepResult, now: float, *, beside: bool) -> None:
        """A pass ended at `now`, with this result. beside: constrained requests run beside free ones."""
        forward, whole = result.forward_s, result.seconds
        before, self._last = self._last, now
        if forward <= 0 or what.computes:
            return
        usual = self._usual(what.present)
        if before >= 0 and beside and usual > 0:
            elapsed = min(now - before, _LONGEST * usual)
            self.deficit = max(self.deficit + elapsed - _ALLOWED * usual, -_CREDIT * usual)
        elif not beside:
            self.deficit = 0.0
        if what.jumps:
            return
        line = self._line(what.rows)
        weight = 1.0 if forward <= line or not line else _ABOVE
        for index, value in enumerate((1.0, what.rows, forward, what.rows**2, what.rows * forward)):
            self._sums[index] = _KEPT * self._sums[index] + weight * value
        if what.masked:
            self._masked_row = _blend(self._masked_row, (whole - forward) / what.rows)
        else:
            self._row = _blend(self._row, (whole - forward) / what.rows)
            if before >= 0 and now - before < 2 * whole:
                self._between = _blend(self._between, now - before - whole)

    def _usual(self, rows: int) -> float:
        """Seconds from pass to pass of so many plain rows; 0: not known yet."""
        line = self._line(rows)
        if not line or self._row < 0 or self._between < 0:
            return 0.0
        # Few rows share what sampling takes anyway; with masks it takes no less than without.
        row = self._row if self._masked_row < 0 else min(self._row, self._masked_row)
        return line + row * rows + self._between

    def _line(self, rows: int) -> float:
        """Seconds of the forward pass of so many rows; 0: not known yet."""
        weight, x, y, xx, xy = self._sums
        if weight < _ENOUGH:
            return 0.0
        spread = weight * xx - x * x
        slope = max(0.0, (weight * xy - x * y) / spread) if spread > (_SPREAD * x) ** 2 else 0.0
        return max(0.0, (y - slope * x) / weight + slope * rows)


def _blend(known: float, value: float) -> float:
    if known < 0:
        return value
    share = 0.1 * (1.0 if value < known else _ABOVE)
    return (1 - share) * known + share * value
