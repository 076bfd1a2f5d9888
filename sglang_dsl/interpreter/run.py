"""Parts of a run, apart from the executors themselves. Knows no nodes' meaning and no particular backend.

Variable    a named value to come, and the stream of pieces it arrives in
Mark        a point in a program's queue: the text up to there, or why it failed
RunInfo     what all forks of one run share
Body, Stop  the user's function beside the reader, and what ends it
Prefix      the text that sibling forks start from
Item        an entry of a queue
located     a failure with its place in the program
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import threading
import weakref
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from runtime.formats.reasoning.splitter import Split
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

_NO_META: dict[str, Any] = {}


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
    """One setting of a name, with the pieces it is streamed in. Ends exactly once, with a value or an error.
    `typed`: the type of the value; `raw`: the generated text or texts, also if they are no valid value."""

    __slots__ = ("done", "error", "meta", "name", "raw", "typed", "value")

    def __init__(self, name: str | None, typed: Typed | None = None) -> None:
        self._wakers = []
        self.pieces = ()
        self.name, self.typed = name, typed
        self.raw: str | list[str] | None = None
        self.value: Any = None
        self.meta: dict[str, Any] = _NO_META
        self.error: BaseException | None = None
        self.done = False

    def settle(self, value: Any, meta: dict[str, Any] | None = None) -> None:
        self.value, self.meta = value, meta or {}
        self.done = True
        self.notify()

    def so_far(self) -> Sequence[Piece]:
        """The pieces by now; a value that was not streamed is one piece, created when it is read."""
        if not self.pieces and self.done and self.error is None:
            text = self.value if self.raw is None else self.raw
            text = text[0] if isinstance(text, list) and text else text
            self.pieces = [Piece(str(text), self.meta)]
        return self.pieces

    def fail(self, error: BaseException) -> None:
        self.error, self.done = error, True
        self.notify()

    def ended(self) -> int | None:
        """The number of pieces, if the variable has ended."""
        return len(self.so_far()) if self.done else None

    def result(self) -> Any:
        if self.error is not None:
            raise again(self.error)
        return self.value

    def text(self) -> Any:
        """The generated text of a variable that has ended. Raises its error."""
        return self.result() if self.raw is None else self.raw

    def snapshot(self) -> VariableSnapshot:
        """The variable at this moment; does not wait."""
        done = self.done  # read first: the value is set before it
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
    """A point in the queue. `index`: how many streamed pieces were before it."""

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
        """The text up to here; waits. Raises an earlier error."""
        await self.reached(until)
        return self.result()


# -- the run -------------------------------------------------------------------------------------------------

M = TypeVar("M")


class WeakRefs(Generic[M]):
    """Weak references. Most have one; a WeakSet, which is slow to create, is used from the second on. Not
    thread-safe."""

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
        """Those that still exist."""
        first = None if self._first is None else self._first()
        alive = [] if first is None else [first]
        return alive if self._others is None else [*alive, *self._others]


class Stop:
    """Stops a body that runs beside its caller: what it has requested, itself or by the programs it calls, is
    cancelled, and nothing that it adds later is evaluated."""

    def __init__(self, outer: Stop | None = None) -> None:
        self.stopped = False
        self._lock = threading.Lock()
        self._parts: WeakRefs[Any] = WeakRefs()
        self._outer = outer
        if outer is not None:
            outer.enter(self)

    def enter(self, part: Any) -> None:
        """Cancel `part` with it: an executor, a task or an inner Stop, which is held weakly."""
        with self._lock:
            self._parts.add(part)
        if self.stopped:
            part.cancel()

    def cancel(self) -> None:
        if not self.stopped:
            self.stopped = True
            self.interrupt()

    def interrupt(self) -> None:
        """Cancel what is running now, and nothing that begins later."""
        with self._lock:
            parts = self._parts.live()
        for part in parts:
            part.cancel()

    def inside(self) -> contextvars.Token[Stop]:
        """From now on programs in this context belong to it; until outside()."""
        return _STOP.set(self)

    def outside(self, before: contextvars.Token[Stop]) -> None:
        """Programs in this context belong to the earlier Stop again."""
        _STOP.reset(before)


@dataclass(eq=False)
class Task:
    """The task of a body that is a coroutine, on the language's loop."""

    task: asyncio.Task[Any] | None

    def cancel(self) -> None:
        background().call(self._cancel)

    def _cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()


class _Never(Stop):
    """The Stop of programs that are stopped by their own states only."""

    def enter(self, part: Any) -> None:
        return


_NEVER = _Never()
_STOP: contextvars.ContextVar[Stop] = contextvars.ContextVar("sglang_dsl_stop", default=_NEVER)


def stop_here() -> Stop:
    """A Stop for a body that begins now, within the one around it."""
    outer = _STOP.get()
    return Stop(None if outer is _NEVER else outer)


