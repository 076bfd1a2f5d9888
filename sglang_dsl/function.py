"""@function: a Python function that writes to `s` becomes a program: run, run_batch, stream, bind, trace.

Defaults < caller's program < this program < this call. Words of sampling that are also names of the
function's own parameters are the function's. Knows no backend in particular.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast, overload

from runtime.protocol.registry import Registry
from sglang_dsl import lower
from sglang_dsl.errors import BadProgram
from sglang_dsl.ir import Sampling

if TYPE_CHECKING:
    from sglang_dsl.state import ProgramState
    from sglang_dsl.trace import Program


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


# What running needs is loaded when something runs: the executor, the event loop and all that comes with them.
_PARTS: Registry[Any] = Registry(
    "part of the language",
    {
        "launch": "sglang_dsl.launch:launch",
        "run_batch": "sglang_dsl.launch:run_batch",
        "trace": "sglang_dsl.launch:trace",
    },
)


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
            raise BadProgram(f"{self.name} needs a first parameter: the state it writes to")
        first = parameters[0]
        takes_all = first.kind is inspect.Parameter.VAR_POSITIONAL
        own = parameters if takes_all else parameters[1 + len(owner) :]
        self.signature = inspect.Signature(own)

    @property
    def name(self) -> str:
        return str(getattr(self._func, "__qualname__", repr(self._func)).replace("<locals>.", ""))

    def write(self, state: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function itself on a state."""
        return self._func(*self._owner, state, *args, **kwargs)

    def _copy(self, **changes: Any) -> SglFunction:
        given: dict[str, Any] = {"options": self._options, "bound": self._bound, "owner": self._owner}
        return SglFunction(self._func, **(given | changes))

    def __get__(self, instance: object, owner: type | None = None) -> SglFunction:
        return self if instance is None else self._copy(owner=(instance,))

    def __repr__(self) -> str:
        return f"<program {self.name}{self.signature}>"

    # -- arguments -------------------------------------------------------------------------------------------

    def bind(self, **arguments: Any) -> SglFunction:
        """This program with some arguments given; those of a call go over them. Raises BadProgram for a name
        the function does not take."""
        parameters = self.signature.parameters
        if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
            unknown = [name for name in arguments if name not in parameters]
            if unknown:
                known = ", ".join(parameters) or "none"
                raise BadProgram(f"{self.name} takes no argument {', '.join(unknown)}; known: {known}")
        return self._copy(bound=self._bound | arguments)

    def options(self, **words: Any) -> SglFunction:
        """This program with other defaults: run's words (backend, timeout, temperature, ...). Raises
        BadProgram."""
        if unknown := sorted(set(words) - RUN_WORDS):
            raise BadProgram(f"{', '.join(unknown)}: unknown; known: {', '.join(sorted(RUN_WORDS))}")
        return self._copy(options=self._options.with_words(words))

    def _split(self, kwargs: dict[str, Any]) -> tuple[Options, dict[str, Any]]:
        """Words of run, and the function's own arguments. A name that is both is the function's."""
        own = self.signature.parameters
        words = {k: v for k, v in kwargs.items() if k in RUN_WORDS and k not in own}
        rest = {k: v for k, v in kwargs.items() if k not in words}
        return (self._options.with_words(words) if words else self._options), rest

    def fill(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Call arguments with the bound ones filled in. Raises TypeError, as the function itself would."""
        if not self._bound:
            return args, kwargs
        given = self.signature.bind_partial(*args, **kwargs).arguments
        extra = next(
            (p.name for p in self.signature.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD),
            None,
        )
        taken = {*given, *(given.get(extra, {}) if extra else {})}
        filled = self.signature.bind_partial(
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
        return cast("ProgramState", _PARTS.load("launch")(self, options, args, kwargs))

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
        return _PARTS.load("run_batch")(
            self,
            options,
            batch_kwargs,
            limit=num_threads if isinstance(num_threads, int) else None,
            lazy=generator_style,
            progress=progress_bar,
            on_error=on_error,
        )

    # -- compiling -------------------------------------------------------------------------------------------

    def trace(self, *args: Any, **kwargs: Any) -> Program:
        """Follow the function once without a backend. Arguments not given stand as "{name}". Raises
        BadProgram where the function needs a real value to go on."""
        _, rest = self._split(kwargs)
        return cast("Program", _PARTS.load("trace")(self, args, rest))

    compile = trace


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
