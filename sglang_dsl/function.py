"""@function: turns a Python function that writes to `s` into a program with run, run_batch, stream, bind
and trace.

Options of a call go over those of this program, which go over the calling program's, which go over the
defaults. If an option of run has the same name as a parameter of the function, the argument goes to the
function. Knows no backend in particular.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, Unpack, cast, overload

from sglang_dsl.errors import BadProgram, near
from sglang_dsl.errors.tracebacks import exposed, public
from sglang_dsl.interpreter.parameters import RUN_OPTIONS as RUN_OPTIONS
from sglang_dsl.interpreter.parameters import Options as Options

if TYPE_CHECKING:
    import typing_extensions  # has parameters with defaults before Python 3.13

    from sglang_dsl.budgets import Price
    from sglang_dsl.compiler.planning import Plan
    from sglang_dsl.compiler.trace import Program
    from sglang_dsl.frontend.static_types import (
        Decorator,
        RunArguments,
        Signature,
        calls_as_it_runs,
        runs,
        runs_async,
        runs_batches,
        runs_batches_async,
        streams_async,
    )
    from sglang_dsl.state.async_state import AsyncProgramState, Starting
    from sglang_dsl.state.program_state import ProgramState
    from sglang_dsl.views.notebook import Page

    P = typing_extensions.ParamSpec("P", default=...)
    Q = ParamSpec("Q")
    R = typing_extensions.TypeVar("R", covariant=True, default=Any)
else:
    P, R = ParamSpec("P"), TypeVar("R", covariant=True)
    Signature = Generic

    def runs(method):
        return method

    calls_as_it_runs = runs_async = streams_async = runs_batches = runs_batches_async = runs


_BATCH_ARGUMENTS = (
    "num_threads",
    "progress_bar",
    "generator_style",
    "on_error",
    "ordered",
    "resume",
    "engine",
)
_STATES = frozenset({"s", "state"})
"""Names of first parameters that certainly are the state."""
_MOST_SHAPES = 64


@public
class SglFunction(Signature[P, R]):
    """A program, made from a function by @function. Calling it runs it.

    It also works as a method: the state is then the first parameter after `self`. P are the function's
    parameters without the state, R is its return type.
    """

    def __init__(
        self,
        func: Callable[..., Any],
        *,
        options: Options | None = None,
        bound: Mapping[str, Any] | None = None,
        owner: tuple[object, ...] = (),
    ) -> None:
        if not callable(func):
            raise BadProgram(f"@function takes a function: write @function above its def; got {func!r:.80}")
        if inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func):
            raise BadProgram(f"{func!r} is a generator function; a program is an ordinary or async function")
        self.is_async = inspect.iscoroutinefunction(func)
        functools.update_wrapper(self, func)
        self._func = func
        self._options = options or Options()
        self._bound = dict(bound or {})
        self._owner = owner
        self._traced: Program | None = None
        parameters = list(inspect.signature(func).parameters.values())
        if not parameters or parameters[0].kind in (
            inspect.Parameter.KEYWORD_ONLY,
            inspect.Parameter.VAR_KEYWORD,
        ):
            raise BadProgram(
                f"{self.name} needs a first parameter, the state it writes to: def {func.__name__}(s, ...)"
            )
        takes_all = parameters[0].kind is inspect.Parameter.VAR_POSITIONAL
        self.signature = inspect.Signature(parameters if takes_all else parameters[1 + len(owner) :])
        self._accepted: set[tuple[int, tuple[str, ...]]] = set()

    @property
    def name(self) -> str:
        """The function's qualified name, as used in errors, seeds and records."""
        return str(getattr(self._func, "__qualname__", repr(self._func)).replace("<locals>.", ""))

    @property
    def func(self) -> Callable[..., Any]:
        """The original function."""
        return self._func

    def write(self, state: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the original function on a state."""
        return self._func(*self._owner, state, *args, **kwargs)

    def _copy(self, **changes: Any) -> SglFunction[..., R]:
        state: dict[str, Any] = {"options": self._options, "bound": self._bound, "owner": self._owner}
        return SglFunction(self._func, **(state | changes))

    def __reduce_ex__(self, protocol: Any, /) -> Any:
        """A program of a module is pickled by its name there, as functions are, its copies by that name and
        their changes, and others as any object, which cloudpickle can."""
        named: Any = sys.modules.get(self._func.__module__)
        for part in self._func.__qualname__.split("."):
            named = getattr(named, part, None)
        if isinstance(named, SglFunction) and named._func is self._func and named.__module__ != "__main__":
            if named is self:
                return self._func.__qualname__
            changes = {"options": self._options, "bound": self._bound, "owner": self._owner}
            return functools.partial(named._copy, **changes), ()
        return super().__reduce_ex__(protocol)

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> SglFunction[P, R]: ...

    @overload
    def __get__(
        self: SglFunction[Concatenate[Any, Q], R], instance: object, owner: type | None = None
    ) -> SglFunction[Q, R]: ...

    def __get__(self, instance: object, owner: type | None = None) -> SglFunction[..., Any]:
        return self if instance is None else self._copy(owner=(instance,))

    def __repr__(self) -> str:
        return f"<program {self.name}{self.signature}>"

    def _page(self) -> Page:
        from sglang_dsl.compiler.trace import page_of

        return page_of(f"{self.name}{self.signature}", self._func, self._traced)

    def _repr_html_(self) -> str:
        return self._page().html

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return self._page().bundle()

    # -- arguments -------------------------------------------------------------------------------------------

    def bind(self, **arguments: Any) -> SglFunction[..., R]:
        """A copy of this program with some arguments filled in. Arguments of a call override them. Raises
        BadProgram for a name that the function does not take."""
        parameters = self.signature.parameters
        if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
            unknown = [name for name in arguments if name not in parameters]
            if unknown:
                known = ", ".join(parameters) or "none"
                hint = near(unknown[0], parameters)
                raise BadProgram(f"{self.name} has no parameter {', '.join(unknown)}; known: {known}{hint}")
        return self._copy(bound=self._bound | arguments)

    def options(self, **kwargs: Unpack[RunArguments]) -> SglFunction[P, R]:
        """A copy of this program with other defaults for the keyword arguments of run (backend, timeout,
        temperature, ...). Raises BadProgram."""
        if unknown := sorted(set(kwargs) - RUN_OPTIONS):
            known, hint = ", ".join(sorted(RUN_OPTIONS)), near(unknown[0], RUN_OPTIONS)
            raise BadProgram(f"unknown option {', '.join(unknown)}{hint}; known: {known}")
        options = self._options.updated(cast("dict[str, Any]", kwargs))
        return cast("SglFunction[P, R]", self._copy(options=options))

    def _split(self, kwargs: dict[str, Any]) -> tuple[Options, dict[str, Any]]:
        """Keyword arguments of run, and the function's own. A name that is both is the function's."""
        parameters = self.signature.parameters
        changes = {k: v for k, v in kwargs.items() if k in RUN_OPTIONS and k not in parameters}
        rest = {k: v for k, v in kwargs.items() if k not in changes}
        return self._updated(changes) if changes else self._options, rest

    def _updated(self, changes: Mapping[str, Any]) -> Options:
        """This program's options, with keyword arguments of run over them. Raises BadProgram."""
        if len(changes) == 1 and changes.get("backend") is not None:
            return replace(self._options, backend=changes["backend"])
        options = self._options.updated(changes)
        if self.is_async and not options.use_thread:
            raise BadProgram(f"{self.name} is async: use_thread=False would block its event loop")
        return options

    def fill(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, together with the bound ones. Raises TypeError, as the function itself
        would."""
        if not self._bound:
            return args, kwargs
        passed = self.signature.bind_partial(*args, **kwargs).arguments
        extra = next(
            (p.name for p in self.signature.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD),
            None,
        )
        names = {*passed, *(passed.get(extra, {}) if extra else {})}
        filled = self.signature.bind_partial(
            *args, **kwargs, **{k: v for k, v in self._bound.items() if k not in names}
        )
        return filled.args, filled.kwargs

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises TypeError if the function does not take these arguments. This depends only on their
        number and names, so each shape is checked once."""
        shape = (len(args), tuple(kwargs))
        if shape not in self._accepted:
            try:
                self.signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{self.name}: {error}{self._meant(args, kwargs)}") from None
            if len(self._accepted) < _MOST_SHAPES:
                self._accepted.add(shape)

    def _meant(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """What to do about arguments that the function does not take."""
        parameters = self.signature.parameters
        state = list(inspect.signature(self._func).parameters)[len(self._owner)]
        if state in kwargs or (args and len(args) > len(parameters) and state not in _STATES):
            line = f"def {self._func.__name__}({', '.join(['s', state, *parameters])})"
            return f"; its first parameter is the state, which no caller passes: {line}"
        return "".join(near(name, [*parameters, *RUN_OPTIONS]) for name in kwargs if name not in parameters)

    # -- running ---------------------------------------------------------------------------------------------

    @calls_as_it_runs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The same as run(). For an async function, the same as arun(), to be awaited. Inside a program
        that is being traced, this traces."""
        return self.arun(*args, **kwargs) if self.is_async else self.run(*args, **kwargs)

    @runs
    def run(self, *args: Any, **kwargs: Any) -> ProgramState:
        """Run the program. Takes the function's arguments and these keyword arguments:

        backend           where to run; default: the program's backend, or the default backend
        stream            return at once, so that the text can be read while it is generated
        timeout           seconds that each call of the backend may take
        budget            a Budget for this run and all programs it calls
        cache, cache_dir  "rw" records the calls in a folder and replays those already in it; "ro" only
                          replays
        seed              each call gets a seed derived from this one, the program, the branch and the step
        use_thread        False: every addition waits until it is done, and errors are raised there
        temperature, ...  gen's sampling parameters, as defaults for all generations

        Returns when the function has returned. Its generations may still be running then; reading a
        variable waits for it. An exception of the function itself is raised here.

        With stream=True, run returns at once, the function runs in the background, and its exceptions are
        raised where the stream is read. The stream, both function and generations, is stopped at the end
        of `with program.stream(...) as s:`, or when its state and all iterators over it are gone.
        """
        options, rest = self._split(kwargs)
        return self._launch(options, args, rest)

    @runs
    def stream(self, *args: Any, **kwargs: Any) -> ProgramState:
        """The same as run() with stream=True."""
        options, rest = self._split(kwargs)
        return self._launch(replace(options, stream=True), args, rest)

    @runs_async
    async def arun(self, *args: Any, **kwargs: Any) -> AsyncProgramState:
        """run() for async code, on any event loop. An async function runs on that loop, an ordinary
        function in a thread. Cancelling this cancels the program."""
        from sglang_dsl.execution import launch

        options, rest = self._split(kwargs)
        return await launch.launch_async(self, options, args, rest)

    @streams_async
    def astream(self, *args: Any, **kwargs: Any) -> Starting:
        """arun() with stream=True: returns at once, and the function runs in the background. Await it, or
        use `async with program.astream(...) as s:`, which stops the program at the end of the block."""
        from sglang_dsl.execution import launch
        from sglang_dsl.state.async_state import Starting

        options, rest = self._split(kwargs)
        return Starting(launch.launch_async(self, replace(options, stream=True), args, rest))

    def _launch(self, options: Options, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ProgramState:
        from sglang_dsl.execution import launch

        return launch.launch(self, options, args, kwargs)

    @runs_batches
    def run_batch(
        self,
        batch_kwargs: Iterable[Any],
        *,
        num_threads: int | str = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        on_error: str = "raise",
        ordered: bool = True,
        resume: str | os.PathLike[str] | None = None,
        engine: Any = "local",
        **kwargs: Any,
    ) -> Any:
        """Run the program once for each item: a dict of arguments, or a tuple or list of them. Many items
        run at the same time.

        Items come from any iterable. The rows of a pandas DataFrame or a datasets.Dataset are items, too,
        each created when its turn comes.

        num_threads      how many items may run at once
        progress_bar     whether to show a progress bar
        generator_style  return an iterator, which reads the items as it goes, instead of a list
        on_error         "raise" raises the first exception, in order, and cancels the rest; "return" puts a
                         failed item's exception in its place
        ordered          False: results come in the order in which they finish; a state's `index` is the
                         position of its item
        resume           a folder in which calls are recorded, so that an interrupted batch can continue
                         without asking again for what was answered (the same as cache="rw", cache_dir=...)
        budget           a Budget for the whole batch. Each item has one of its own with
                         program.options(budget=...).run_batch(items)
        engine           "ray" or RayData(...) runs the items in worker processes, on one machine or a
                         cluster; all items are read at once, and the returned states can only be read

        Takes the other keyword arguments of run, too. Returns the finished states, in the order of the
        items. An error says of which item it is, and has the attributes `item_index` and `item`.
        """
        from sglang_dsl.execution import batch
        from sglang_dsl.execution.results import rows_of

        batch_kwargs = rows_of(batch_kwargs)
        options = self._batch_options(batch_kwargs, num_threads, on_error, resume, kwargs)
        if engine != "local":
            from sglang_dsl.execution.engines import run_batch_on

            return run_batch_on(
                engine,
                self,
                options,
                batch_kwargs,
                limit=num_threads if isinstance(num_threads, int) else None,
                lazy=generator_style,
                progress=progress_bar,
                on_error=on_error,
                ordered=ordered,
            )
        return batch.run_batch(
            self,
            options,
            batch_kwargs,
            limit=num_threads if isinstance(num_threads, int) else None,
            lazy=generator_style,
            progress=progress_bar,
            on_error=on_error,
            ordered=ordered,
            traced=self._traced,
        )

    @runs_batches_async
    def arun_batch(
        self,
        batch_kwargs: Iterable[Any] | AsyncIterable[Any],
        *,
        num_threads: int | str = "auto",
        progress_bar: bool = False,
        on_error: str = "raise",
        ordered: bool = True,
        resume: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[Any]:
        """run_batch() for async code: an async iterator of finished states. Items may come from any
        iterable, including async ones, and are read as there is room for them. `budget` is for the whole
        batch. Leaving the loop early cancels what is still running."""
        from sglang_dsl.execution import batch
        from sglang_dsl.execution.results import rows_of

        batch_kwargs = rows_of(batch_kwargs)
        options = self._batch_options(batch_kwargs, num_threads, on_error, resume, kwargs)
        return batch.run_batch_async(
            self,
            options,
            batch_kwargs,
            limit=num_threads if isinstance(num_threads, int) else None,
            on_error=on_error,
            ordered=ordered,
            progress=progress_bar,
        )

    def _batch_options(
        self,
        items: object,
        num_threads: int | str,
        on_error: str,
        resume: str | os.PathLike[str] | None,
        kwargs: dict[str, Any],
    ) -> Options:
        """Raises BadProgram, TypeError."""
        if resume is not None:
            kwargs |= {"cache": "rw", "cache_dir": resume}
        if on_error not in ("raise", "return"):
            raise BadProgram(f'on_error must be "raise" or "return", got {on_error!r}')
        if num_threads != "auto" and not (isinstance(num_threads, int) and num_threads >= 1):
            raise BadProgram(f'num_threads must be "auto" or at least 1, got {num_threads!r}')
        if unknown := sorted(set(kwargs) - RUN_OPTIONS):
            hint = near(unknown[0], [*RUN_OPTIONS, *_BATCH_ARGUMENTS])
            raise TypeError(f"run_batch got unexpected keyword arguments: {', '.join(unknown)}{hint}")
        if isinstance(items, str | Mapping):
            raise BadProgram("run_batch takes a list of items, one per run: run_batch([item, ...])")
        options = self._updated(kwargs)
        if options.stream:
            raise BadProgram("run_batch does not stream; run the items with stream=True instead")
        if kwargs.get("budget") is not None:
            options = replace(options, budget=self._options.budget, batch_budget=options.budget)
        return options

    # -- compiling -------------------------------------------------------------------------------------------

    def trace(self, *args: Any, **kwargs: Any) -> Program:
        """Follow the function once, without a backend, and return it as a Program. An argument that is not
        given is represented by the text "{name}". If a backend is passed or a default backend is set, it
        compiles the constraints in the meantime. Raises BadProgram if the function needs a real value to
        continue."""
        from sglang_dsl.execution import launch

        options, rest = self._split(kwargs)
        self._traced = traced = launch.trace(self, options, args, rest)
        return traced

    compile = trace

    def plan(self, *args: Any, price: Price | None = None, **kwargs: Any) -> Plan:
        """What a run with these arguments would request, without requesting it: calls, prompt tokens (and
        how many of them are shared), at most how many completion tokens, and their cost by `price`
        (price_per_million(...)).

        Follows the function as trace() does. Tokens are counted by the backend's tokenizer if it has one,
        and otherwise estimated as characters / 4. Prints as a tree.
        """
        from sglang_dsl.execution import launch

        options, rest = self._split(kwargs)
        return launch.plan(self, options, args, rest, price)

    def cache(self, backend: Any = None, **arguments: Any) -> bool:
        """Put the text that all runs start with into the backend's prefix cache.

        This is the text before the first generation, or before the first argument that is neither passed
        here nor bound. The function is followed up to that point. Returns False if it does not start with
        constant text. Raises NoBackend, and errors of the backend.
        """
        from sglang_dsl.execution import launch

        options, rest = self._split(arguments if backend is None else {**arguments, "backend": backend})
        return launch.cache(self, options, (), rest)


@overload
def function(
    func: Callable[Concatenate[Any, P], R], /, **kwargs: Unpack[RunArguments]
) -> SglFunction[P, R]: ...


@overload
def function(func: Callable[..., Any], /, **kwargs: Unpack[RunArguments]) -> SglFunction: ...


@overload
def function(**kwargs: Unpack[RunArguments]) -> Decorator: ...


@exposed
def function(func: Callable[..., Any] | None = None, /, **kwargs: Any) -> Any:
    """Make a program from a function: @function, or @function(temperature=0, ...) with keyword arguments
    of run() as its defaults."""
    if func is not None:
        if kwargs:
            return SglFunction(func).options(**kwargs)
        return SglFunction(func)
    return lambda inner: SglFunction(inner).options(**kwargs)
