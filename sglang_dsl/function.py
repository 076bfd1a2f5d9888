"""@function: a Python function that writes to `s` becomes a program: run, run_batch, stream, bind, trace.

Defaults < caller's program < this program < this call. Words of sampling that are also names of the
function's own parameters are the function's. Knows no backend in particular.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, overload

from sglang_dsl import lower
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
from sglang_dsl.trace import TRACING, Placeholder, Program, Tracer


@dataclass(frozen=True, slots=True)
class Options:
    """How a program runs, apart from its arguments. `timeout`: seconds per call of the backend."""

    backend: Any = None
    stream: bool = False
    timeout: float | None = None
    sampling: Sampling = field(default_factory=Sampling)

    def with_words(self, words: Mapping[str, Any]) -> Options:
        """These options with run's words over them. Raises BadProgram."""
        said = lower.sampling({word: value for word, value in words.items() if word in lower.WORDS})
        timeout = words.get("timeout", self.timeout)
        if timeout is not None and not timeout > 0:
            raise BadProgram(f"timeout takes seconds above 0, got {timeout!r}")
        backend = words.get("backend")
        return Options(
            self.backend if backend is None else backend,
            bool(words.get("stream", self.stream)),
            timeout,
            said.over(self.sampling),
        )


RUN_WORDS = frozenset({"backend", "stream", "timeout", *lower.WORDS})


@dataclass(frozen=True, slots=True)
class Scope:
    """What a program hands to the programs that it calls."""

    backend: Backend | None
    sampling: Sampling
    timeout: float | None


_SCOPE: contextvars.ContextVar[Scope | None] = contextvars.ContextVar("sglang_dsl_scope", default=None)


