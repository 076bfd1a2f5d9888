"""Starting programs: one, beside the caller, or a batch; and following one without a backend. Knows no words.

Loaded when the first program runs, and with it the executor and the event loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import weakref
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sized,
)
from contextlib import aclosing, closing, suppress
from typing import Any

from sglang_dsl.budgets import Price
from sglang_dsl.compiler.follow import Startable, follow, following, leading
from sglang_dsl.compiler.planning import Plan, planned
from sglang_dsl.compiler.precompile import constraints_of, send
from sglang_dsl.compiler.trace import Program
from sglang_dsl.concurrency.loop import background, in_thread
from sglang_dsl.errors import BadProgram, NoBackend, ProgramCancelled, ProgramError, of_item
from sglang_dsl.errors.tracebacks import exposed, trim
from sglang_dsl.execution import finished as finished  # how states are pickled
from sglang_dsl.execution.async_batch import as_they_end
from sglang_dsl.execution.batch import Job, Work, in_order
from sglang_dsl.execution.results import Batch, Items
from sglang_dsl.execution.scope import (
    SCOPE,
    Args,
    Kwargs,
    Scope,
    follow_into_threads,
    scope_of,
    with_batch_budget,
)
from sglang_dsl.interpreter.executor import Executor
from sglang_dsl.interpreter.parameters import Options
from sglang_dsl.interpreter.run import Body, Mark, RunInfo, Task, place_in, stop_here
from sglang_dsl.settings import global_config
from sglang_dsl.state.async_state import AsyncProgramState
from sglang_dsl.state.program_state import ProgramState

follow_into_threads()

VERBOSE = 2
"""Of global_config.verbosity: from here on a run prints its text."""


def launch(
    program: Startable, wanted: Options, args: Args, kwargs: Kwargs, index: int | None = None
) -> ProgramState:
    """Run a program; what its function raises is raised here, in a stream where it is read. `index`: the
    item's place in a batch."""
    if following():
        return follow(program, args, kwargs)[0]
    args, kwargs = program.fill(args, kwargs)
    # Wrong arguments are refused here, also where the body would run beside the caller.
    program.check(args, kwargs)
    scope = scope_of(wanted)
    if wanted.stream:
        return _beside(program, scope, wanted, index, args, kwargs)
    run = scope.run(program.name, index, stream=False, speculation=wanted.num_api_spec_tokens)
    state = ProgramState(Executor(run))
    state.index = index
    if program.is_async:
        background().run(_written(program, scope.inside(run), state, args, kwargs))
        _print_text(state)
        return state
    before = SCOPE.set(scope.inside(run))
    try:
        state.ret_value = program.write(state, args, kwargs)
    except BaseException:
        state.cancel()
        raise
    finally:
        SCOPE.reset(before)
    _print_text(state)
    return state


def _print_text(state: ProgramState) -> None:
    """What a verbose run said. What went wrong is left to its readers."""
    if global_config.verbosity >= VERBOSE:
        with suppress(ProgramError):
            print(state.text())


async def launch_async(
    program: Startable,
    wanted: Options,
    args: Args,
    kwargs: Kwargs,
    index: int | None = None,
    own_task: bool = False,
) -> AsyncProgramState:
    """Run a program from any event loop: an async function on that loop, an ordinary one beside it. What the
    function raises is raised here, in a stream where it is read; cancelling cancels the program. `own_task`:
    the calling task is there for this program alone."""
    if following():
        return _async_state(follow(program, args, kwargs)[0])
    args, kwargs = program.fill(args, kwargs)
    program.check(args, kwargs)
    scope = scope_of(wanted)
    if wanted.stream:
        return _async_state(_beside(program, scope, wanted, index, args, kwargs))
    speculation = wanted.num_api_spec_tokens
    made = functools.partial(scope.run, program.name, index, stream=False, speculation=speculation)
    if not program.is_async:
        return await _beside_the_loop(program, scope, made, index, args, kwargs)
    run = made()
    scope = scope.inside(run)
    state = ProgramState(Executor(run))
    state.index = index
    if own_task:
        await _written(program, scope, state, args, kwargs)
        await _print_text_async(state)
        return _async_state(state)
    # A task of its own keeps the scope to itself.
    task = asyncio.create_task(_written(program, scope, state, args, kwargs))
    try:
        await task
    except asyncio.CancelledError:
        if task.done() and not task.cancelled():
            task.exception()  # it failed in the moment in which this was cancelled
        raise
    await _print_text_async(state)
    return _async_state(state)