class RunInfo:
    """What all forks of one run share. `timeout`: seconds per call. `index`: the item's position in a batch.
    `inline`: whether each addition waits until it is done. `speculation`: num_api_spec_tokens. `caller`: the
    run that called this program. `stop`: stops it from outside."""

    __slots__ = (
        "__weakref__", "_calls", "_lock", "_members", "backend", "caller", "defaults", "failure", "index",
        "inline", "ledger", "meters", "program", "record", "ret_value", "seed", "speculation", "stop",
        "stream", "timeout",
    )  # fmt: skip

    def __init__(
        self, program: str, scope: Scope, index: int | None, stream: bool, speculation: int | None
    ) -> None:
        self.program, self.index, self.stream, self.speculation = program, index, stream, speculation
        self.backend, self.timeout, self.meters = scope.backend, scope.timeout, scope.meters
        self.record, self.inline, self.caller = scope.record, scope.inline, scope.caller
        # The seed is no default of the calls: each derives its own.
        self.seed, self.defaults = scope.sampling.seed, scope.sampling
        if self.seed is not None:
            self.defaults = replace(self.defaults, seed=None)
        self.ret_value: Any = None
        self.ledger: Ledger = Ledger(None if self.caller is None else self.caller.ledger)
        self.stop = _STOP.get()
        # The exception of its function, if that runs beside the reader: why the rest is not evaluated.
        self.failure: BaseException | None = None
        self._members: WeakRefs[Any] = WeakRefs()
        self._lock = threading.Lock()
        self._calls: Calls | None = None

    @property
    def calls(self) -> Calls:
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
        """The executors that still exist, of the run and of the programs it called."""
        with self._lock:
            return self._members.live()

    async def usage(self, until: Until) -> dict[str, int]:
        """Totals over the run, its forks and the programs it called; waits for what they have queued, failed
        or not."""
        for member in self.live():
            await member.mark().reached(until)
        return self.ledger.total()


class Scope(msgspec.Struct, frozen=True, eq=False):
    """What a program passes on to the programs that it calls. `caller`: the calling run."""

    backend: Backend | None
    sampling: Sampling
    timeout: float | None
    meters: tuple[Meter, ...] = ()
    record: CallLog | None = None
    inline: bool = False
    caller: RunInfo | None = None

    def inside(self, run: RunInfo) -> Scope:
        """This scope for the function of `run`, which is charged for the programs that it calls."""
        return msgspec.structs.replace(self, caller=run)

    def run(
        self, program: str, index: int | None, *, stream: bool, speculation: int | None = None
    ) -> RunInfo:
        """A run in this scope. Raises BadProgram for a stream with num_api_spec_tokens."""
        if stream and speculation is not None and self.backend is not None and self.backend.speculates:
            raise BadProgram(
                f"{program} has num_api_spec_tokens, so its values are known only when a whole reply is "
                "there: it cannot stream; run it, or use .options(num_api_spec_tokens=None).stream(...)"
            )
        return RunInfo(program, self, index, stream, None if stream else speculation)


_NUMBERS = itertools.count()
# The bodies that the running code is part of, by number.
_INSIDE: contextvars.ContextVar[tuple[int, ...]] = contextvars.ContextVar("sglang_dsl_inside", default=())


@dataclass(slots=True, eq=False)
class Body:
    """The user's function, if it runs beside the reader (stream). `end` is reached when it has returned and
    everything it added has been evaluated."""

    end: Mark
    done: bool = False
    error: BaseException | None = None
    number: int = field(default_factory=_NUMBERS.__next__)
    stop: Stop = field(default_factory=lambda: stop_here())

    def enter(self) -> None:
        """From now on the code in this context, and in copies of it, is part of the body."""
        _INSIDE.set((*_INSIDE.get(), self.number))
        self.stop.inside()

    @property
    def elsewhere(self) -> bool:
        """Whether code other than the caller's may still add something."""
        return not self.done and self.number not in _INSIDE.get()


class Prefix:
    """The text that sibling forks start from. If there are several, it is put into the backend's cache once,
    before the first of them generates. The locks are fair: siblings continue in the order in which they
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
        """Raises the error of the warm-up, to every sibling alike."""
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
    """An entry of a queue: constant text (`lead`), and behind it a node with its line and the variable it
    sets (and the one for its reasoning), a mark to reach, or a mark to go back to (`back`). `ready`: a
    generation as a call without its prompt. `step`: how many calls this branch had queued before. `offer`:
    the tools that a generation may call."""

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
    """The parts of an Evaluator that the modules it calls may use."""

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
    """The error that readers get for `cause`: of the same kind if it is one of the language's, with its place
    in the program."""
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
    # An error of the language would be shown twice: its own cause is shown.
    is_ours = isinstance(cause, ProgramError) and type(cause).__module__ == ProgramError.__module__
    if (below := cause.__cause__ if is_ours else cause) is not None:
        error.__cause__ = below
    error.stacks = (*stacks(cause), Stack(type(error).__name__, ()))
    return error
