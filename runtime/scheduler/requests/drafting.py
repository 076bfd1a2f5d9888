"""Drafting: what speculation knows of one request, and how its guesses have done."""

from __future__ import annotations

from array import array

from runtime.protocol.io_struct import SpecFigures
from runtime.scheduler.requests.lookup import PromptLookup

PATIENCE = 16
"""Steps without a guess after many that were wrong, at most."""
SURE = 8
"""So many tokens that came before: a guess is made whatever the last ones were like."""


class Drafting:
    """`most`: tokens guessed for one step, at most. `lookup`: of its own text; None where a model guesses.

    hope       how often guesses were right lately, those of the latest steps counting most
    reach      how many are guessed next: twice as many after a step in which all were right, otherwise one
               more than were right
    rest       steps to come without guesses: 1, 2, 4 ... after steps in a row in which none was right
    tries      whether guesses are made for this step
    guesses    a draft model's, of what follows the first `at` tokens
    """

    __slots__ = (
        "_accepted", "_drafted", "_histogram", "_misses", "_most", "_steps", "at", "guesses", "hope",
        "lookup", "reach", "rest", "tries",
    )  # fmt: skip

    def __init__(self, most: int, lookup: PromptLookup | None) -> None:
        self._most, self.lookup = most, lookup
        self.reach = min(most, 4)
        self.hope, self.tries = 0.7, True
        self.rest = self._misses = 0
        self.guesses: tuple[int, ...] = ()
        self.at = -1
        self._steps = self._accepted = self._drafted = 0
        self._histogram = [0] * (most + 1)

    def weigh(self, price: float, retry: bool) -> None:
        """Whether to guess in this step: where that is likely to gain, a guess costing `price`, and to look
        again (`retry`)."""
        self.tries = retry or self.hope >= price

    def guess(self, tokens: array[int], most: int) -> tuple[int, ...]:
        """At most `most` tokens that may follow `tokens`."""
        if self.lookup is None:
            return self.guesses[:most] if self.at == len(tokens) else ()
        found, agreeing = self.lookup.guess(tokens, most)
        if self.rest and agreeing < SURE:
            self.rest -= bool(found)
            return ()
        return found

    def verified(self, drafted: int, accepted: int) -> None:
        """A step verified `drafted` tokens, and `accepted` of them are the request's now."""
        self._steps += 1
        self._drafted += drafted
        self._accepted += accepted
        self._histogram[accepted] += 1
        share = min(1.0, drafted / 4)  # of one guess little is learnt
        self.hope += 0.4 * share * (accepted / drafted - self.hope)
        if accepted:
            self._misses = 0
            self.reach = min(self._most, 2 * self.reach if accepted == drafted else accepted + 1)
        else:
            self.rest = min(PATIENCE, (1 << self._misses) - 1)
            self._misses += 1
            self.reach = max(1, self.reach // 2)

    def figures(self) -> SpecFigures | None:
        """None where nothing was verified."""
        if not self._steps:
            return None
        return SpecFigures(self._steps, self._accepted, self._drafted, list(self._histogram))

    @property
    def totals(self) -> tuple[int, int, int]:
        """Steps, tokens that were accepted in them, tokens that were verified."""
        return self._steps, self._accepted, self._drafted
