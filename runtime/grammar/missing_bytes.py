"""MissingByteMatcher: for vocabularies in which some byte is no token by itself.

A constraint may then allow a byte that no token goes on with: the language leads on, the tokens do not. Where
the mask is empty, verdict() says how far to go back, as a checked matcher's does. It knows no backend.
"""

from __future__ import annotations

from runtime.grammar.backtracking import BacktrackingMatcher
from runtime.grammar.base import Matcher
from runtime.grammar.masks.token_bits import TokenBits
from runtime.plan import TokenMask


def lacks_bytes(bits: TokenBits) -> bool:
    """Whether some byte is not a token by itself."""
    return len({data for data in bits.texts if len(data) == 1}) < 256


class MissingByteMatcher(BacktrackingMatcher[None]):
    """`inner` follows the language; steps are remembered, so that they can be taken back one by one."""

    def __init__(self, inner: Matcher, bits: TokenBits) -> None:
        super().__init__(bits)
        self._inner, self.origin = inner, inner.origin

    def advance(self, token: int) -> bool:
        return token not in self._forbidden and self._inner.advance(token) and self._done(None, token)

    def advance_bytes(self, data: bytes) -> bool:
        return self._inner.advance_bytes(data) and self._done(None, None)

    def _allowed(self) -> TokenMask:
        return self._inner.mask()

    def _return(self, state: None, steps: int) -> None:
        self._inner.rollback(steps)

    def forced_bytes(self) -> bytes:
        return b"" if self._forbidden else self._inner.forced_bytes()

    def may_stop(self) -> bool:
        return self._inner.may_stop()

    def is_terminated(self) -> bool:
        return self._inner.is_terminated()

    def copy(self) -> MissingByteMatcher:
        return self._carry_over(MissingByteMatcher(self._inner.copy(), self._bits))

    def _reason(self) -> str:
        return "the vocabulary has no token to go on with"

    def undoable(self) -> int:
        """Every step: nobody knows what the tokens lead to."""
        steps, step = 0, None if self.may_stop() else self._last
        while step is not None:
            steps, step = steps + 1, step.before
        return steps

    def footprint(self) -> int:
        return self._inner.footprint()
