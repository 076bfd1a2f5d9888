"""BacktrackingMatcher remembers each step, so that one can be undone and forbidden at a dead end.
MissingByteMatcher does so for vocabularies in which some byte is no token.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Generic, NamedTuple, Self, TypeVar

from runtime.grammar.base import Matcher, Rejection, Step, last_steps
from runtime.grammar.masks.token_bits import TokenBits
from runtime.plan import TokenMask

State = TypeVar("State")


class Past(NamedTuple, Generic[State]):
    """What was before a step: the subclass's state, the `token` taken (None: forced text), the `mask` if it
    was computed, and the ids `forbidden` there."""

    state: State
    token: int | None
    mask: TokenMask | None
    forbidden: frozenset[int]


class BacktrackingMatcher(Matcher, Generic[State]):
    """Subclasses define states, which tokens they allow, and how to go back to one."""

    def __init__(self, bits: TokenBits) -> None:
        self._bits, self.vocabulary = bits, bits.vocabulary
        self._last: Step[Past[State]] | None = None
        self._mask: TokenMask | None = None
        self._forbidden: frozenset[int] = frozenset()

    @abstractmethod
    def _allowed(self) -> TokenMask:
        """The mask of the current state, forbidden ids included."""

    @abstractmethod
    def _return(self, state: State, steps: int) -> None:
        """Go back to `state`, which was `steps` successful calls ago."""

    def _reason(self) -> str:
        return "nothing goes on from here"

    def _done(self, state: State, token: int | None) -> bool:
        """Record a step from `state`."""
        self._last = Step(Past(state, token, self._mask, self._forbidden), self._last)
        self._mask, self._forbidden = None, frozenset()
        return True

    def mask(self) -> TokenMask:
        if self._mask is None:
            mask = self._allowed()
            removed = [token for token in self._forbidden if mask.allows(token)]
            self._mask = self._bits.without(mask, removed) if removed else mask
        return self._mask

    def rollback(self, steps: int) -> None:
        if steps:
            past, self._last = last_steps(self._last, steps)[-1]
            self._return(past.state, steps)
            self._mask, self._forbidden = past.mask, past.forbidden

    def _with_steps_of(self, other: Self) -> Self:
        self._last, self._mask, self._forbidden = other._last, other._mask, other._forbidden
        self.origin = other.origin
        return self

    def verdict(self) -> Rejection | None:
        if self._bits.count(self.mask()) or self.is_terminated():
            return None
        back, step = 0, self._last
        while step is not None:
            back += 1
            past, step = step
            if past.token is not None and (past.mask is None or self._bits.count(past.mask) > 1):
                return Rejection(back, self._reason())
        return Rejection(0, self._reason())

    def retract(self, rejection: Rejection) -> None:
        steps = last_steps(self._last, rejection.back)
        token = steps[-1].state.token if steps else None
        if token is None:
            raise ValueError(f"there is no choice {rejection.back} steps back")
        self.rollback(rejection.back)
        self._forbidden |= {token}
        self._mask = None


class MissingByteMatcher(BacktrackingMatcher[None]):
    """A matcher for a vocabulary that lacks bytes: `inner` may allow a byte with which no token begins. Then
    the mask is empty, and verdict() says how far to go back."""

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
        return MissingByteMatcher(self._inner.copy(), self._bits)._with_steps_of(self)

    def _reason(self) -> str:
        return "the vocabulary has no token to go on with"

    def undoable(self) -> int:
        """Every step: what the tokens lead to is unknown."""
        steps, step = 0, None if self.may_stop() else self._last
        while step is not None:
            steps, step = steps + 1, step.before
        return steps

    def footprint(self) -> int:
        return self._inner.footprint()
