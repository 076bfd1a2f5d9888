"""Drafting: the state of speculation of one request. PromptLookup: what followed the same tokens earlier in
one text (prompt look-up decoding, Saxena, 2023), found as in LZ77 compressors by chains of positions that
share their first few tokens.
"""

from __future__ import annotations

from array import array
from itertools import cycle, islice

from runtime.protocol.io_struct import SpecFigures

PATIENCE = 16
"""Steps without a guess after many that were wrong, at most."""
SURE = 8
"""If so many tokens agree, a guess is made whatever the results of the last ones."""


class Drafting:
    """`most`: tokens guessed for one step, at most. `lookup`: in its text; None if a draft model guesses.

    hope       the share of guesses that were right lately, the latest steps counting most
    reach      how many are guessed next: twice as many after a step in which all were right, otherwise one
               more than were right
    rest       coming steps without guesses: 1, 2, 4 ... after steps in a row in which none was right
    tries      whether to guess in this step
    guesses    of a draft model, for the tokens behind the first `at` ones
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
        """Guess in this step if that is likely to pay at this price of a guess, or as a trial (`retry`)."""
        self.tries = retry or self.hope >= price

    def guess(self, tokens: array[int], most: int) -> tuple[int, ...]:
        """At most `most` tokens that may follow `tokens`."""
        if self.lookup is None:
            return self.guesses[:most] if self.at == len(tokens) else ()
        guesses, agreeing = self.lookup.guess(tokens, most)
        if self.rest and agreeing < SURE:
            self.rest -= bool(guesses)
            return ()
        return guesses

    def verified(self, drafted: int, accepted: int) -> None:
        """A step verified `drafted` tokens, and accepted so many of them."""
        self._steps += 1
        self._drafted += drafted
        self._accepted += accepted
        self._histogram[accepted] += 1
        share = min(1.0, drafted / 4)  # one guess tells little
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


TRIES = 8
"""Earlier occurrences that are compared for one guess, at most."""


class PromptLookup:
    """Follows one growing text. `shortest`, `longest`: tokens that must, and may, agree."""

    __slots__ = ("_before", "_last", "_longest", "_shortest", "_size")

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        self._last: dict[bytes, int] = {}  # tokens -> the end of their last occurrence
        self._before: list[int] = []  # by the end of an occurrence: the end of the one before
        self._size = 0  # tokens that were indexed

    def guess(self, tokens: array[int], most: int) -> tuple[tuple[int, ...], int]:
        """At most `most` tokens that may follow `tokens`: those behind the longest earlier match of their
        end, the latest of several; and how many tokens agreed. A match that overlaps the end repeats in a
        circle."""
        end = len(tokens)
        self._follow(tokens)
        if end < self._shortest:
            return (), 0
        at = self._before[end]
        longest, match = 0, -1
        for _ in range(TRIES):
            # After a cut, positions in the index may hold other tokens now.
            if at < self._shortest:
                break
            if at < end:
                size = self._agreeing(tokens, at, end)
                if size > longest:
                    longest, match = size, at
                    if size >= self._longest:
                        break
            at = self._before[at]
        if longest < self._shortest:
            return (), 0
        return tuple(islice(cycle(tokens[match : min(end, match + most)]), most)), longest

    def _agreeing(self, tokens: array[int], at: int, end: int) -> int:
        """How many tokens before `at` equal those before `end`."""
        size, most = 0, min(self._longest, at)
        while size < most and tokens[at - 1 - size] == tokens[end - 1 - size]:
            size += 1
        return size

    def _follow(self, tokens: array[int]) -> None:
        """Index the new tokens. Stale entries after a cut may stay: matches are compared in any case."""
        end, size, last, before = len(tokens), self._shortest, self._last, self._before
        if end < self._size:
            del before[end + 1 :]
        for at in range(len(before), end + 1):
            earlier = 0
            if at >= size:
                key = tokens[at - size : at].tobytes()
                earlier = last.get(key, 0)
                last[key] = at
            before.append(earlier if earlier < at else 0)
        self._size = end
