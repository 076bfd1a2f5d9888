"""What a run is made of, apart from the executors themselves: shared facts, the body beside the reader, the
text that forks start from, the things that wait in a queue, and how a failure gets its place."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import os
import threading
import traceback
import weakref
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from sglang_dsl.backends.base import Backend
from sglang_dsl.concurrency.loop import background
from sglang_dsl.concurrency.streams import Until, awaiting
from sglang_dsl.conversation.requests import Call, Ledger
from sglang_dsl.errors import (
    BackendError,
    BadProgram,
    ProgramCancelled,
    ProgramError,
    Stack,
    Timeout,
    copied,
    headline,
    stacks,
)
from sglang_dsl.interpreter.calls import Calls
from sglang_dsl.interpreter.metering import Meter
from sglang_dsl.interpreter.record import CallLog
from sglang_dsl.interpreter.variables import Mark, Variable
from sglang_dsl.ir import Node, Sampling, Source
from sglang_dsl.tool_use.offers import Offer

M = TypeVar("M")


class Member(Protocol):
    """An executor, as its run sees it."""

    def mark(self) -> Mark: ...


class WeakRefs(Generic[M]):
    """Things that are not kept alive by it. Most hold one; a WeakSet, which is dear to make, is there from
    the second on. Not for several threads at once."""

    __slots__ = ("_first", "_others")

    def __init__(self) -> None:
        self._first: weakref.ref[M] | None = None
        self._others: weakref.WeakSet[M] | None = None

    def add(self, thing: M) -> None:
        if self._first is None or self._first() is None:
            self._first = weakref.ref(thing)
            return
        if self._others is None:
            self._others = weakref.WeakSet()
        self._others.add(thing)

    def live(self) -> list[M]:
        """Those that there are still."""
        first = None if self._first is None else self._first()
        found = [] if first is None else [first]
        return found if self._others is None else [*found, *self._others]


class Stop:
    """Whether a body that runs beside its caller is to end: all that it asks for, itself or by the programs
    it calls, is cancelled, and nothing it adds later is done."""

    def __init__(self, outer: Stop | None = None) -> None:
        self.stopped = False
        self._lock = threading.Lock()
        self._parts: WeakRefs[Any] = WeakRefs()
        self._outer = outer
        if outer is not None:
            outer.enter(self)

    def enter(self, part: Any) -> None:
        """`part`, an executor, a coroutine's task or a Stop further in, is cancelled with it. It is not kept
        alive."""
        with self._lock:
            self._parts.add(part)
        if self.stopped:
            part.cancel()

    def cancel(self) -> None:
        if not self.stopped:
            self.stopped = True
            self.interrupt()

    def interrupt(self) -> None:
        """Cancel what runs by now, and nothing that begins later."""
        with self._lock:
            parts = self._parts.live()
        for part in parts:
            part.cancel()

    def inside(self) -> contextvars.Token[Stop]:
        """From here on, in this context, programs belong to it; until outside()."""
        return _STOP.set(self)

    def outside(self, before: contextvars.Token[Stop]) -> None:
        """From here on they belong to what they belonged to before."""
        _STOP.reset(before)


@dataclass(eq=False)
class Task:
    """A body that is a coroutine, on the language's loop."""

    task: asyncio.Task[Any] | None

    def cancel(self) -> None:
        background().call(self._cancel)

    def _cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()


class _Never(Stop):
    """Of programs that nobody can stop but by their own states."""

    def enter(self, part: Any) -> None:
        return


_NEVER = _Never()
_NOTHING_SAID = Sampling()
_STOP: contextvars.ContextVar[Stop] = contextvars.ContextVar("sglang_dsl_stop", default=_NEVER)


def stop_here() -> Stop:
    """A Stop for a body that begins now, within the one around it."""
    outer = _STOP.get()
    return Stop(None if outer is _NEVER else outer)


class RunInfo:
    """What all forks of one run share. `timeout`: seconds per call. `index`: the item's place in a batch.
    `inline`: whether each addition waits until it is done. `speculation`: num_api_spec_tokens. `caller`: the
    run that called this program. `stop`: what stops it from outside."""

    __slots__ = (
        "__weakref__", "_calls", "_lock", "_members", "backend", "caller", "defaults", "failure", "index",
        "inline", "ledger", "meters", "program", "record", "seed", "speculation", "stop", "stream", "timeout",
    )  # fmt: skip

    def __init__(
        self,
        program: str,
        backend: Backend | None,
        defaults: Sampling = _NOTHING_SAID,
        timeout: float | None = None,
        stream: bool = False,
        seed: int | None = None,
        meters: tuple[Meter, ...] = (),
        record: CallLog | None = None,
        index: int | None = None,
        inline: bool = False,
        speculation: int | None = None,
        caller: RunInfo | None = None,
    ) -> None:
        self.program, self.backend, self.defaults, self.timeout = program, backend, defaults, timeout
        self.stream, self.seed, self.meters, self.record = stream, seed, meters, record
        self.index, self.inline, self.speculation = index, inline, speculation
        self.caller = caller
        self.ledger: Ledger = Ledger(None if caller is None else caller.ledger)
        self.stop = _STOP.get()
        # What its function raised, where that runs beside the reader: why the rest is not done.
        self.failure: BaseException | None = None
        self._members: WeakRefs[Member] = WeakRefs()
        self._lock = threading.Lock()
        self._calls: Calls | None = None

    @property
    def calls(self) -> Calls:
        """How its calls are made."""
        if self._calls is None:
            record, seed, index = self.record, self.seed, self.index
            self._calls = Calls(
                self.program, self.backend, self.ledger, record=record, seed=seed, index=index
            )
        return self._calls

    def enter(self, member: Member) -> None:
        run: RunInfo | None = self
        while run is not None:
            with run._lock:
                run._members.add(member)
            run = run.caller
        self.stop.enter(member)

    def live(self) -> list[Member]:
        """The executors that still live, of the run and of the programs it called."""
        with self._lock:
            return self._members.live()

    async def usage(self, until: Until) -> dict[str, int]:
        """Totals over the run, its forks and the programs it called; waits for what they have queued.
        Failures do not stop it."""
        for member in self.live():
            await member.mark().reached(until)
        return self.ledger.total()


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
    stop: Stop = field(default_factory=lambda: stop_here())

    def enter(self) -> None:
        """From here on, in this context and those that come of it, the code is the body's own."""
        _INSIDE.set((*_INSIDE.get(), self.number))
        self.stop.inside()

    @property
    def elsewhere(self) -> bool:
        """Whether it may still add something, from other code than the caller's."""
        return not self.done and self.number not in _INSIDE.get()


