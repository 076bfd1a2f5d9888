"""PromptLookup: what followed the same tokens earlier in one text. Knows tokens only.

Prompt look-up decoding (Saxena, 2023): text that repeats its prompt or itself is guessed well by copying.
Places are found as LZ77 compressors find them, by chains of places that share their first few tokens.
"""

from __future__ import annotations

from array import array
from itertools import cycle, islice

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
