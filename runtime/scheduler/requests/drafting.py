"""Drafting: what speculation knows of one request, and how its guesses have done. PromptLookup: what followed
the same tokens earlier in one text.

Prompt look-up decoding (Saxena, 2023): text that repeats its prompt or itself is guessed well by copying.
Earlier occurrences are found as in LZ77 compressors, by chains of positions that share their first few
tokens.
"""

from __future__ import annotations

from array import array
from itertools import cycle, islice

from runtime.protocol.io_struct import SpecFigures

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


TRIES = 8
"""Earlier places that are compared for one guess, at most."""


class PromptLookup:
    """Follows one text that grows, and may be cut back. `shortest`, `longest`: tokens that must, and may,
    agree."""

    __slots__ = ("_before", "_last", "_longest", "_shortest", "_size")

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        self._last: dict[bytes, int] = {}  # tokens -> how many came before and with them, the last time
        self._before: list[int] = []  # the same of the time before, by that number
        self._size = 0  # tokens that were looked at

    def guess(self, tokens: array[int], most: int) -> tuple[tuple[int, ...], int]:
        """At most `most` tokens that may follow `tokens`: those that followed the longest earlier match of
        their end, the latest of several; and how many tokens agreed. A match that runs up to the end goes on
        in a circle."""
        end = len(tokens)
        self._follow(tokens)
        if end < self._shortest:
            return (), 0
        place = self._before[end]
        best, found = 0, -1
        for _ in range(TRIES):
            # What was cut back may have left places behind that are other tokens now.
            if place < self._shortest:
                break
            if place < end:
                size = self._agreeing(tokens, place, end)
                if size > best:
                    best, found = size, place
                    if size >= self._longest:
                        break
            place = self._before[place]
        if best < self._shortest:
            return (), 0
        return tuple(islice(cycle(tokens[found : min(end, found + most)]), most)), best

    def _agreeing(self, tokens: array[int], place: int, end: int) -> int:
        """How many tokens before `place` are those before `end`."""
        size, most = 0, min(self._longest, place)
        while size < most and tokens[place - 1 - size] == tokens[end - 1 - size]:
            size += 1
        return size

    def _follow(self, tokens: array[int]) -> None:
        """Look at the tokens that are new. Those of a text that was cut back are forgotten as far as they are
        in the way: what is found is compared in any case."""
        end, size, last, before = len(tokens), self._shortest, self._last, self._before
        if end < self._size:
            del before[end + 1 :]
        for place in range(len(before), end + 1):
            earlier = 0
            if place >= size:
                key = tokens[place - size : place].tobytes()
                earlier = last.get(key, 0)
                last[key] = place
            before.append(earlier if earlier < place else 0)
        self._size = end
