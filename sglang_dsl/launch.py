"""Starting programs: one, beside the caller, or a batch; and following one without a backend. Knows no words.

Loaded when the first program runs, and with it the executor and the event loop.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol

from sglang_dsl.backends import as_backend
from sglang_dsl.backends.base import Backend
from sglang_dsl.batch import Job, in_order
from sglang_dsl.errors import BadProgram, ProgramError
from sglang_dsl.executor import Executor
from sglang_dsl.feed import Mark
from sglang_dsl.ir import Sampling
from sglang_dsl.loop import in_thread
from sglang_dsl.run import Body, RunInfo
from sglang_dsl.settings import global_config
from sglang_dsl.state import ProgramState
from sglang_dsl.trace import Placeholder, Program, Tracer

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


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


class Startable(Protocol):
    """A program, as it is started."""

    @property
    def name(self) -> str: ...
    @property
    def signature(self) -> inspect.Signature: ...
    def fill(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]: ...
    def write(self, state: Any, args: Args, kwargs: Kwargs) -> Any: ...


@dataclass(frozen=True, slots=True)
class Scope:
    """What a program hands to the programs that it calls."""

    backend: Backend | None
    sampling: Sampling
    timeout: float | None


_SCOPE: contextvars.ContextVar[Scope | None] = contextvars.ContextVar("sglang_dsl_scope", default=None)
# Whether the running function is being traced: programs it calls are traced too.
_TRACING: contextvars.ContextVar[bool] = contextvars.ContextVar("sglang_dsl_tracing", default=False)


def launch(program: Startable, wanted: Wanted, args: Args, kwargs: Kwargs) -> ProgramState:
    """Run a program; what its function raises is raised here, in a stream where it is read."""
    if _TRACING.get():
        return _follow(program, args, kwargs)[0]
    args, kwargs = program.fill(args, kwargs)
    # Wrong arguments are refused here, also where the body would run beside the caller.
    program.signature.bind(*args, **kwargs)
    scope = _scope(wanted)
    run = RunInfo(program.name, scope.backend, scope.sampling, scope.timeout, wanted.stream)
    if wanted.stream:
        return _beside(program, scope, run, args, kwargs)
    state = ProgramState(Executor(run))
    before = _SCOPE.set(scope)
    try:
        state.ret_value = program.write(state, args, kwargs)
    except BaseException:
        state.cancel()
        raise
    finally:
        _SCOPE.reset(before)
    return state


def _scope(wanted: Wanted) -> Scope:
    """Settings < caller's program < this one."""
    outer = _SCOPE.get()
    if outer is None:
        outer = Scope(None, global_config.sampling, global_config.timeout_s)
        backend = global_config.default_backend if wanted.backend is None else wanted.backend
    else:
        backend = outer.backend if wanted.backend is None else wanted.backend
    return Scope(
        None if backend is None else as_backend(backend),
        wanted.sampling.over(outer.sampling),
        outer.timeout if wanted.timeout is None else wanted.timeout,
    )


def _beside(program: Startable, scope: Scope, run: RunInfo, args: Args, kwargs: Kwargs) -> ProgramState:
    """Begin the body on another thread; the state can be read meanwhile."""
    executor = Executor(run)
    body = executor.body = Body(Mark(executor.feed.signal))
    state = ProgramState(executor)

    def work() -> None:
        body.thread = threading.get_ident()
        _SCOPE.set(scope)
        failure: BaseException | None = None
        try:
            state.ret_value = program.write(state, args, kwargs)
        except BaseException as error:  # noqa: BLE001 - raised where the stream is read
            failure = error
            state.cancel()
        executor.finish_body(failure)

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
) -> Any:
    """Run a program for each item; see SglFunction.run_batch."""
    jobs = (functools.partial(_item, program, wanted, item) for item in items)
    total = len(items) if isinstance(items, list | tuple) else None
    results = _settle(in_order(jobs, limit=limit, lazy=lazy, total=total, progress=progress), on_error)
    return results if lazy else list(results)


def _item(program: Startable, wanted: Wanted, item: Any) -> ProgramState:
    match item:
        case Mapping():
            return launch(program, wanted, (), dict(item))
        case tuple() | list():
            return launch(program, wanted, tuple(item), {})
        case _:
            raise BadProgram(f"an item of a batch is a dict or a tuple of arguments, got {item!r:.80}")


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


def trace(program: Startable, args: Args, kwargs: Kwargs) -> Program:
    """Follow a program's function once without a backend; see SglFunction.trace."""
    return _follow(program, args, kwargs)[1]


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
