"""Matcher and GrammarBackend: what the scheduler knows of constrained decoding.

Byte-level: a matcher follows the bytes of the output. It does not know the prompt, the model or any tensor.
"""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

from runtime.grammar.completion import (
    PAUSE,
    Found,
    Steps,
    at_once,
    follows,
    search,
    searching,
    spelling,
    written,
)
from runtime.grammar.masks.token_bits import first_bytes
from runtime.plan import TokenMask
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import RuntimeFault
from runtime.protocol.vocabulary import Vocabulary


@dataclass(frozen=True)
class Origin:
    """Who keeps a constraint, and how: what meta_info tells about it.

    backend   name of the grammar backend
    checked   the keywords that the backend's own language does not hold, each with its place in the schema; a
              validator checks values against them as they close. () = the language is exact
    ignored   what the constraint says and its standard calls a mere annotation (a `format` nobody knows)
    narrowed  what the constraint allows and this language does not offer (outlines, xgrammar, for schemas)
    why       why this backend, where several could
    compile_s seconds its compilation took, whoever asked for it; cached: it was ready when asked for
    shortest  the shortest whole output that was found when it was compiled, as ids without eos; searched:
              whether one was looked for. completion: looks for one when it is needed
    literals  characters that its text spells, which a search for a completion tries early
    """

    backend: str
    checked: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    why: str = ""
    compile_s: float = 0.0
    cached: bool = False
    shortest: tuple[int, ...] | None = None
    searched: bool = False
    narrowed: tuple[str, ...] = ()
    completion: Completion | None = field(default=None, compare=False, repr=False)
    examples: Callable[[], Iterator[Any]] | None = field(default=None, compare=False, repr=False)
    literals: str = field(default="", compare=False, repr=False)

    @property
    def exact(self) -> bool:
        return not self.checked


@dataclass(frozen=True)
class Rejection:
    """What was matched so far cannot become a valid whole any more, or no allowed token leads on.

    back    how many of the last successful steps to undo: Matcher.retract() does it, and the scheduler takes
            the same steps back from the output and the KV. The matcher then forbids the token it had taken
            there, so the next mask offers something else, or the next Rejection goes further back. Steps of
            forced text, and tokens that were the only ones allowed, are no choices and are passed over.
            0 = there was no choice on the whole way: the generation has failed.
    reason  for people: which keyword of the constraint failed, where
    """

    back: int
    reason: str


class Matcher(ABC):
    """The state of one constrained generation. Cheap to copy; the compiled part is shared and never
    changes."""

    origin: Origin = Origin("unknown")
    """Set by the backend that made the matcher; copies keep it."""

    vocabulary: Vocabulary | None = None
    """Whose ids it takes; None: it does not tell, and no completion can be searched for."""

    @abstractmethod
    def advance(self, token: int) -> bool:
        """Follow one token. False, and no change, if it is not allowed. An eos id is allowed where
        may_stop()."""

    @abstractmethod
    def advance_bytes(self, data: bytes) -> bool:
        """Follow raw bytes (forced text). False, and no change, if they are not allowed."""

    @abstractmethod
    def mask(self) -> TokenMask:
        """The ids allowed now, eos included where may_stop(). The arrays are shared: read only."""

    @abstractmethod
    def forced_bytes(self) -> bytes:
        """The longest unique byte path from here, b"" when there is a choice (stopping counts as one)."""

    def likely_bytes(self) -> bytes:
        """Where there is a choice, what is likely to lead to an end: a search for a completion tries it."""
        return b""

    def next_bytes(self) -> frozenset[int]:
        """The bytes that allowed text may go on with: the first ones of the texts of the ids in mask()."""
        if self.vocabulary is not None:
            return first_bytes(self.mask(), self.vocabulary)
        return frozenset(byte for byte in range(256) if self.copy().advance_bytes(bytes((byte,))))

    @abstractmethod
    def may_stop(self) -> bool:
        """Whether what was matched so far is a whole match."""

    @abstractmethod
    def is_terminated(self) -> bool:
        """Whether nothing can follow: an eos was taken, or a whole match allows no further byte."""

    @abstractmethod
    def rollback(self, steps: int) -> None:
        """Undo the last `steps` successful advance/advance_bytes calls."""

    @abstractmethod
    def copy(self) -> Matcher:
        """An independent matcher in the same state."""

    def verdict(self) -> Rejection | None:
        """None while a valid whole can still come of this. Otherwise how far to go back.

        Only matchers of a superset (`not origin.exact`) ever reject, when their mask is empty: every token
        that the wider language allows would close a value that the validator refuses. Ask where
        mask() is empty, then call `retract(rejection)` and undo the same steps elsewhere; after a number of
        rejections that the caller bounds, the generation ends with an error that tells the reason.
        """
        return None

    def retract(self, rejection: Rejection) -> None:
        """Undo `rejection.back` steps and forbid, at the place come to, the first of the steps undone."""
        raise ValueError(f"nothing was rejected: {rejection.reason}")

    def footprint(self) -> int:
        """Bytes that the compiled part takes, roughly, beside what all constraints share: for bounding how
        many are kept."""
        return 1 << 16

    def undoable(self) -> int:
        """How many of the last steps a later Rejection can come to undo; 0 for an exact language."""
        return 0

    def closing(self, limit: int) -> tuple[int, ...] | None:
        """A short sequence of at most `limit` ids that leads from here to where may_stop(); no eos is among
        them. () where may_stop() already. None: none was found, though there may be one.

        Changes nothing.
        """
        return at_once(self.closing_steps(limit))

    def closing_steps(self, limit: int) -> Steps[tuple[int, ...] | None]:
        """closing() in pieces, between which the matcher stays as it is. Here: a bounded search over copies
        (runtime.grammar.completion)."""
        if self.may_stop():
            return ()
        if self.vocabulary is None:
            return None
        return (yield from searching(self, self.vocabulary, limit, literals=self.origin.literals)).ids


