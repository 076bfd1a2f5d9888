"""Matcher and GrammarBackend: what the scheduler knows of constrained decoding. A matcher follows the bytes
of the output; it knows neither the prompt nor the model.
"""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import msgspec

from runtime.grammar.completion import (
    PAUSE,
    CompletionResult,
    Cursor,
    Steps,
    at_once,
    follows,
    search,
    searching,
    write_value,
)
from runtime.grammar.masks.token_bits import token_bits
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import BadConstraint, RuntimeFault
from runtime.protocol.vocabulary import Vocabulary


@dataclass(frozen=True)
class Origin:
    """Which backend keeps a constraint, and how; reported in meta_info.

    backend   name of the grammar backend
    checked   the keywords that the backend's own language does not keep, each with its path in the schema; a
              validator checks values against them as they close. () = the language is exact
    ignored   what has no effect by the constraint's standard (an unknown `format`, a misspelt keyword)
    narrowed  what the constraint allows and this language does not offer (outlines, xgrammar, for schemas)
    why       why this backend, if several could
    compile_s seconds its compilation took; cached: it was compiled before
    shortest  the shortest whole output found when it was compiled, as ids without eos; searched: whether one
              was looked for. completion: finds one when it is needed
    literals  characters of its text, which a search for a completion tries early
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
    """The text so far cannot become valid any more, or no token leads on.

    back    how many of the last successful steps to undo, by Matcher.retract() and in the output and KV. The
            matcher then forbids the token it took there. Forced text and tokens that were the only ones
            allowed are no choices and are passed over. 0: there was no choice, and the generation has failed
    reason  for people: which keyword of the constraint failed, and its path
    """

    back: int
    reason: str


class Matcher(Cursor):
    """The state of one constrained generation. Cheap to copy; the compiled part is shared and immutable."""

    origin: Origin = Origin("unknown")
    """Set by the backend that made the matcher; copies keep it."""

    vocabulary: Vocabulary | None = None
    """The vocabulary of its ids; None: unknown, so no completion can be searched for."""

    @abstractmethod
    def advance_bytes(self, data: bytes) -> bool:
        """Follow raw bytes (forced text). False, and no change, if they are not allowed."""

    def next_bytes(self) -> frozenset[int]:
        """The first bytes of the texts of the ids in mask()."""
        if self.vocabulary is not None:
            return token_bits(self.vocabulary).first_bytes(self.mask())
        return frozenset(byte for byte in range(256) if self.copy().advance_bytes(bytes((byte,))))

    @abstractmethod
    def is_terminated(self) -> bool:
        """Whether nothing can follow: an eos was taken, or a whole match allows no further byte."""

    @abstractmethod
    def rollback(self, steps: int) -> None:
        """Undo the last `steps` successful advance/advance_bytes calls."""

    def verdict(self) -> Rejection | None:
        """None while a valid whole can still come of this; otherwise how far to go back.

        Only matchers of a superset (`not origin.exact`) reject, when mask() is empty because every token
        would close a value that the validator refuses. The caller bounds the number of rejections.
        """
        return None

    def retract(self, rejection: Rejection) -> None:
        """Undo `rejection.back` steps and forbid the first of them."""
        raise ValueError(f"nothing was rejected: {rejection.reason}")

    def footprint(self) -> int:
        """Approximate bytes of the compiled part, beside what all constraints share."""
        return 1 << 16

    def undoable(self) -> int:
        """How many of the last steps a later Rejection may undo; 0 for an exact language."""
        return 0

    def closing(self, limit: int) -> tuple[int, ...] | None:
        """At most `limit` ids, no eos among them, that lead to may_stop(); None: none was found, though there
        may be some. Changes nothing."""
        return at_once(self.closing_steps(limit))

    def closing_steps(self, limit: int) -> Steps[tuple[int, ...] | None]:
        """closing() in pieces, between which the matcher stays as it is. Here: a bounded search over copies
        (runtime.grammar.completion)."""
        if self.may_stop():
            return ()
        if self.vocabulary is None:
            return None
        return (yield from searching(self, self.vocabulary, limit, literals=self.origin.literals)).ids


State = TypeVar("State")


class Step(NamedTuple, Generic[State]):
    """The state before a successful call, and the step before it."""

    state: State
    before: Step[State] | None


def last_steps(last: Step[State] | None, count: int) -> list[Step[State]]:
    """The last `count` steps of a matcher, the latest first. Raises ValueError if there are fewer."""
    steps: list[Step[State]] = []
    while len(steps) < count:
        if last is None:
            raise ValueError(f"cannot undo {count} steps: only {len(steps)} were taken")
        steps.append(last)
        last = last.before
    return steps


FIRST_LIMIT, FIRST_WORK, FIRST_SECONDS = 4096, 256, 3.0
"""Bounds of the search for the first completion: ids, states looked at, seconds."""
QUICK_WORK, QUICK_SECONDS, QUICK_IDS = 16, 0.1, 16
"""Bounds of the search that every constraint gets: so short a completion needs no better one."""


def quick_completion(matcher: Matcher) -> CompletionResult:
    """A short whole output of a fresh matcher, or that there certainly is none, if a quick search tells."""
    if type(matcher).closing_steps is not Matcher.closing_steps or matcher.vocabulary is None:
        return CompletionResult(None)
    if matcher.may_stop():
        return CompletionResult(())
    return search(matcher, matcher.vocabulary, QUICK_IDS, work=QUICK_WORK, seconds=QUICK_SECONDS)


class Completion:
    """The shortest whole output that is found of a constraint, searched for on demand; shared by threads.
    `later`: runs a piece of work on another thread; None: the waiting thread does it."""

    def __init__(self, start: Matcher, later: Callable[[Callable[[], object]], None] | None = None) -> None:
        self._start, self._later = start, later
        self._lock = threading.Lock()
        self._requested = False
        self.ready = False
        self._ids: tuple[int, ...] | None = None

    def want(self) -> None:
        """Start the search, on another thread if there is one."""
        if self.ready or self._requested:
            return
        self._requested = True
        if self._later is None:
            self.get()
        else:
            self._later(self.get)

    def get(self) -> tuple[int, ...] | None:
        """The ids, without eos; None if none was found. Searches if that was not done yet."""
        with self._lock:
            return at_once(self.steps())

    def steps(self) -> Steps[tuple[int, ...] | None]:
        """get() in pieces. Does not wait for other threads that search: all find the same."""
        if not self.ready:
            try:
                ids = (yield from _first_steps(self._start.copy())).ids
            except RuntimeFault:
                ids = None  # a limit of the backend was met: nothing is known
            self._ids, self.ready = ids, True
        return self._ids


def first_completion(matcher: Matcher) -> CompletionResult:
    """The shortest whole output of a fresh matcher that is found, or that there certainly is none."""
    return at_once(_first_steps(matcher))


def _first_steps(matcher: Matcher) -> Steps[CompletionResult]:
    if type(matcher).closing_steps is not Matcher.closing_steps:
        return CompletionResult((yield from matcher.closing_steps(FIRST_LIMIT)))  # better than a search
    if matcher.may_stop():
        return CompletionResult(())
    if matcher.vocabulary is None:
        return CompletionResult(None)
    example = yield from _example(matcher, matcher.vocabulary)
    if example is not None:
        return CompletionResult(example)
    return (
        yield from searching(
            matcher, matcher.vocabulary, FIRST_LIMIT, work=FIRST_WORK, seconds=FIRST_SECONDS, shorten=True
        )
    )


def _example(matcher: Matcher, vocabulary: Vocabulary) -> Steps[tuple[int, ...] | None]:
    """The first of its examples that it takes, with members in any order."""
    for value in matcher.origin.examples() if matcher.origin.examples is not None else ():
        if value is PAUSE:
            yield
            continue
        for comma, colon in ((",", ":"), (", ", ": ")):
            yield
            text = json.dumps(value, ensure_ascii=False, separators=(comma, colon)).encode("utf-8", "replace")
            ids = token_bits(vocabulary).pieces(text)
            if ids is not None and len(ids) <= FIRST_LIMIT and follows(matcher, ids):
                return tuple(ids)
            reordered = write_value(matcher, vocabulary, value, comma.encode(), colon.encode())
            if reordered is not None and len(reordered) <= FIRST_LIMIT:
                return reordered
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
        """A fresh matcher. Raises BadConstraint (where and why) or UnsupportedConstraint."""


def read_choices(spec: str) -> list[str]:
    """The options of a constraint of kind `choices`. Raises BadConstraint."""
    try:
        options = msgspec.json.decode(spec.encode("utf-8", "surrogatepass"), type=list[str])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadConstraint(f"is not a JSON list of strings: {error}", where="choices") from None
    if not options:
        raise BadConstraint("there are no options", where="choices")
    return options
