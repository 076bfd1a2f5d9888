"""Starting programs: one, beside the caller, or a batch; and following one without a backend. Knows no words.

Loaded when the first program runs, and with it the executor and the event loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import functools
import inspect
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sized,
)
from contextlib import aclosing, closing, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from sglang_dsl.async_batch import as_they_end
from sglang_dsl.async_state import AsyncProgramState
from sglang_dsl.backends import as_backend
from sglang_dsl.backends.base import Backend
from sglang_dsl.batch import Job, in_order
from sglang_dsl.budgets import Budget, Meter
from sglang_dsl.core import AsyncCore
from sglang_dsl.errors import BadProgram, ProgramError
from sglang_dsl.executor import Executor
from sglang_dsl.feed import Mark
from sglang_dsl.ir import Sampling
from sglang_dsl.loop import background, in_thread
from sglang_dsl.precompile import constraints_of, send
from sglang_dsl.record import Record, records
from sglang_dsl.run import Body, RunInfo
from sglang_dsl.settings import global_config
from sglang_dsl.state import ProgramState
from sglang_dsl.trace import Placeholder, Program, Tracer

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
VERBOSE = 2
"""Of global_config.verbosity: from here on a run prints its text."""


class Wanted(Protocol):
    """How a program is to run, apart from its arguments."""

    @property
    def backend(self) -> Any: ...
    @property
    def stream(self) -> bool: ...
    @property
    def timeout(self) -> float | None: ...
    @property
    def sampling(self) -> Sampling: ...
    @property
    def budget(self) -> Budget | None: ...
    @property
    def cache(self) -> str: ...
    @property
    def cache_dir(self) -> str | None: ...
    @property
    def use_thread(self) -> bool: ...


class Startable(Protocol):
    """A program, as it is started."""

    @property
    def name(self) -> str: ...
    @property
    def signature(self) -> inspect.Signature: ...
    @property
    def is_async(self) -> bool: ...
    def fill(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]: ...
    def write(self, state: Any, args: Args, kwargs: Kwargs) -> Any: ...


@dataclass(frozen=True, slots=True)
class Scope:
    """What a program hands to the programs that it calls."""

    backend: Backend | None
    sampling: Sampling
    timeout: float | None
    meters: tuple[Meter, ...] = ()
    record: Record | None = None
    inline: bool = False

    def run(self, program: str, index: int | None, *, stream: bool) -> RunInfo:
        """What a run in this scope shares. Its seed is no default of its calls: each derives its own."""
        return RunInfo(
            program,
            self.backend,
            dataclasses.replace(self.sampling, seed=None),
            self.timeout,
            stream,
            self.sampling.seed,
            self.meters,
            self.record,
            index,
            self.inline,
        )


_SCOPE: contextvars.ContextVar[Scope | None] = contextvars.ContextVar("sglang_dsl_scope", default=None)
# Whether the running function is being traced: programs it calls are traced too.
_TRACING: contextvars.ContextVar[bool] = contextvars.ContextVar("sglang_dsl_tracing", default=False)


def launch(
    program: Startable, wanted: Wanted, args: Args, kwargs: Kwargs, index: int | None = None
) -> ProgramState:
    """Run a program; what its function raises is raised here, in a stream where it is read. `index`: the
    item's place in a batch."""
    if _TRACING.get():
        return _follow(program, args, kwargs)[0]
    args, kwargs = program.fill(args, kwargs)
    # Wrong arguments are refused here, also where the body would run beside the caller.
    program.signature.bind(*args, **kwargs)
    scope = _scope(wanted)
    run = scope.run(program.name, index, stream=wanted.stream)
    if wanted.stream:
        return _beside(program, scope, run, args, kwargs)
    state = ProgramState(Executor(run))
    state.index = index
    if program.is_async:
        background().run(_written(program, scope, state, args, kwargs))
        _print_text(state)
        return state
    before = _SCOPE.set(scope)
    try:
        state.ret_value = program.write(state, args, kwargs)
    except BaseException:
        state.cancel()
        raise
    finally:
        _SCOPE.reset(before)
    _print_text(state)
    return state


def _print_text(state: ProgramState) -> None:
    """What a verbose run said. What went wrong is left to its readers."""
    if global_config.verbosity >= VERBOSE:
        with suppress(ProgramError):
            print(state.text())


