"""Parts of a run, apart from the executors themselves. Knows no nodes' meaning and no particular backend.

Variable    a named value to come, and the stream of pieces it arrives in
Mark        a point in a program's queue: the text up to there, or why it failed
RunInfo     what all forks of one run share
Body, Stop  the user's function beside the reader, and what ends it
Prefix      the text that sibling forks start from
Item        an entry of a queue
located     how a failure gets its place in the program
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import os
import threading
import traceback
import weakref
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from runtime.formats.reasoning.types import Split
from sglang_dsl.backends.base import Backend
from sglang_dsl.concurrency.loop import background
from sglang_dsl.concurrency.streams import Piece, Signal, Stream, Until, awaiting
from sglang_dsl.conversation.requests import Call, Completion, Ledger
from sglang_dsl.conversation.transcript import Transcript
from sglang_dsl.errors import (
    BackendError,
    BadProgram,
    MissingVariable,
    ProgramCancelled,
    ProgramError,
    Stack,
    Timeout,
    again,
    copied,
    headline,
    near,
    stacks,
)
from sglang_dsl.interpreter.calls import Before, CallContext, Calls
from sglang_dsl.interpreter.metering import Meter
from sglang_dsl.interpreter.record import CallLog
from sglang_dsl.ir import Gen, Node, Sampling, Source, caller
from sglang_dsl.ir.typed import Typed
from sglang_dsl.tool_use.offers import Offer
from sglang_dsl.views.snapshot import VariableSnapshot

_NOTHING: dict[str, Any] = {}  # what was said of a variable before it is there


def missing(name: str, known: Iterable[str], program: str) -> MissingVariable:
    """The error of a variable that nothing sets."""
    names = list(known)
    shown = ", ".join(map(repr, names)) or "none"
    return MissingVariable(
        f"no variable {name!r}; known: {shown}{near(name, names)}",
        program=program,
        variable=name,
        source=caller(),
        hint=None if names else f"it is set by what is added to the state: s += gen({name!r})",
    )


class Variable(Stream):
    """One setting of a name, with the pieces it comes in. Ends exactly once, with a value or with an error.
    `typed`: as what its text is read; `raw`: the text or texts, where they were generated, also when they
    could not be read."""

    __slots__ = ("done", "error", "meta", "name", "raw", "typed", "value")

    def __init__(self, name: str | None, typed: Typed | None = None) -> None:
        self._wakers = []
        self.pieces = ()
        self.name, self.typed = name, typed
        self.raw: str | list[str] | None = None
        self.value: Any = None
        self.meta: dict[str, Any] = _NOTHING
        self.error: BaseException | None = None
        self.done = False

    def settle(self, value: Any, meta: dict[str, Any] | None = None) -> None:
        """The value is there."""
        self.value, self.meta = value, meta or {}
        self.done = True
        self.notify()

    def so_far(self) -> Sequence[Piece]:
        """The pieces that there are by now; one for a value that was not streamed, made when it is read."""
        if not self.pieces and self.done and self.error is None:
            text = self.value if self.raw is None else self.raw
            text = text[0] if isinstance(text, list) and text else text
            self.pieces = [Piece(str(text), self.meta)]
        return self.pieces

    def fail(self, error: BaseException) -> None:
        self.error, self.done = error, True
        self.notify()

    def ended(self) -> int | None:
        """How many pieces there are, once there will be no more."""
        return len(self.so_far()) if self.done else None

    def result(self) -> Any:
        if self.error is not None:
            raise again(self.error)
        return self.value

    def text(self) -> Any:
        """What was generated, as it was written, once it is there. Raises the program's error where nothing
        was."""
        return self.result() if self.raw is None else self.raw

    def snapshot(self) -> VariableSnapshot:
        """How it stands now; does not wait."""
        done = self.done  # before what is set before it
        text = "".join(piece.text for piece in self.pieces) if self.raw is None else self.raw
        name = self.name or ""
        if not done:
            return VariableSnapshot(name, "pending", text)
        if self.error is not None:
            return VariableSnapshot(name, "failed", text, None, self.error, self.meta)
        if self.raw is None and isinstance(self.value, str):
            text = self.value
        return VariableSnapshot(name, "done", text, self.value, None, self.meta)


class Mark:
    """A point in the queue. `index`: how many streamed pieces stood before it."""

    __slots__ = ("done", "error", "index", "signal", "transcript")

    def __init__(self, signal: Signal | None = None) -> None:
        self.transcript = Transcript.EMPTY
        self.error: BaseException | None = None
        self.index: int | None = None
        self.done = False
        self.signal = signal or Signal()

    def reach(self, transcript: Transcript, error: BaseException | None, index: int) -> None:
        self.transcript, self.error, self.index, self.done = transcript, error, index, True
        self.signal.notify()

    def result(self) -> Transcript:
        if self.error is not None:
            raise again(self.error)
        return self.transcript

    async def reached(self, until: Until) -> None:
        """Wait for it."""
        if not self.done:
            await until(self.signal, lambda: self.done)

    async def wait(self, until: Until) -> Transcript:
        """What was said up to here; waits. Raises what went wrong before it."""
        await self.reached(until)
        return self.result()


# -- the run -------------------------------------------------------------------------------------------------

M = TypeVar("M")


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
        alive = [] if first is None else [first]
        return alive if self._others is None else [*alive, *self._others]


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
_NO_DEFAULTS = Sampling()
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
        "inline", "ledger", "meters", "program", "record", "ret_value", "seed", "speculation", "stop",
        "stream", "timeout",
    )  # fmt: skip

    def __init__(
        self,
        program: str,
        backend: Backend | None,
        defaults: Sampling = _NO_DEFAULTS,
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
        self.ret_value: Any = None
        self.ledger: Ledger = Ledger(None if caller is None else caller.ledger)
        self.stop = _STOP.get()
        # What its function raised, where that runs beside the reader: why the rest is not done.
        self.failure: BaseException | None = None
        self._members: WeakRefs[Any] = WeakRefs()
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

    def enter(self, member: Any) -> None:
        run: RunInfo | None = self
        while run is not None:
            with run._lock:
                run._members.add(member)
            run = run.caller
        self.stop.enter(member)

    def live(self) -> list[Any]:
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


class EvaluatorState(Protocol):
    """A state's Evaluator, for the modules that it calls."""

    run: RunInfo
    transcript: Transcript
    error: BaseException | None
    output: Stream
    meters: tuple[Meter, ...]

    @property
    def before(self) -> Before: ...
    def context(self, kind: str, name: str | None, item: Item, timeout: float | None) -> CallContext: ...
    def evaluate(self, node: Node, item: Item) -> Coroutine[Any, Any, None]: ...
    def settle(self, node: Gen, item: Item, done: Completion, splits: Sequence[Split]) -> None: ...
    def advance(self, transcript: Transcript) -> None: ...
    def fail(self, cause: BaseException, item: Item) -> None: ...
    async def warm(self, backend: Backend) -> None: ...


