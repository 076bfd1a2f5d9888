"""Starting one program, beside its caller or not, and following one without a backend. A program that is
started takes over its own options, the settings, and the scope of the program that calls it.

Loaded when the first program runs, and with it the executor and the event loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import functools
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Thread
from typing import Any, TypeVar

import msgspec

from sglang_dsl.backends import as_backend
from sglang_dsl.backends.base import Backend
from sglang_dsl.budgets import Price
from sglang_dsl.compiler.follow import CALLED, Args, Kwargs, Startable, follow, following, leading
from sglang_dsl.compiler.planning import Plan, constraints_of, planned, precompile
from sglang_dsl.compiler.trace import Program
from sglang_dsl.concurrency.loop import background, in_thread
from sglang_dsl.errors import NoBackend, ProgramCancelled, ProgramError
from sglang_dsl.errors.tracebacks import user_line
from sglang_dsl.execution import finished as finished  # how states are pickled
from sglang_dsl.interpreter.executor import Executor
from sglang_dsl.interpreter.metering import Meter
from sglang_dsl.interpreter.parameters import NO_SAMPLING, Options
from sglang_dsl.interpreter.record import records
from sglang_dsl.interpreter.run import Body, Mark, RunInfo, Scope, Task, stop_here
from sglang_dsl.ir.syntax import INSIDE
from sglang_dsl.settings import global_config
from sglang_dsl.state.async_state import AsyncProgramState
from sglang_dsl.state.program_state import ProgramState

T = TypeVar("T")
VERBOSE = 2
"""From this value of global_config.verbosity on, a run prints its text."""


# -- scopes --------------------------------------------------------------------------------------------------


_Weakly = tuple[Scope, Callable[[], "Backend | None"], Callable[[], "RunInfo | None"]]


class _Current:
    """The scope of the running code. It keeps neither its backend nor its run alive: timers and connections
    hold the context they were created in, and outlive the run."""

    def __init__(self) -> None:
        self._scope: contextvars.ContextVar[_Weakly | None] = contextvars.ContextVar(
            "sglang_dsl_scope", default=None
        )

    def set(self, scope: Scope) -> contextvars.Token[_Weakly | None]:
        rest = msgspec.structs.replace(scope, backend=None, caller=None)
        return self._scope.set((rest, _weakly(scope.backend), _weakly(scope.caller)))

    def reset(self, before: contextvars.Token[_Weakly | None]) -> None:
        self._scope.reset(before)

    def get(self) -> Scope | None:
        held = self._scope.get()
        if held is None:
            return None
        rest, backend, caller = held
        return msgspec.structs.replace(rest, backend=backend(), caller=caller())


def _weakly(thing: T | None) -> Callable[[], T | None]:
    return _nothing if thing is None else weakref.ref(thing)


def _nothing() -> None:
    return None


SCOPE = _Current()


def scope_of(options: Options) -> Scope:
    """The scope of a program: settings < calling program < its own options."""
    outer = SCOPE.get()
    if outer is None:
        outer = Scope(None, global_config.sampling, global_config.timeout_s)
        backend = global_config.default_backend if options.backend is None else options.backend
    else:
        backend = outer.backend if options.backend is None else options.backend
    record = outer.record
    if options.cache != "off" and options.cache_dir is not None:
        record = records.at(options.cache_dir, options.cache)  # type: ignore[arg-type]
    meters = (*outer.meters, *options.meters)
    return Scope(
        backend if backend is None or isinstance(backend, Backend) else as_backend(backend),
        outer.sampling if options.sampling is NO_SAMPLING else options.sampling.over(outer.sampling),
        outer.timeout if options.timeout is None else options.timeout,
        meters if options.budget is None else (*meters, Meter(options.budget)),
        record,
        not options.use_thread,
        outer.caller,
    )


def with_batch_budget(options: Options) -> Options:
    """The options of a batch's items, with a meter for the budget of all of them, which counts from now
    on."""
    if options.batch_budget is None:
        return options
    meters = (*options.meters, Meter(options.batch_budget))
    return dataclasses.replace(options, batch_budget=None, meters=meters)


# A thread gets no context variables from the one that starts it, nor does a pool's work: programs called
# there would know neither budget nor backend of their caller, and would not stop with it.
_LIBRARIES = frozenset({"asyncio", "concurrent", "runtime", "sglang_dsl", "tqdm"})


def inside_a_program() -> bool:
    """Whether this runs inside the function of a program."""
    return SCOPE.get() is not None or following()


INSIDE.append(inside_a_program)


def _started(start: Callable[[Thread], None]) -> Callable[[Thread], None]:
    @functools.wraps(start)
    def begin(self: Thread) -> None:
        starter = str(sys._getframe(1).f_globals.get("__name__")).partition(".")[0]
        if inside_a_program() and starter not in _LIBRARIES:
            self.run = functools.partial(contextvars.copy_context().run, self.run)  # type: ignore[method-assign]
        start(self)

    return begin


def _submitted(submit: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(submit)
    def begin(self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if inside_a_program():
            return submit(self, contextvars.copy_context().run, fn, *args, **kwargs)
        return submit(self, fn, *args, **kwargs)

    return begin


def follow_into_threads() -> None:
    """From now on, threads that a program's function starts, and what it submits to a ThreadPoolExecutor, run
    in the program's context. Other threads are not changed."""
    if not hasattr(Thread.start, "__wrapped__"):
        Thread.start = _started(Thread.start)  # type: ignore[method-assign, assignment]
        ThreadPoolExecutor.submit = _submitted(ThreadPoolExecutor.submit)  # type: ignore[method-assign]


