"""What a program that is started takes over: its own words, the settings, and what the program that calls it
hands down. Starts nothing.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Thread
from typing import Any, TypeVar

import msgspec

from sglang_dsl.backends import as_backend
from sglang_dsl.backends.base import Backend
from sglang_dsl.compiler.follow import following
from sglang_dsl.errors import BadProgram
from sglang_dsl.interpreter.metering import Meter
from sglang_dsl.interpreter.parameters import Options
from sglang_dsl.interpreter.record import CallLog, records
from sglang_dsl.interpreter.run import RunInfo
from sglang_dsl.ir import Sampling
from sglang_dsl.ir.syntax import INSIDE
from sglang_dsl.settings import global_config

T = TypeVar("T")
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class Scope(msgspec.Struct, frozen=True, eq=False):
    """What a program hands to the programs that it calls. `caller`: the run that calls."""

    backend: Backend | None
    sampling: Sampling
    timeout: float | None
    meters: tuple[Meter, ...] = ()
    record: CallLog | None = None
    inline: bool = False
    caller: RunInfo | None = None

    def inside(self, run: RunInfo) -> Scope:
        """This scope for the function of `run`: the programs that it calls are part of what it costs."""
        return msgspec.structs.replace(self, caller=run)

    def run(
        self, program: str, index: int | None, *, stream: bool, speculation: int | None = None
    ) -> RunInfo:
        """What a run in this scope shares. Its seed is no default of its calls: each derives its own. Raises
        BadProgram for a stream that is to speculate."""
        if stream and speculation is not None and self.backend is not None and self.backend.speculates:
            raise BadProgram(
                f"{program} has num_api_spec_tokens, so its values are known only when a whole reply is "
                "there: it cannot stream; run it, or use .options(num_api_spec_tokens=None).stream(...)"
            )
        return RunInfo(
            program,
            self.backend,
            self.sampling if self.sampling.seed is None else dataclasses.replace(self.sampling, seed=None),
            self.timeout,
            stream,
            self.sampling.seed,
            self.meters,
            self.record,
            index,
            self.inline,
            None if stream else speculation,
            self.caller,
        )


_Handed = tuple[Scope, Callable[[], "Backend | None"], Callable[[], "RunInfo | None"]]


class _Current:
    """The scope of the code that runs. It keeps neither its backend nor its run alive: timers and connections
    hold the context they were made in, and outlive the run."""

    def __init__(self) -> None:
        self._handed: contextvars.ContextVar[_Handed | None] = contextvars.ContextVar(
            "sglang_dsl_scope", default=None
        )

    def set(self, scope: Scope) -> contextvars.Token[_Handed | None]:
        rest = msgspec.structs.replace(scope, backend=None, caller=None)
        return self._handed.set((rest, _held(scope.backend), _held(scope.caller)))

    def reset(self, before: contextvars.Token[_Handed | None]) -> None:
        self._handed.reset(before)

    def get(self) -> Scope | None:
        handed = self._handed.get()
        if handed is None:
            return None
        rest, backend, caller = handed
        return msgspec.structs.replace(rest, backend=backend(), caller=caller())


def _held(thing: T | None) -> Callable[[], T | None]:
    return _nothing if thing is None else weakref.ref(thing)


def _nothing() -> None:
    return None


SCOPE = _Current()


def scope_of(wanted: Options) -> Scope:
    """Settings < caller's program < this one."""
    outer = SCOPE.get()
    if outer is None:
        outer = Scope(None, global_config.sampling, global_config.timeout_s)
        backend = global_config.default_backend if wanted.backend is None else wanted.backend
    else:
        backend = outer.backend if wanted.backend is None else wanted.backend
    record = outer.record
    if wanted.cache != "off" and wanted.cache_dir is not None:
        record = records.at(wanted.cache_dir, wanted.cache)  # type: ignore[arg-type]
    meters = (*outer.meters, *wanted.meters)
    return Scope(
        None if backend is None else as_backend(backend),
        wanted.sampling.over(outer.sampling),
        outer.timeout if wanted.timeout is None else wanted.timeout,
        meters if wanted.budget is None else (*meters, Meter(wanted.budget)),
        record,
        not wanted.use_thread,
        outer.caller,
    )


def with_batch_budget(wanted: Options) -> Options:
    """How the items of a batch are to run that has a budget for all of them, which counts from now on."""
    if wanted.batch_budget is None:
        return wanted
    meters = (*wanted.meters, Meter(wanted.batch_budget))
    return dataclasses.replace(wanted, batch_budget=None, meters=meters)


# A thread gets no context variables of the one that starts it, nor does a pool's work: programs that are
# called there would know no budget, no backend of their caller, and would not stop with it.
_NOT_A_USERS = frozenset({"asyncio", "concurrent", "runtime", "sglang_dsl", "tqdm"})


def inside_a_program() -> bool:
    """Whether the function of a program calls this, or what it called."""
    return SCOPE.get() is not None or following()


INSIDE.append(inside_a_program)


def _started(start: Callable[[Thread], None]) -> Callable[[Thread], None]:
    @functools.wraps(start)
    def begin(self: Thread) -> None:
        starter = str(sys._getframe(1).f_globals.get("__name__")).partition(".")[0]
        if inside_a_program() and starter not in _NOT_A_USERS:
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
    """From now on, threads that a program's function starts, and what it gives to a ThreadPoolExecutor, run
    in the program's context. Elsewhere they run as ever."""
    if not hasattr(Thread.start, "__wrapped__"):
        Thread.start = _started(Thread.start)  # type: ignore[method-assign, assignment]
        ThreadPoolExecutor.submit = _submitted(ThreadPoolExecutor.submit)  # type: ignore[method-assign]