async def _beside_the_loop(
    program: Startable,
    scope: Scope,
    made: Callable[[], RunInfo],
    index: int | None,
    args: Args,
    kwargs: Kwargs,
) -> AsyncProgramState:
    """launch_async() of an ordinary function, which runs on a thread."""
    stop, context = stop_here(), contextvars.copy_context()
    context.run(stop.inside)
    run = context.run(made)
    state = ProgramState(Executor(run))
    state.index = index
    ended = Mark()

    def work() -> None:
        error: BaseException | None = None
        try:
            context.run(SCOPE.set, scope.inside(run))
            state.ret_value = context.run(program.write, state, args, kwargs)
        except BaseException as raised:  # noqa: BLE001 - raised by whoever awaits
            error = raised
        ended.reach(state.core.so_far(), error, 0)

    in_thread(work)
    try:
        await ended.signal.wait_async(lambda: ended.done)
        ended.result()
    except BaseException:
        # The thread cannot be ended, but nothing it asks for from now on is done.
        stop.cancel()
        raise
    await _print_text_async(state)
    return _async_state(state)


async def _print_text_async(state: ProgramState) -> None:
    if global_config.verbosity >= VERBOSE:
        with suppress(ProgramError):
            print(await _async_state(state).text())


async def _written(
    program: Startable,
    scope: Scope,
    state: ProgramState,
    args: Args,
    kwargs: Kwargs,
    body: Body | None = None,
    run: RunInfo | None = None,
) -> None:
    """An async function's body, in a task of its own. Raises what it raises. `body` and `run`: where it runs
    beside the reader."""
    SCOPE.set(scope)
    if body is not None:
        body.enter()
    try:
        state.ret_value = await program.write(_async_state(state), args, kwargs)
    except BaseException as error:
        if run is not None and not isinstance(error, asyncio.CancelledError):
            run.failure = error
        state.cancel()
        raise


def _async_state(state: ProgramState) -> AsyncProgramState:
    # Not looked at: isinstance() of a protocol tries every method of it, which takes longer than a call.
    return AsyncProgramState(state.core, state)


def _beside(
    program: Startable, scope: Scope, wanted: Options, index: int | None, args: Args, kwargs: Kwargs
) -> ProgramState:
    """Begin the body on another thread; the state can be read meanwhile. The body has a state object of its
    own, so that the reader's is garbage when its last reader has gone: then all is stopped."""
    stop, context = stop_here(), contextvars.copy_context()
    context.run(stop.inside)
    speculation = wanted.num_api_spec_tokens
    made = functools.partial(scope.run, program.name, index, stream=True, speculation=speculation)
    executor = Executor(context.run(made))
    scope = scope.inside(executor.run)
    body = executor.body = Body(Mark(executor.output), stop=stop)
    state, written = ProgramState(executor), ProgramState(executor)
    reader = weakref.ref(state)
    background().finalize(state, stop.cancel)

    def end(failure: BaseException | None) -> None:
        if (held := reader()) is not None:
            held.ret_value = written.ret_value
        executor.finish_body(failure)

    async def work_async() -> None:
        failure: BaseException | None = None
        task = Task(asyncio.current_task())
        try:
            stop.enter(task)
            await _written(program, scope, written, args, kwargs, body, executor.run)
        except asyncio.CancelledError as error:
            said = "the program was cancelled while its function ran"
            failure = ProgramCancelled(said, program=program.name, source=place_in(error))
        except BaseException as error:  # noqa: BLE001 - raised where the stream is read
            failure = error
        end(failure)
        if failure is None:
            await _print_text_async(written)

    def work() -> None:
        body.enter()
        SCOPE.set(scope)
        failure: BaseException | None = None
        try:
            written.ret_value = program.write(written, args, kwargs)
        except BaseException as error:  # noqa: BLE001 - raised where the stream is read
            executor.run.failure = failure = error
            written.cancel()
        end(failure)
        if failure is None:
            _print_text(written)

    if program.is_async:
        background().start(work_async)
    else:
        in_thread(work)
    return state


