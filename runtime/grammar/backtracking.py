"""BacktrackingMatcher: the part of a matcher that remembers each step, so that one can be taken back and
forbidden where the text has come to a dead end."""

from __future__ import annotations

from abc import abstractmethod
from typing import Generic, NamedTuple, Self, TypeVar

from runtime.grammar.base import Matcher, Rejection, earliest
from runtime.grammar.masks.token_bits import TokenBits
from runtime.plan import TokenMask

State = TypeVar("State")


class Step(NamedTuple, Generic[State]):
    """What was before one successful call. `token` it took (None: forced text), `mask` then, if it was asked
    for, `forbidden` there."""

    state: State
    token: int | None
    mask: TokenMask | None
    forbidden: frozenset[int]
    before: Step[State] | None


class BacktrackingMatcher(Matcher, Generic[State]):
    """Its subclass says what a state is, which tokens it allows, and how to go back to a state."""

    def __init__(self, bits: TokenBits) -> None:
        self._bits, self.vocabulary = bits, bits.vocabulary
        self._last: Step[State] | None = None
        self._mask: TokenMask | None = None
        self._forbidden: frozenset[int] = frozenset()

    @abstractmethod
    def _allowed(self) -> TokenMask:
        """The mask of this place, whatever is forbidden here."""

    @abstractmethod
    def _return(self, state: State, steps: int) -> None:
        """Go back to `state`, which was `steps` successful calls ago."""

    def _reason(self) -> str:
        return "nothing goes on from here"

    def _done(self, state: State, token: int | None) -> bool:
        """A step was taken from `state`."""
        self._last = Step(state, token, self._mask, self._forbidden, self._last)
        self._mask, self._forbidden = None, frozenset()
        return True

    def mask(self) -> TokenMask:
        if self._mask is None:
            mask = self._allowed()
            gone = [token for token in self._forbidden if mask.allows(token)]
            self._mask = self._bits.without(mask, gone) if gone else mask
        return self._mask

    def rollback(self, steps: int) -> None:
        oldest = earliest(self._last, steps)
        if oldest is not None:
            self._return(oldest.state, steps)
            self._last, self._mask, self._forbidden = oldest.before, oldest.mask, oldest.forbidden

    def _carry_over(self, twin: Self) -> Self:
        """A copy, with the steps of this one."""
        twin._last, twin._mask, twin._forbidden, twin.origin = (
            self._last, self._mask, self._forbidden, self.origin,
        )  # fmt: skip
        return twin

    def verdict(self) -> Rejection | None:
        if self._bits.count(self.mask()) or self.is_terminated():
            return None
        back, step = 0, self._last
        while step is not None:
            back += 1
            if step.token is not None and (step.mask is None or self._bits.count(step.mask) > 1):
                return Rejection(back, self._reason())
            step = step.before
        return Rejection(0, self._reason())

    def retract(self, rejection: Rejection) -> None:
        step = earliest(self._last, rejection.back)
        if step is None or step.token is None:
            raise ValueError(f"there is no choice {rejection.back} steps back")
        self.rollback(rejection.back)
        self._forbidden |= {step.token}
        self._mask = None
