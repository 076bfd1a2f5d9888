"""AnyOrderMatcher: masks offer the properties of an object in the order of the schema, and one spelling of
each value; text that is given may have them in any order, and in any spelling that JSON has.

The further languages are wider and checked by the validator. Each is compiled when the first text leaves the
one before, and then holds for the rest of that generation. It knows none of them.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from runtime.grammar.base import Matcher, Rejection
from runtime.plan import TokenMask
from runtime.protocol.errors import BadConstraint


class Spare:
    """The matcher of the second language, made once, when first asked for. Thread-safe."""

    def __init__(self, make: Callable[[], Matcher]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._made: Matcher | None = None
        self._failed = False

    def start(self) -> Matcher | None:
        """A fresh matcher; None where the second language cannot be compiled."""
        with self._lock:
            if self._made is None and not self._failed:
                try:
                    self._made = self._make()
                except BadConstraint:
                    self._failed = True
            return None if self._made is None else self._made.copy()


class Wider(NamedTuple):
    """A further language, and what a text must hold that is to be tried in it."""

    spare: Spare
    needs: bytes = b""


def loosely(first: Matcher, wider: Sequence[Wider], texts: tuple[bytes, ...]) -> Matcher:
    """`first`, and for text it does not take the first of `wider` that does."""
    return AnyOrderMatcher(first, tuple(wider), texts) if wider else first


def _escaped(data: bytes, *, within: bool = False) -> bytes:
    """JSON lets DEL stand in a string as it is, and `\\/` for a slash, which the engine does not. within: the
    first byte is the second of an escape."""
    head = b""
    if within:
        head, data = b"u002f" if data[:1] == b"/" else data[:1], data[1:]
    if b"\\/" in data:
        data = _ESCAPE.sub(lambda found: b"\\u002f" if found[0] == b"\\/" else found[0], data)
    return head + (data.replace(b"\x7f", b"\\u007f") if b"\x7f" in data else data)


_ESCAPE = re.compile(rb"\\.", re.DOTALL)


class _Taken(NamedTuple):
    """One successful step: its bytes, and what was before."""

    data: bytes
    before: _Taken | None


class AnyOrderMatcher(Matcher):
    """`ordered` until given text leaves the order, then a matcher of one of `wider`."""

    def __init__(self, ordered: Matcher, wider: tuple[Wider, ...], texts: tuple[bytes, ...]) -> None:
        self._ordered, self._wider, self._texts = ordered, wider, texts
        self.vocabulary = self._ordered.vocabulary
        self._free: Matcher | None = None
        self._taken: _Taken | None = None
        self._steps = 0  # in all
        self._left = 0  # those before the order was left; `_free` took the text of these and one more at once
        self.origin = ordered.origin

    @property
    def _now(self) -> Matcher:
        return self._ordered if self._free is None else self._free

    def advance(self, token: int) -> bool:
        return self._now.advance(token) and self._count(self._texts[token])

    def advance_bytes(self, data: bytes) -> bool:
        if self._free is not None:
            within = b"/" in data and self._within_escape()
            return self._free.advance_bytes(_escaped(data, within=within)) and self._count(data)
        if self._ordered.advance_bytes(data):
            return self._count(data)
        if not data:
            return False
        text = _escaped(self._text() + data)
        free = self._start(text)
        try:
            if free is None or not free.advance_bytes(text):
                return False
        except BadConstraint:  # too complex to follow in any order
            return False
        self._free, self._left = free, self._steps
        self.origin = free.origin
        return self._count(data)

    def _start(self, text: bytes) -> Matcher | None:
        """A matcher of the next wider language that can be compiled and may have `text`."""
        for number, (spare, needs) in enumerate(self._wider):
            started = spare.start() if needs in text else None
            if started is not None:
                return loosely(started, self._wider[number + 1 :], self._texts)
        return None

    def _count(self, data: bytes) -> bool:
        self._steps += 1
        self._taken = _Taken(data, self._taken)
        return True

    def _within_escape(self) -> bool:
        """Whether the text ends with a backslash that begins an escape."""
        text = self._text()
        return (len(text) - len(text.rstrip(b"\\"))) % 2 == 1

    def _text(self) -> bytes:
        parts = []
        taken = self._taken
        while taken is not None:
            parts.append(taken.data)
            taken = taken.before
        return b"".join(reversed(parts))

    def mask(self) -> TokenMask:
        return self._now.mask()

    def forced_bytes(self) -> bytes:
        return self._now.forced_bytes()

    def may_stop(self) -> bool:
        return self._now.may_stop()

    def is_terminated(self) -> bool:
        return self._now.is_terminated()

    def rollback(self, steps: int) -> None:
        if steps > self._steps:
            raise ValueError(f"cannot undo {steps} steps: only {self._steps} were taken")
        to = self._steps - steps
        if self._free is not None and to > self._left:
            self._free.rollback(steps)
        else:
            own = self._steps if self._free is None else self._left
            self._ordered.rollback(own - to)
            self._free, self.origin = None, self._ordered.origin
        for _ in range(steps):
            self._taken = self._taken.before if self._taken is not None else None
        self._steps = to

    def copy(self) -> AnyOrderMatcher:
        twin = AnyOrderMatcher(self._ordered.copy(), self._wider, self._texts)
        twin._free = None if self._free is None else self._free.copy()
        twin._taken, twin._steps, twin._left, twin.origin = self._taken, self._steps, self._left, self.origin
        return twin

    def undoable(self) -> int:
        return self._now.undoable()

    def verdict(self) -> Rejection | None:
        return self._now.verdict()

    def retract(self, rejection: Rejection) -> None:
        self._now.retract(rejection)
        for _ in range(rejection.back):
            self._taken = self._taken.before if self._taken is not None else None
        self._steps -= rejection.back
