"""GapMatcher: for vocabularies in which some byte is no token by itself.

A constraint may then allow a byte that no token goes on with: the language leads on, the tokens do not. Where
the mask is empty, verdict() says how far to go back, as a checked matcher's does. It knows no backend.
"""

from __future__ import annotations

from typing import NamedTuple

from runtime.grammar.base import Matcher, Rejection, last_steps
from runtime.grammar.token_bits import TokenBits
from runtime.plan import TokenMask


def has_gaps(bits: TokenBits) -> bool:
    """Whether some byte is not a token by itself."""
    return len({data for data in bits.texts if len(data) == 1}) < 256


class _Step(NamedTuple):
    """What was before one successful call. `token` it took (None: text), `mask` then, if it was asked for,
    `forbidden` there."""

    token: int | None
    mask: TokenMask | None
    forbidden: frozenset[int]
    before: _Step | None


class GapMatcher(Matcher):
    """`inner` follows the language; steps are remembered, so that they can be taken back one by one."""

    def __init__(self, inner: Matcher, bits: TokenBits) -> None:
        self._inner, self._bits = inner, bits
        self.vocabulary = bits.vocabulary
        self._last: _Step | None = None
        self._mask: TokenMask | None = None
        self._forbidden: frozenset[int] = frozenset()
        self.origin = inner.origin

    def advance(self, token: int) -> bool:
        return token not in self._forbidden and self._inner.advance(token) and self._done(token)

    def advance_bytes(self, data: bytes) -> bool:
        return self._inner.advance_bytes(data) and self._done(None)

    def _done(self, token: int | None) -> bool:
        self._last = _Step(token, self._mask, self._forbidden, self._last)
        self._mask, self._forbidden = None, frozenset()
        return True

    def mask(self) -> TokenMask:
        if self._mask is None:
            mask = self._inner.mask()
            gone = [token for token in self._forbidden if self._bits.has(mask, token)]
            self._mask = self._bits.without(mask, gone) if gone else mask
        return self._mask

    def forced_bytes(self) -> bytes:
        return b"" if self._forbidden else self._inner.forced_bytes()

    def may_stop(self) -> bool:
        return self._inner.may_stop()

    def is_terminated(self) -> bool:
        return self._inner.is_terminated()

    def rollback(self, steps: int) -> None:
        last, mask, forbidden = self._last, self._mask, self._forbidden
        for step in last_steps(self._last, steps):
            mask, forbidden, last = step.mask, step.forbidden, step.before
        self._inner.rollback(steps)
        self._last, self._mask, self._forbidden = last, mask, forbidden

    def copy(self) -> GapMatcher:
        twin = GapMatcher(self._inner.copy(), self._bits)
        twin._last, twin._mask, twin._forbidden = self._last, self._mask, self._forbidden
        return twin

    def verdict(self) -> Rejection | None:
        if self._bits.count(self.mask()) or self.is_terminated():
            return None
        reason = "the vocabulary has no token to go on with"
        back, step = 0, self._last
        while step is not None:
            back += 1
            if step.token is not None and (step.mask is None or self._bits.count(step.mask) > 1):
                return Rejection(back, reason)
            step = step.before
        return Rejection(0, reason)

    def retract(self, rejection: Rejection) -> None:
        step = self._last
        for _ in range(rejection.back - 1):
            step = step.before if step is not None else None
        if step is None or step.token is None:
            raise ValueError(f"there is no choice {rejection.back} steps back")
        self.rollback(rejection.back)
        self._forbidden |= {step.token}
        self._mask = None

    def undoable(self) -> int:
        """Every step: nobody knows what the tokens lead to."""
        steps, step = 0, None if self.may_stop() else self._last
        while step is not None:
            steps, step = steps + 1, step.before
        return steps

    def footprint(self) -> int:
        return self._inner.footprint()