class Linked(Protocol):
    """A step that knows the one before it."""

    @property
    def before(self) -> Any: ...


Link = TypeVar("Link", bound=Linked)


def last_steps(last: Link | None, count: int) -> Iterator[Link]:
    """The last `count` steps of a matcher, the latest first. Raises ValueError where there are fewer."""
    for number in range(count):
        if last is None:
            raise ValueError(f"cannot undo {count} steps: only {number} were taken")
        yield last
        last = last.before


def earliest(last: Link | None, count: int) -> Link | None:
    """The earliest of the last `count` steps; None for no steps. Raises ValueError as last_steps() does."""
    found = None
    for step in last_steps(last, count):
        found = step
    return found


FIRST_LIMIT, FIRST_WORK, FIRST_SECONDS = 4096, 256, 3.0
"""What the search for the first completion may come to: ids, places looked at, seconds."""
QUICK_WORK, QUICK_SECONDS, QUICK_IDS = 16, 0.1, 16
"""The same where it is made for every constraint: what is found with so little is short enough."""


def quick_completion(matcher: Matcher) -> Found:
    """A short whole output of a fresh matcher, or that there certainly is none, as far as a glance tells."""
    if type(matcher).closing_steps is not Matcher.closing_steps or matcher.vocabulary is None:
        return Found(None)
    if matcher.may_stop():
        return Found(())
    return search(matcher, matcher.vocabulary, QUICK_IDS, work=QUICK_WORK, seconds=QUICK_SECONDS)


class Completion:
    """The shortest whole output of a constraint that is found, looked for when somebody needs it. Shared by
    all matchers of the constraint; any thread may ask.

    `later`: does a piece of work on another thread, some time; None: it is only done by whoever waits.
    """

    def __init__(self, start: Matcher, later: Callable[[Callable[[], object]], None] | None = None) -> None:
        self._start, self._later = start, later
        self._lock = threading.Lock()
        self._asked = False
        self.ready = False
        self._ids: tuple[int, ...] | None = None

    def want(self) -> None:
        """Have it looked for: elsewhere, where that can be."""
        if self.ready or self._asked:
            return
        self._asked = True
        if self._later is None:
            self.get()
        else:
            self._later(self.get)

    def get(self) -> tuple[int, ...] | None:
        """The ids, without eos; None where none was found. Looks for them where nobody has yet."""
        with self._lock:
            return at_once(self.steps())

    def steps(self) -> Steps[tuple[int, ...] | None]:
        """get() in pieces. Waits for nobody: where others are at it too, all find the same."""
        if not self.ready:
            try:
                ids = (yield from _first_steps(self._start.copy())).ids
            except RuntimeFault:
                ids = None  # a limit of the backend was met: nothing is known
            self._ids, self.ready = ids, True
        return self._ids


def first_completion(matcher: Matcher) -> Found:
    """The shortest whole output of a fresh matcher that is found, or that there certainly is none."""
    return at_once(_first_steps(matcher))


def _first_steps(matcher: Matcher) -> Steps[Found]:
    if type(matcher).closing_steps is not Matcher.closing_steps:
        return Found((yield from matcher.closing_steps(FIRST_LIMIT)))  # it knows better than a search
    if matcher.may_stop():
        return Found(())
    if matcher.vocabulary is None:
        return Found(None)
    example = yield from _example(matcher, matcher.vocabulary)
    if example is not None:
        return Found(example)
    return (
        yield from searching(
            matcher, matcher.vocabulary, FIRST_LIMIT, work=FIRST_WORK, seconds=FIRST_SECONDS, shorten=True
        )
    )


def _example(matcher: Matcher, vocabulary: Vocabulary) -> Steps[tuple[int, ...] | None]:
    """The first of its examples that it takes, in whatever order it has their members."""
    for value in matcher.origin.examples() if matcher.origin.examples is not None else ():
        if value is PAUSE:
            yield
            continue
        for comma, colon in ((b",", b":"), (b", ", b": ")):
            yield
            separators = comma.decode(), colon.decode()
            text = json.dumps(value, ensure_ascii=False, separators=separators).encode("utf-8", "replace")
            ids = spelling(vocabulary).pieces(text)
            if ids is not None and len(ids) <= FIRST_LIMIT and follows(matcher, ids):
                return tuple(ids)
            other = written(matcher, vocabulary, value, comma, colon)
            if other is not None and len(other) <= FIRST_LIMIT:
                return other
    return None


class GrammarBackend(ABC):
    """Compiles constraints for one vocabulary."""

    name: str
    OPTIONS: ClassVar[frozenset[str]] = frozenset()
    """Names of the keyword arguments of the constructor that are settings users may give."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    @abstractmethod
    def compile(self, constraint: Constraint) -> Matcher:
        """A fresh matcher. Raises BadConstraint (cannot be compiled: where and why) or
        UnsupportedConstraint."""