async def launch_async(
    program: Startable, wanted: Wanted, args: Args, kwargs: Kwargs, index: int | None = None
) -> AsyncProgramState:
    """Run a program from any event loop: an async function on that loop, an ordinary one beside it. What the
    function raises is raised here, in a stream where it is read; cancelling cancels the program."""
    if _TRACING.get():
        return _async_face(_follow(program, args, kwargs)[0])
    args, kwargs = program.fill(args, kwargs)
    program.signature.bind(*args, **kwargs)
    scope = _scope(wanted)
    run = scope.run(program.name, index, stream=wanted.stream)
    if wanted.stream:
        return _async_face(_beside(program, scope, run, args, kwargs))
    state = ProgramState(Executor(run))
    state.index = index
    if program.is_async:
        # A task of its own keeps the scope to itself.
        await asyncio.create_task(_written(program, scope, state, args, kwargs))
        await _print_text_async(state)
        return _async_face(state)
    ended = Mark()
    context = contextvars.copy_context()

    def work() -> None:
        error: BaseException | None = None
        try:
            context.run(_SCOPE.set, scope)
            state.ret_value = context.run(program.write, state, args, kwargs)
        except BaseException as raised:  # noqa: BLE001 - raised by whoever awaits
            error = raised
        ended.reach(state.core.so_far(), error, 0)

    in_thread(work)
    try:
        await ended.signal.wait_async(lambda: ended.done)
        ended.result()
    except BaseException:
        state.cancel()
        raise
    await _print_text_async(state)
    return _async_face(state)


async def _print_text_async(state: ProgramState) -> None:
    if global_config.verbosity >= VERBOSE:
        with suppress(ProgramError):
            print(await _async_face(state).text())


async def _written(
    program: Startable,
    scope: Scope,
    state: ProgramState,
    args: Args,
    kwargs: Kwargs,
    body: Body | None = None,
) -> None:
    """An async function's body, in a task of its own. Raises what it raises."""
    _SCOPE.set(scope)
    if body is not None:
        body.enter()
    try:
        state.ret_value = await program.write(_async_face(state), args, kwargs)
    except BaseException:
        state.cancel()
        raise


def _async_face(state: ProgramState) -> AsyncProgramState:
    core = state.core
    assert isinstance(core, AsyncCore)
    return AsyncProgramState(core, state)


def _scope(wanted: Wanted) -> Scope:
    """Settings < caller's program < this one."""
    outer = _SCOPE.get()
    if outer is None:
        outer = Scope(None, global_config.sampling, global_config.timeout_s)
        backend = global_config.default_backend if wanted.backend is None else wanted.backend
    else:
        backend = outer.backend if wanted.backend is None else wanted.backend
    record = outer.record
    if wanted.cache != "off" and wanted.cache_dir is not None:
        record = records.at(wanted.cache_dir, wanted.cache)  # type: ignore[arg-type]
    return Scope(
        None if backend is None else as_backend(backend),
        wanted.sampling.over(outer.sampling),
        outer.timeout if wanted.timeout is None else wanted.timeout,
        outer.meters if wanted.budget is None else (*outer.meters, Meter(wanted.budget)),
        record,
        not wanted.use_thread,
    )


def _beside(program: Startable, scope: Scope, run: RunInfo, args: Args, kwargs: Kwargs) -> ProgramState:
    """Begin the body on another thread; the state can be read meanwhile."""
    executor = Executor(run)
    body = executor.body = Body(Mark(executor.feed.signal))
    state = ProgramState(executor)

    async def work_async() -> None:
        failure: BaseException | None = None
        try:
            await _written(program, scope, state, args, kwargs, body)
        except BaseException as error:  # noqa: BLE001 - raised where the stream is read
            failure = error
        executor.finish_body(failure)
        if failure is None:
            await _print_text_async(state)

    def work() -> None:
        body.enter()
        _SCOPE.set(scope)
        failure: BaseException | None = None
        try:
            state.ret_value = program.write(state, args, kwargs)
        except BaseException as error:  # noqa: BLE001 - raised where the stream is read
            failure = error
            state.cancel()
        executor.finish_body(failure)
        if failure is None:
            _print_text(state)

    if program.is_async:
        background().start(work_async)
    else:
        in_thread(work)
    return state