follow_into_threads()


# -- running -------------------------------------------------------------------------------------------------


def launch(
    program: Startable, options: Options, args: Args, kwargs: Kwargs, index: int | None = None
) -> ProgramState:
    """Run a program. Exceptions of its function are raised here, in a stream where it is read. `index`: the
    item's position in a batch."""
    if CALLED.get() is not None:  # the calling program is followed
        return follow(program, args, kwargs)[0]
    args, kwargs = program.fill(args, kwargs)
    # Wrong arguments are refused here, also if the body runs beside the caller.
    program.check(args, kwargs)
    scope = scope_of(options)
    if options.stream:
        return _beside(program, scope, options, index, args, kwargs)
    run = scope.run(program.name, index, stream=False, speculation=options.num_api_spec_tokens)
    state = ProgramState(Executor(run))
    if program.is_async:
        background().run(_written(program, scope.inside(run), run, state, args, kwargs))
        _print_text(state)
        return state
    before = SCOPE.set(scope.inside(run))
    try:
        run.ret_value = program.write(state, args, kwargs)
    except BaseException:
        state.cancel()
        raise
    finally:
        SCOPE.reset(before)
    _print_text(state)
    return state


def _print_text(state: ProgramState) -> None:
    """The text of a verbose run. Errors are left to its readers."""
    if global_config.verbosity >= VERBOSE:
        with suppress(ProgramError):
            print(state.text())


async def launch_async(
    program: Startable,
    options: Options,
    args: Args,
    kwargs: Kwargs,
    index: int | None = None,
    in_its_task: bool = False,
) -> AsyncProgramState:
    """Run a program from any event loop: an async function on that loop, an ordinary one on a thread.
    Exceptions of the function are raised here, in a stream where it is read; cancelling cancels the program.
    `in_its_task`: the calling task runs this program alone."""
    if CALLED.get() is not None:
        return _async_state(follow(program, args, kwargs)[0])
    args, kwargs = program.fill(args, kwargs)
    program.check(args, kwargs)
    scope = scope_of(options)
    if options.stream:
        return _async_state(_beside(program, scope, options, index, args, kwargs))
    speculation = options.num_api_spec_tokens
    make_run = functools.partial(scope.run, program.name, index, stream=False, speculation=speculation)
    if not program.is_async:
        return await _on_a_thread(program, scope, make_run, args, kwargs)
    run = make_run()
    scope = scope.inside(run)
    state = ProgramState(Executor(run))
    if in_its_task:
        await _written(program, scope, run, state, args, kwargs)
        await _print_text_async(state)
        return _async_state(state)
    # A task of its own keeps the scope to itself.
    task = asyncio.create_task(_written(program, scope, run, state, args, kwargs))
    try:
        await task
    except asyncio.CancelledError:
        if task.done() and not task.cancelled():
            task.exception()  # it failed in the moment in which this was cancelled
        raise
    await _print_text_async(state)
    return _async_state(state)