class Prefix:
    """The text that sibling forks start from. With more than one, the backend's cache is warmed with it,
    once, before the first of them generates. The locks are fair: siblings go on in the order in which they
    began."""

    def __init__(self, mark: Mark, size: int) -> None:
        self.mark = mark
        self._turn = asyncio.Lock()
        self._warm_turn = asyncio.Lock()
        self._cold = size > 1
        self._error: Exception | None = None

    async def reached(self) -> Mark:
        """The parent's mark, once it is reached."""
        async with self._turn:
            await self.mark.reached(awaiting)
        return self.mark

    async def warm(self, backend: Backend) -> None:
        """Raises what the warm-up raised, to every sibling alike."""
        async with self._warm_turn:
            if self._error is not None:
                raise self._error
            if self._cold and self.mark.transcript.kind != "root":
                try:
                    await backend.commit(self.mark.transcript.prompt())
                except Exception as error:
                    self._error = error
                    raise
            self._cold = False


class Item(msgspec.Struct, eq=False, gc=False):
    """One thing to do: constant text (`lead`), and behind it a node with the place of its `+=` and the
    variable it sets (and the one for its reasoning), a mark to reach, or one to go back to. `ready`: a
    generation, lowered. `step`: how many calls this branch had asked for before. `offer`: of a generation,
    the tools that it may call."""

    node: Node | None = None
    src: Source | None = None
    variable: Variable | None = None
    mark: Mark | None = None
    back: Mark | None = None
    reasoning: Variable | None = None
    ready: Call | None = None
    lead: tuple[Node, ...] = ()
    step: int = 0
    offer: Offer | None = None


def placed(cause: BaseException, place: dict[str, Any], timeout: float | None) -> ProgramError:
    """The error a reader gets for `cause`: the same kind where it is the language's own, with its place
    filled in."""
    match cause:
        case ProgramError():
            error = copied(cause)
            for key, value in place.items():
                if getattr(error, key) is None:
                    setattr(error, key, value)
        case asyncio.CancelledError():
            error = ProgramCancelled("the program was cancelled before this was done", **place)
        case TimeoutError():
            error = Timeout(
                f"no answer within {timeout:g} s" if timeout is not None else "no answer in time",
                retryable=True,
                hint="allow more time with run(timeout=...)",
                **place,
            )
        case BadProgram():
            error = ProgramError(str(cause), **place)
        case _:
            error = BackendError(headline(cause), **place)
    # Of an error of the language, what it came of: itself would be told twice.
    own = isinstance(cause, ProgramError) and type(cause).__module__ == ProgramError.__module__
    if (below := cause.__cause__ if own else cause) is not None:
        error.__cause__ = below
    error.stacks = (*stacks(cause), Stack(type(error).__name__, ()))
    return error


def place_in(error: BaseException) -> Source | None:
    """Where the user's code stood when `error` came through it: the innermost frame outside this package."""
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if not frame.f_code.co_filename.startswith(_HERE):
            found = Source(frame.f_code.co_filename, line, frame.f_code.co_qualname)
    return found


_HERE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_BACKENDS = os.path.join(_HERE, "backends") + os.sep


def forget_frames(error: BaseException) -> None:
    """Empty the language's frames that an error and its causes came through: an error is kept as long as its
    reader likes, what these frames held, the state, is not. The outermost frame, which still runs, cannot be
    emptied: it leaves the traceback. Frames of backends and of users are left alone: they may be those of a
    coroutine that handed its error on and waits for more work, and emptying a frame ends its coroutine."""
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:  # causes may go round in a circle
        for frame, _ in traceback.walk_tb(at.__traceback__):
            file = frame.f_code.co_filename
            if file.startswith(_HERE) and not file.startswith(_BACKENDS):
                with contextlib.suppress(RuntimeError):  # it runs
                    frame.clear()
        seen.add(id(at))
        at = at.__cause__