def run_batch(
    program: Startable,
    wanted: Wanted,
    items: Iterable[Any],
    *,
    limit: int | None,
    lazy: bool,
    progress: bool,
    on_error: str,
    ordered: bool = True,
    traced: Program | None = None,
) -> Any:
    """Run a program for each item; see SglFunction.run_batch. traced: the program as it was traced last."""
    if traced is not None:
        _tell_ahead(wanted, traced)
    start = _item_async if program.is_async else _item
    jobs = (functools.partial(start, program, wanted, item, index) for index, item in enumerate(items))
    total = len(items) if isinstance(items, Sized) else None
    begun = in_order(
        jobs,
        limit=limit,
        lazy=lazy,
        total=total,
        progress=progress,
        on_loop=program.is_async,
        ordered=ordered,
    )
    results = _settle(begun, on_error)
    return results if lazy else list(results)


def _item(program: Startable, wanted: Wanted, item: Any, index: int) -> ProgramState:
    return launch(program, wanted, *_arguments(item), index)


async def _item_async(program: Startable, wanted: Wanted, item: Any, index: int) -> ProgramState:
    return (await launch_async(program, wanted, *_arguments(item), index)).blocking


def _arguments(item: Any) -> tuple[Args, Kwargs]:
    match item:
        case Mapping():
            return (), dict(item)
        case tuple() | list():
            return tuple(item), {}
        case _:
            raise BadProgram(f"an item of a batch is a dict or a tuple of arguments, got {item!r:.80}")


async def run_batch_async(
    program: Startable,
    wanted: Wanted,
    items: Iterable[Any] | AsyncIterable[Any],
    *,
    limit: int | None,
    on_error: str,
    ordered: bool = True,
    progress: bool = False,
) -> AsyncIterator[Any]:
    """run_batch on the caller's own event loop; see SglFunction.arun_batch."""

    async def one(index: int, item: Any) -> AsyncProgramState:
        state = await launch_async(program, wanted, *_arguments(item), index)
        await state.sync()
        return state

    total = len(items) if isinstance(items, Sized) else None
    results = as_they_end(items, one, limit=limit, ordered=ordered, total=total, progress=progress)
    async with aclosing(results):  # type: ignore[type-var]
        async for result in results:
            if isinstance(result, BaseException) and on_error != "return":
                raise result
            yield result


def _settle(jobs: Generator[Job, None, None], on_error: str) -> Iterator[Any]:
    """A finished job's state, or its error by policy."""
    # Closed here and now: an exception keeps its frames, and with them a generator that nobody reads.
    with closing(jobs):
        for job in jobs:
            if job.error is None:
                yield job.state
            elif on_error == "return":
                yield job.error
            else:
                raise job.error


def trace(program: Startable, wanted: Wanted, args: Args, kwargs: Kwargs) -> Program:
    """Follow a program's function once; its backend, where one is set, hears of the constraints only; see
    SglFunction.trace."""
    made = _follow(program, args, kwargs)[1]
    if not _TRACING.get():
        _tell_ahead(wanted, made)
    return made


def _tell_ahead(wanted: Wanted, traced: Program) -> None:
    given = global_config.default_backend if wanted.backend is None else wanted.backend
    if isinstance(given, str) and not given.startswith(("http://", "https://")):
        return  # a name: its backend, which may have a model to load, is made when something runs
    scope = _scope(wanted)
    send(scope.backend, constraints_of(traced.nodes, scope.sampling))


def _follow(program: Startable, args: Args, kwargs: Kwargs) -> tuple[ProgramState, Program]:
    args, kwargs = program.fill(args, kwargs)
    given = program.signature.bind_partial(*args, **kwargs)
    missing: list[str] = []
    for name, parameter in program.signature.parameters.items():
        ordinary = parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if ordinary and name not in given.arguments and parameter.default is parameter.empty:
            given.arguments[name] = Placeholder(name)
            missing.append(name)
    tracer = Tracer(program.name)
    state = ProgramState(tracer)
    before = _TRACING.set(True)
    try:
        if program.is_async:
            state.ret_value = _driven(program.write(_async_face(state), given.args, given.kwargs))
        else:
            state.ret_value = program.write(state, given.args, given.kwargs)
    except (BadProgram, ProgramError):
        raise
    except Exception as error:
        raise BadProgram(
            f"{program.name} cannot be traced without a run: {type(error).__name__}: {error}; give it "
            "arguments it can work with, or keep decisions on generated text out of it"
        ) from error
    finally:
        _TRACING.reset(before)
    return state, Program(program.name, tracer.body(), tuple(missing))


def _driven(work: Coroutine[Any, Any, Any]) -> Any:
    """The result of an async body that is followed without a loop: what it asks of `s` is there at once."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value
    work.close()
    raise BadProgram("it awaits something other than its state")
