"""What a run is made of, apart from the executors themselves: shared facts, the body beside the reader, the
text that forks start from, the things that wait in a queue, and how a failure gets its place."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import functools
import itertools
import threading
import traceback
import weakref
from dataclasses import dataclass, field
from typing import Any, Protocol

from sglang_dsl.backends.base import Backend
from sglang_dsl.budgets import Meter
from sglang_dsl.calls import Calls
from sglang_dsl.errors import BackendError, BadProgram, InvalidValue, ProgramCancelled, ProgramError, Timeout
from sglang_dsl.feed import Mark, Variable
from sglang_dsl.ir import Gen, Node, Sampling, Source
from sglang_dsl.record import Record
from sglang_dsl.usage import Ledger


class Member(Protocol):
    """An executor, as its run sees it."""

    def mark(self) -> Mark: ...


@dataclass(frozen=True, eq=False)
class RunInfo:
    """What all forks of one run share. `timeout`: seconds per call. `index`: the item's place in a batch.
    `inline`: whether each addition waits until it is done.
    `members`: the run's executors that still live."""

    program: str
    backend: Backend | None
    defaults: Sampling = field(default_factory=Sampling)
    timeout: float | None = None
    stream: bool = False
    seed: int | None = None
    meters: tuple[Meter, ...] = ()
    record: Record | None = None
    index: int | None = None
    inline: bool = False
    ledger: Ledger = field(default_factory=Ledger)
    members: weakref.WeakSet[Member] = field(default_factory=weakref.WeakSet)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @functools.cached_property
    def calls(self) -> Calls:
        """How its calls are made."""
        return Calls(
            self.program,
            self.backend,
            self.ledger,
            record=self.record,
            seed=self.seed,
            index=self.index,
        )

    def enter(self, member: Member) -> None:
        with self.lock:
            self.members.add(member)

    def live(self) -> list[Member]:
        with self.lock:
            return list(self.members)


_NUMBERS = itertools.count()
# The bodies that the running code is part of, by number.
_INSIDE: contextvars.ContextVar[tuple[int, ...]] = contextvars.ContextVar("sglang_dsl_inside", default=())


@dataclass(slots=True, eq=False)
class Body:
    """The user's function, where it runs beside the reader (stream). `end` is reached when it has returned
    and all it said has been done."""

    end: Mark
    done: bool = False
    error: BaseException | None = None
    number: int = field(default_factory=_NUMBERS.__next__)

    def enter(self) -> None:
        """From here on, in this context and those that come of it, the code is the body's own."""
        _INSIDE.set((*_INSIDE.get(), self.number))

    @property
    def elsewhere(self) -> bool:
        """Whether it may still add something, from other code than the caller's."""
        return not self.done and self.number not in _INSIDE.get()


class Prefix:
    """The text that sibling forks start from. With more than one, the backend's cache is warmed with it,
    once, before the first of them generates. The locks are fair: siblings go on in the order in which they
    began."""

    def __init__(self, mark: Mark, size: int) -> None:
        self._mark = mark
        self._turn = asyncio.Lock()
        self._warm_turn = asyncio.Lock()
        self._cold = size > 1
        self._error: Exception | None = None

    async def reached(self) -> Mark:
        """The parent's mark, once it is reached."""
        async with self._turn:
            await self._mark.signal.wait_async(lambda: self._mark.done)
        return self._mark

    async def warm(self, backend: Backend) -> None:
        """Raises what the warm-up raised, to every sibling alike."""
        async with self._warm_turn:
            if self._error is not None:
                raise self._error
            if self._cold and self._mark.transcript.kind != "root":
                try:
                    await backend.commit(self._mark.transcript.prompt())
                except Exception as error:
                    self._error = error
                    raise
            self._cold = False


@dataclass(frozen=True, slots=True)
class Item:
    """One thing to do: a leaf node with the place of its `+=` and the variable it sets (and the one for its
    reasoning), a mark to reach, or one to go back to."""

    node: Node | None = None
    src: Source | None = None
    variable: Variable | None = None
    mark: Mark | None = None
    back: Mark | None = None
    thought: Variable | None = None


def typed_value(node: Gen, text: str, meta: dict[str, Any]) -> Any:
    """What a generated text is read as. Raises InvalidValue."""
    if node.typed is None:
        return text
    start = meta.get("answer_start")
    if node.reasoning is None and isinstance(start, int):
        text = text[start:]  # the rest is reasoning before it (require_reasoning)
    try:
        return node.typed.read(text)
    except ValueError as error:
        cut = (meta.get("finish_reason") or {}).get("type") == "length"
        raise InvalidValue(
            f"the text is no {node.typed.name}: {error}; it is {text!r:.200}",
            hint="it was cut: give it more max_tokens" if cut else None,
        ) from error


def placed(cause: BaseException, place: dict[str, Any], timeout: float | None) -> ProgramError:
    """The error a reader gets for `cause`: the same kind where it is the language's own, with its place
    filled in."""
    match cause:
        case ProgramError():
            error = copy.copy(cause)
            for key, value in place.items():
                if getattr(error, key) is None:
                    setattr(error, key, value)
        case asyncio.CancelledError():
            error = ProgramCancelled("the program was cancelled before this was done", **place)
        case TimeoutError():
            error = Timeout(
                f"no answer within {timeout:g} s" if timeout is not None else "no answer in time",
                retryable=True,
                hint="give the program more time with run(timeout=...)",
                **place,
            )
        case BadProgram():
            error = ProgramError(str(cause), **place)
        case _:
            error = BackendError(f"{type(cause).__name__}: {cause}", **place)
    error.__cause__ = cause
    return error


def forget_frames(error: BaseException) -> None:
    """Empty the frames that an error and its causes came through: an error is kept as long as its reader
    likes, what its frames held is not. The outermost frame, which still runs, cannot be emptied: it leaves
    the traceback."""
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__