async def _on_a_thread(
    program: Startable, scope: Scope, make_run: Callable[[], RunInfo], args: Args, kwargs: Kwargs
) -> AsyncProgramState:
    """launch_async() of an ordinary function."""
    stop, context = stop_here(), contextvars.copy_context()
    context.run(stop.inside)
    run = context.run(make_run)
    state = ProgramState(Executor(run))
    ended = Mark()

    def work() -> None:
        error: BaseException | None = None
        try:
            context.run(SCOPE.set, scope.inside(run))
            run.ret_value = context.run(program.write, state, args, kwargs)
        except BaseException as raised:  # noqa: BLE001 - raised where it is awaited
            error = raised
        ended.reach(state.core.so_far(), error, 0)

    in_thread(work)
    try:
        await ended.signal.wait_async(lambda: ended.done)
        ended.result()
    except BaseException:
        # The thread cannot be ended, but nothing that it requests from now on is done.
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
    run: RunInfo,
    state: ProgramState,
    args: Args,
    kwargs: Kwargs,
    body: Body | None = None,
) -> None:
    """Run an async function in a task of its own. `body`: if it runs beside the reader."""
    SCOPE.set(scope)
    if body is not None:
        body.enter()
    try:
        run.ret_value = await program.write(_async_state(state), args, kwargs)
    except BaseException as error:
        if body is not None and not isinstance(error, asyncio.CancelledError):
            run.failure = error
        state.cancel()
        raise


def _async_state(state: ProgramState) -> AsyncProgramState:
    return AsyncProgramState(state.core, state)


def _beside(
    program: Startable, scope: Scope, options: Options, index: int | None, args: Args, kwargs: Kwargs
) -> ProgramState:
    """Begin the body on another thread or task; the state can be read meanwhile. The body has a state object
    of its own, so that the reader's is garbage when its last reader is gone; then everything is stopped."""
    stop, context = stop_here(), contextvars.copy_context()
    context.run(stop.inside)
    speculation = options.num_api_spec_tokens
    make_run = functools.partial(scope.run, program.name, index, stream=True, speculation=speculation)
    executor = Executor(context.run(make_run))
    scope = scope.inside(executor.run)
    body = executor.body = Body(Mark(executor.output), stop=stop)
    state, written = ProgramState(executor), ProgramState(executor)
    background().finalize(state, stop.cancel)

    async def work_async() -> None:
        failure: BaseException | None = None
        task = Task(asyncio.current_task())
        try:
            stop.enter(task)
            await _written(program, scope, executor.run, written, args, kwargs, body)
        except asyncio.CancelledError as error:
            message = "the program was cancelled while its function ran"
            failure = ProgramCancelled(message, program=program.name, source=user_line(error))
        except BaseException as error:  # noqa: BLE001 - raised where the stream is read
            failure = error
        executor.finish_body(failure)
        if failure is None:
            await _print_text_async(written)

    def work() -> None:
        body.enter()
        SCOPE.set(scope)
        failure: BaseException | None = None
        try:
            executor.run.ret_value = program.write(written, args, kwargs)
        except BaseException as error:  # noqa: BLE001 - raised where the stream is read
            executor.run.failure = failure = error
            written.cancel()
        executor.finish_body(failure)
        if failure is None:
            _print_text(written)

    if program.is_async:
        background().start(work_async)
    else:
        in_thread(work)
    return state


# -- following -----------------------------------------------------------------------------------------------


def trace(program: Startable, options: Options, args: Args, kwargs: Kwargs) -> Program:
    """Follow a program's function once; its backend, if one is set, only compiles the constraints. See
    SglFunction.trace."""
    traced = follow(program, args, kwargs)[1]
    if not following():
        precompile_constraints(options, traced)
    return traced


def cache(program: Startable, options: Options, args: Args, kwargs: Kwargs) -> bool:
    """Put the constant text at a program's begin into the prefix cache; see SglFunction.cache."""
    scope = scope_of(options)
    if scope.backend is None:
        raise NoBackend("cache() needs a backend: pass backend=..., or call set_default_backend(...)")
    begin = leading(program, args, kwargs)
    if begin.kind == "root":
        return False
    background().run(scope.backend.commit(begin.prompt()), scope.timeout)
    return True


def plan(program: Startable, options: Options, args: Args, kwargs: Kwargs, price: Price | None) -> Plan:
    """What a run would request; see SglFunction.plan."""
    scope = scope_of(options)
    return planned(follow(program, args, kwargs)[1], scope.sampling, scope.backend, price)


def precompile_constraints(options: Options, traced: Program) -> None:
    """Compile the constraints of a traced program on its backend, if one is set, in the background."""
    backend = global_config.default_backend if options.backend is None else options.backend
    if isinstance(backend, str) and not backend.startswith(("http://", "https://")):
        return  # a name: its backend, which may load a model, is created when something runs
    scope = scope_of(options)
    if scope.backend is not None:
        precompile(scope.backend, constraints_of(traced.nodes, scope.sampling))