def run_batch(
    program: Startable,
    wanted: Options,
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
    wanted = with_batch_budget(wanted)
    start = _item_async if program.is_async else _item
    total = len(items) if isinstance(items, Sized) else None
    taken = items if lazy else Items(program.signature, items)
    work = (
        Work(functools.partial(start, program, wanted, item, index), index, item)
        for index, item in enumerate(taken)
    )
    begun = in_order(
        work,
        limit=limit,
        lazy=lazy,
        total=total,
        progress=progress,
        on_loop=program.is_async,
        ordered=ordered,
    )
    results = _settle(begun, on_error, program.name)
    if not isinstance(taken, Items):
        return results
    return Batch(results, program.name, taken.arguments, ordered=ordered)


def run_items(
    program: Startable, wanted: Options, scope: Scope, items: Iterable[tuple[int, Any]], limit: int
) -> list[Job]:
    """Run a program for each item, a pair of its place in the batch and the item, in `scope`; the finished
    jobs in that order."""
    start = _item_async if program.is_async else _item
    work = (
        Work(functools.partial(start, program, wanted, item, index), index, item) for index, item in items
    )
    before = SCOPE.set(scope)
    try:
        return list(
            in_order(work, limit=limit, lazy=False, total=None, progress=False, on_loop=program.is_async)
        )
    finally:
        SCOPE.reset(before)


def _item(program: Startable, wanted: Options, item: Any, index: int) -> ProgramState:
    return launch(program, wanted, *_arguments(item), index)


async def _item_async(program: Startable, wanted: Options, item: Any, index: int) -> ProgramState:
    return (await launch_async(program, wanted, *_arguments(item), index, own_task=True)).blocking


def batch_of(program: str) -> str:
    """Where an item is, for its error."""
    return f"the batch of {program!r}"


def _arguments(item: Any) -> tuple[Args, Kwargs]:
    match item:
        case dict() | Mapping():
            return (), dict(item)
        case tuple() | list():
            return tuple(item), {}
        case _:
            shown = f"{item!r:.80}"
            hint = f"; write ({shown},)" if isinstance(item, str | int | float) else ""
            raise BadProgram(f"an item of a batch is a dict or a tuple of arguments, got {shown}{hint}")


@exposed
async def run_batch_async(
    program: Startable,
    wanted: Options,
    items: Iterable[Any] | AsyncIterable[Any],
    *,
    limit: int | None,
    on_error: str,
    ordered: bool = True,
    progress: bool = False,
) -> AsyncIterator[Any]:
    """run_batch on the caller's own event loop; see SglFunction.arun_batch."""
    wanted = with_batch_budget(wanted)

    async def one(index: int, item: Any) -> AsyncProgramState:
        state = await launch_async(program, wanted, *_arguments(item), index, own_task=True)
        try:
            await state.sync()
        except asyncio.CancelledError:
            state.cancel()
            raise
        return state

    total = len(items) if isinstance(items, Sized) else None
    results = as_they_end(items, one, limit=limit, ordered=ordered, total=total, progress=progress)
    async with aclosing(results):  # type: ignore[type-var]
        async for index, item, result in results:
            if isinstance(result, BaseException):
                of_item(result, index, item, batch_of(program.name))
                trim(result)
                if on_error != "return":
                    raise result
            yield result


@exposed
def _settle(jobs: Generator[Job, None, None], on_error: str, program: str) -> Iterator[Any]:
    """A finished job's state, or its error by policy, which says of which item it is; what is no Exception
    (SystemExit, ...) is raised."""
    # Closed here and now: an exception keeps its frames, and with them a generator that nobody reads.
    with closing(jobs):
        for job in jobs:
            if job.error is None:
                yield job.state
                continue
            of_item(job.error, job.work.index, job.work.item, batch_of(program))
            if on_error == "return" and isinstance(job.error, Exception):
                trim(job.error)
                yield job.error
            else:
                raise job.error


def trace(program: Startable, wanted: Options, args: Args, kwargs: Kwargs) -> Program:
    """Follow a program's function once; its backend, where one is set, hears of the constraints only; see
    SglFunction.trace."""
    made = follow(program, args, kwargs)[1]
    if not following():
        _tell_ahead(wanted, made)
    return made


def cache(program: Startable, wanted: Options, args: Args, kwargs: Kwargs) -> bool:
    """Commit a program's constant begin; see SglFunction.cache."""
    scope = scope_of(wanted)
    if scope.backend is None:
        raise NoBackend("cache() needs a backend: pass backend=..., or call set_default_backend(...)")
    begin = leading(program, args, kwargs)
    if begin.kind == "root":
        return False
    background().run(scope.backend.commit(begin.prompt()), scope.timeout)
    return True


def plan(program: Startable, wanted: Options, args: Args, kwargs: Kwargs, price: Price | None) -> Plan:
    """What a run would ask for; see SglFunction.plan."""
    scope = scope_of(wanted)
    return planned(follow(program, args, kwargs)[1], scope.sampling, scope.backend, price)


def _tell_ahead(wanted: Options, traced: Program) -> None:
    given = global_config.default_backend if wanted.backend is None else wanted.backend
    if isinstance(given, str) and not given.startswith(("http://", "https://")):
        return  # a name: its backend, which may have a model to load, is made when something runs
    scope = scope_of(wanted)
    send(scope.backend, constraints_of(traced.nodes, scope.sampling))