class SglFunction:
    """A program. Calling it runs it. Works as a method too: the state is the first parameter after `self`."""

    def __init__(
        self,
        func: Callable[..., Any],
        *,
        options: Options | None = None,
        bound: Mapping[str, Any] | None = None,
        owner: tuple[object, ...] = (),
    ) -> None:
        if not callable(func):
            raise BadProgram(f"@function takes a function, got {func!r}")
        if inspect.iscoroutinefunction(func) or inspect.isgeneratorfunction(func):
            raise BadProgram(
                f"{func!r} is a coroutine or generator function; a program is an ordinary function"
            )
        functools.update_wrapper(self, func)
        self._func = func
        self._options = options or Options()
        self._bound = dict(bound or {})
        self._owner = owner
        parameters = list(inspect.signature(func).parameters.values())
        if not parameters or parameters[0].kind in (
            inspect.Parameter.KEYWORD_ONLY,
            inspect.Parameter.VAR_KEYWORD,
        ):
            raise BadProgram(f"{self._name} needs a first parameter: the state it writes to")
        first = parameters[0]
        takes_all = first.kind is inspect.Parameter.VAR_POSITIONAL
        own = parameters if takes_all else parameters[1 + len(owner) :]
        self._signature = inspect.Signature(own)

    @property
    def _name(self) -> str:
        return str(getattr(self._func, "__qualname__", repr(self._func)).replace("<locals>.", ""))

    def _copy(self, **changes: Any) -> SglFunction:
        given: dict[str, Any] = {"options": self._options, "bound": self._bound, "owner": self._owner}
        return SglFunction(self._func, **(given | changes))

    def __get__(self, instance: object, owner: type | None = None) -> SglFunction:
        return self if instance is None else self._copy(owner=(instance,))

    def __repr__(self) -> str:
        return f"<program {self._name}{self._signature}>"

    # -- arguments -------------------------------------------------------------------------------------------

    def bind(self, **arguments: Any) -> SglFunction:
        """This program with some arguments given; those of a call go over them. Raises BadProgram for a name
        the function does not take."""
        parameters = self._signature.parameters
        if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
            unknown = [name for name in arguments if name not in parameters]
            if unknown:
                known = ", ".join(parameters) or "none"
                raise BadProgram(f"{self._name} takes no argument {', '.join(unknown)}; known: {known}")
        return self._copy(bound=self._bound | arguments)

    def options(self, **words: Any) -> SglFunction:
        """This program with other defaults: run's words (backend, timeout, temperature, ...). Raises
        BadProgram."""
        if unknown := sorted(set(words) - RUN_WORDS):
            raise BadProgram(f"{', '.join(unknown)}: unknown; known: {', '.join(sorted(RUN_WORDS))}")
        return self._copy(options=self._options.with_words(words))

    def _split(self, kwargs: dict[str, Any]) -> tuple[Options, dict[str, Any]]:
        """Words of run, and the function's own arguments. A name that is both is the function's."""
        own = self._signature.parameters
        words = {k: v for k, v in kwargs.items() if k in RUN_WORDS and k not in own}
        rest = {k: v for k, v in kwargs.items() if k not in words}
        return (self._options.with_words(words) if words else self._options), rest

    def _arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Call arguments with the bound ones filled in. Raises TypeError, as the function itself would."""
        if not self._bound:
            return args, kwargs
        given = self._signature.bind_partial(*args, **kwargs).arguments
        extra = next(
            (p.name for p in self._signature.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD),
            None,
        )
        taken = {*given, *(given.get(extra, {}) if extra else {})}
        filled = self._signature.bind_partial(
            *args, **kwargs, **{k: v for k, v in self._bound.items() if k not in taken}
        )
        return filled.args, filled.kwargs

    # -- running ---------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> ProgramState:
        """The same as run; inside a program that is being traced, traces."""
        return self.run(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> ProgramState:
        """Run the program. Takes the function's arguments, and: backend, stream, timeout (seconds per call of
        the backend), and gen's sampling words as defaults for all of its generations.

        Returns when the function has returned, which may be before its generations are done: reading waits.
        With stream=True returns at once; the function runs beside the caller. What the function itself raises
        is raised here, in a stream where it is read.
        """
        options, rest = self._split(kwargs)
        return self._launch(options, args, rest)

    def stream(self, *args: Any, **kwargs: Any) -> ProgramState:
        """run with stream=True."""
        options, rest = self._split(kwargs)
        return self._launch(replace(options, stream=True), args, rest)

    def _launch(self, options: Options, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ProgramState:
        if TRACING.get():
            return self._traced(args, kwargs)[0]
        args, kwargs = self._arguments(args, kwargs)
        # Wrong arguments are refused here, also where the body would run beside the caller.
        self._signature.bind(*args, **kwargs)
        outer = _SCOPE.get()
        backend = options.backend
        if backend is None:
            backend = outer.backend if outer is not None else global_config.default_backend
        timeout = options.timeout
        if timeout is None:
            timeout = outer.timeout if outer is not None else global_config.timeout_s
        scope = Scope(
            None if backend is None else as_backend(backend),
            options.sampling.over(outer.sampling if outer is not None else global_config.sampling),
            timeout,
        )
        run = RunInfo(self._name, scope.backend, scope.sampling, scope.timeout, options.stream)
        if options.stream:
            return self._begin_beside(scope, run, args, kwargs)
        state = ProgramState(Executor(run))
        before = _SCOPE.set(scope)
        try:
            state.ret_value = self._func(*self._owner, state, *args, **kwargs)
        except BaseException:
            state.cancel()
            raise
        finally:
            _SCOPE.reset(before)
        return state

    def _begin_beside(
        self, scope: Scope, run: RunInfo, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ProgramState:
        executor = Executor(run)
        body = executor.body = Body(Mark(executor.feed.signal))
        state = ProgramState(executor)

        def work() -> None:
            body.thread = threading.get_ident()
            _SCOPE.set(scope)
            failure: BaseException | None = None
            try:
                state.ret_value = self._func(*self._owner, state, *args, **kwargs)
            except BaseException as error:  # noqa: BLE001 - raised where the stream is read
                failure = error
                state.cancel()
            executor.finish_body(failure)

        in_thread(work)
        return state

    def run_batch(
        self,
        batch_kwargs: Iterable[Any],
        *,
        num_threads: int | str = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        on_error: str = "raise",
        **words: Any,
    ) -> Any:
        """Run the program for each item (a dict of arguments, or a tuple or list of them), many at once.

        Gives a list of finished states in input order; with generator_style an iterator of them, which reads
        the items as it goes. on_error="return" puts a failed item's exception in its place; "raise" raises
        the first one in order and cancels the rest. num_threads: how many items may be under way at once.
        Other words as for run.
        """
        if on_error not in ("raise", "return"):
            raise BadProgram(f'on_error is "raise" or "return", got {on_error!r}')
        if num_threads != "auto" and not (isinstance(num_threads, int) and num_threads >= 1):
            raise BadProgram(f'num_threads is "auto" or a number of at least 1, got {num_threads!r}')
        if unknown := sorted(set(words) - RUN_WORDS):
            raise TypeError(f"run_batch got unexpected words: {', '.join(unknown)}")
        if isinstance(batch_kwargs, str | Mapping):
            raise BadProgram("run_batch takes a list of items, one per run")
        options = self._options.with_words(words)
        if options.stream:
            raise BadProgram("run_batch does not stream; run the items with stream=True instead")
        jobs = (functools.partial(self._item, options, item) for item in batch_kwargs)
        total = len(batch_kwargs) if isinstance(batch_kwargs, list | tuple) else None
        limit = num_threads if isinstance(num_threads, int) else None
        results = _settle(
            in_order(jobs, limit=limit, lazy=generator_style, total=total, progress=progress_bar), on_error
        )
        return results if generator_style else list(results)

    def _item(self, options: Options, item: Any) -> ProgramState:
        match item:
            case Mapping():
                return self._launch(options, (), dict(item))
            case tuple() | list():
                return self._launch(options, tuple(item), {})
            case _:
                raise BadProgram(f"an item of a batch is a dict or a tuple of arguments, got {item!r:.80}")

    # -- compiling -------------------------------------------------------------------------------------------

    def trace(self, *args: Any, **kwargs: Any) -> Program:
        """Follow the function once without a backend. Arguments not given stand as "{name}". Raises
        BadProgram where the function needs a real value to go on."""
        _, rest = self._split(kwargs)
        return self._traced(args, rest)[1]

    compile = trace

    def _traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[ProgramState, Program]:
        args, kwargs = self._arguments(args, kwargs)
        given = self._signature.bind_partial(*args, **kwargs)
        missing: list[str] = []
        for name, parameter in self._signature.parameters.items():
            ordinary = parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            if ordinary and name not in given.arguments and parameter.default is parameter.empty:
                given.arguments[name] = Placeholder(name)
                missing.append(name)
        tracer = Tracer(self._name)
        state = ProgramState(tracer)
        before = TRACING.set(True)
        try:
            state.ret_value = self._func(*self._owner, state, *given.args, **given.kwargs)
        except (BadProgram, ProgramError):
            raise
        except Exception as error:
            raise BadProgram(
                f"{self._name} cannot be traced without a run: {type(error).__name__}: {error}; give it "
                "arguments it can work with, or keep decisions on generated text out of it"
            ) from error
        finally:
            TRACING.reset(before)
        return state, Program(self._name, tracer.body(), tuple(missing))


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


@overload
def function(func: Callable[..., Any], /) -> SglFunction: ...


@overload
def function(**words: Any) -> Callable[[Callable[..., Any]], SglFunction]: ...


def function(func: Callable[..., Any] | None = None, /, **words: Any) -> Any:
    """Make a program of a function: @function, or @function(temperature=0, ...) with run's words as its
    defaults."""
    if func is not None:
        if words:
            return SglFunction(func).options(**words)
        return SglFunction(func)
    return lambda inner: SglFunction(inner).options(**words)
