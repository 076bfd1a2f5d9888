"""CheckedMatcher: a grammar that is wider than the schema, and a validator that holds values back as they
close.

A token that would close a value its schema refuses is not in the mask, so an invalid document can never be
finished. The wider grammar may lead to a place where nothing is left in the mask; verdict() then says how
far to go back. It knows nothing of the engine behind the wider grammar.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from runtime.grammar.backtracking import BacktrackingMatcher
from runtime.grammar.base import Matcher
from runtime.grammar.json_schema.checks import tracker as at
from runtime.grammar.json_schema.checks.closing_tokens import ClosingTokenFilter
from runtime.grammar.json_schema.checks.tracker import JsonTracker
from runtime.grammar.masks.token_bits import TokenBits
from runtime.plan import TokenMask


class ClosingTokens:
    """The tokens of a vocabulary by what they may close, as packed bits. Made once for a vocabulary."""

    def __init__(self, bits: TokenBits) -> None:
        self.bits = bits
        quotes = [data.count(b'"') for data in bits.texts]
        ends = [b"]" in data or b"}" in data for data in bits.texts]
        commas = [b"," in data for data in bits.texts]
        spaces = [b" " in data or b"\n" in data or b"\r" in data or b"\t" in data for data in bits.texts]
        quoted, twice = np.array(quotes) > 0, np.array(quotes) > 1
        end, comma, space = np.array(ends), np.array(commas), np.array(spaces)
        self.string = bits.pack(quoted & (end | twice))
        self.checked_string = bits.pack(quoted)
        self.outside = bits.pack(end | comma | twice)
        self.checked_scalar = bits.pack(end | comma | twice | space)
        self.filter = ClosingTokenFilter(bits)

    def at(self, place: at.Place) -> npt.NDArray[np.uint32]:
        """The tokens that may close something at `place`."""
        if place.mode == at.NAME:
            return self.checked_string
        inside = place.frame
        differs = inside is not None and not inside.is_object and inside.obligation.unique
        if place.mode == at.STRING:
            return self.checked_string if differs or place.obligation.minds_text else self.string
        owed = differs or bool(place.obligation.places)
        return self.checked_scalar if owed and place.mode in (at.SCALAR, at.VALUE) else self.outside


class CheckedMatcher(BacktrackingMatcher[at.Place]):
    """`inner` follows the wider grammar, `tracker` the values."""

    def __init__(self, inner: Matcher, tracker: JsonTracker, closing_tokens: ClosingTokens) -> None:
        super().__init__(closing_tokens.bits)
        self._inner, self._tracker, self._closing_tokens = inner, tracker, closing_tokens
        self.origin = inner.origin

    def advance(self, token: int) -> bool:
        bits = self._bits
        if token in self._forbidden or not 0 <= token < bits.width:
            return False
        if token in bits.vocabulary.eos:
            return self.may_stop() and self._follow(token, b"", self._inner.advance(token))
        data = bits.texts[token]
        if not data or not self._inner.advance(token):
            return False
        return self._follow(token, data, True)

    def advance_bytes(self, data: bytes) -> bool:
        return self._inner.advance_bytes(data) and self._follow(None, data, True)

    def _follow(self, token: int | None, data: bytes, taken: bool) -> bool:
        """The inner matcher took a step: take it too, or take it back."""
        if not taken:
            return False
        place = self._tracker.place
        if data and not self._tracker.feed(data):
            self._inner.rollback(1)
            return False
        return self._done(place, token)

    def _allowed(self) -> TokenMask:
        wide, bits = self._inner.mask(), self._bits
        gone: list[int] = []
        if not self._tracker.complete():
            gone.extend(token for token in bits.vocabulary.eos if wide.allows(token))
            candidates = wide.bits & self._closing_tokens.at(self._tracker.place)
            gone.extend(self._closing_tokens.filter.refused(self._tracker, candidates))
        return bits.without(wide, gone) if gone else wide

    def forced_bytes(self) -> bytes:
        """Forced by the wider grammar, up to where a value would close that is refused."""
        forced = b"" if self._forbidden else self._inner.forced_bytes()
        while forced and not self._tracker.allows(forced):
            forced = forced[:-1]
        return forced

    def may_stop(self) -> bool:
        return self._inner.may_stop() and self._tracker.complete()

    def is_terminated(self) -> bool:
        return self._inner.is_terminated() and self._tracker.complete()

    def _return(self, state: at.Place, steps: int) -> None:
        self._inner.rollback(steps)
        self._tracker.restore(state)

    def copy(self) -> CheckedMatcher:
        return self._carry_over(
            CheckedMatcher(self._inner.copy(), self._tracker.copy(), self._closing_tokens)
        )

    def undoable(self) -> int:
        """The steps since the outermost open value that owes a check began, the one it began in included. No
        Rejection goes back further as long as there is a value that its schema takes."""
        unsure, count, step = self._tracker.unsure(), 0, self._last
        if unsure >= self._tracker.place.length:
            return 0
        while step is not None:
            count += 1
            if step.state.length <= unsure:
                break
            step = step.before
        return count

    def _reason(self) -> str:
        return self._tracker.fault or "no valid document goes on from here"