def located(cause: BaseException, context: dict[str, Any], timeout: float | None) -> ProgramError:
    """The error a reader gets for `cause`: the same kind where it is the language's own, with its place
    filled in."""
    match cause:
        case ProgramError():
            error = copied(cause)
            for key, value in context.items():
                if getattr(error, key) is None:
                    setattr(error, key, value)
        case asyncio.CancelledError():
            error = ProgramCancelled("the program was cancelled before this was done", **context)
        case TimeoutError():
            error = Timeout(
                f"no answer within {timeout:g} s" if timeout is not None else "no answer in time",
                retryable=True,
                hint="allow more time with run(timeout=...)",
                **context,
            )
        case BadProgram():
            error = ProgramError(str(cause), **context)
        case _:
            error = BackendError(headline(cause), **context)
    # Of an error of the language, what it came of: itself would be told twice.
    is_ours = isinstance(cause, ProgramError) and type(cause).__module__ == ProgramError.__module__
    if (below := cause.__cause__ if is_ours else cause) is not None:
        error.__cause__ = below
    error.stacks = (*stacks(cause), Stack(type(error).__name__, ()))
    return error


def user_line(error: BaseException) -> Source | None:
    """Where the user's code stood when `error` came through it: the innermost frame outside this package."""
    source = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if not frame.f_code.co_filename.startswith(_HERE):
            source = Source(frame.f_code.co_filename, line, frame.f_code.co_qualname)
    return source


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
