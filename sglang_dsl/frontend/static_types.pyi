"""For type checkers alone: the keyword arguments of `gen`, and how a program's methods keep the parameters of
its function.

A call without keyword arguments of run is checked against the function's own signature; with one of them (a
ParamSpec cannot have keywords added to it) only the result is known. mypy_plugin.py checks both, in mypy.
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from os import PathLike
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    Protocol,
    Self,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

from sglang_dsl.budgets import Budget

if TYPE_CHECKING:
    from sglang_dsl.execution.results import Batch
    from sglang_dsl.function import SglFunction
    from sglang_dsl.state.async_state import AsyncProgramState
    from sglang_dsl.state.program_state import ProgramState
P = ParamSpec("P")
R = TypeVar("R", covariant=True)
S = TypeVar("S")
Result = TypeVar("Result", covariant=True)

if TYPE_CHECKING:
    class State(ProgramState, Generic[S]):
        """The ProgramState of a program that returns S. ProgramState itself has no parameter: mypy would then
        see Any in each function that takes one, and give up on overloads that take functions."""

        @property
        def ret_value(self) -> S: ...

    class AsyncState(AsyncProgramState, Generic[S]):
        """And its AsyncProgramState."""

        @property
        def ret_value(self) -> S: ...
        async def __aenter__(self) -> Self: ...

    class StartingState(Coroutine[Any, Any, AsyncState[S]], Generic[S], metaclass=ABCMeta):
        """The result of its astream(): to be awaited, or for `async with`."""

        async def __aenter__(self) -> AsyncState[S]: ...
        async def __aexit__(self, *error: object) -> None: ...

class GenArguments(TypedDict, total=False):
    """gen's sampling parameters, without `n`, which decides the result."""

    max_tokens: int | None
    min_tokens: int | None
    stop: str | Iterable[str] | None
    stop_token_ids: int | Iterable[int] | None
    stop_regex: str | Iterable[str] | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    ignore_eos: bool | None
    return_logprob: bool | None
    logprob_start_len: int | None
    top_logprobs_num: int | None
    return_text_in_logprobs: bool | None
    repetition_penalty: float | None
    seed: int | None
    whitespace: str | None
    schema_format: str | None
    require_reasoning: bool | None
    max_thinking_tokens: int | None
    skip_special_tokens: bool | None
    no_stop_trim: bool | None
    token_healing: bool | None
    logit_bias: Mapping[int, float] | None
    timeout: float | None

class TypedArguments(GenArguments, total=False):
    """And those for a generation with a type."""

    retries: int | None

class Forms(GenArguments, total=False):
    """And the constraints of a generation whose value is a text."""

    name: str | None
    dtype: type | str | None
    regex: str | None
    json_schema: str | Mapping[str, Any] | type | None
    ebnf: str | None
    structural_tag: str | Mapping[str, Any] | None

class OutlinesTerm(Protocol):
    """A type of outlines, by its methods."""

    def matches(self, value: str) -> bool: ...
    def display_ascii_tree(self, indent: str = "", is_last: bool = True) -> str: ...

class Signature(Generic[P, R]):
    """The parameters of a program besides the state, and the type that its function returns: SglFunction's
    base."""

class Runs(Generic[P, Result]):
    """A way to run a program that returns Result."""

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Result: ...
    @overload
    def __call__(self, *args: Any, backend: Any, **kwargs: Any) -> Result: ...
    @overload
    def __call__(self, *args: Any, stream: Any, **kwargs: Any) -> Result: ...
    @overload
    def __call__(self, *args: Any, timeout: Any, **kwargs: Any) -> Result: ...
    @overload
    def __call__(self, *args: Any, budget: Any, **kwargs: Any) -> Result: ...
    @overload
    def __call__(self, *args: Any, cache: Any, **kwargs: Any) -> Result: ...
    @overload
    def __call__(self, *args: Any, cache_dir: Any, **kwargs: Any) -> Result: ...
    @overload
    def __call__(self, *args: Any, use_thread: Any, **kwargs: Any) -> Result: ...
    @overload
    def __call__(self, *args: Any, no_stop_trim: Any, **kwargs: Any) -> Result: ...
    @overload
    def __call__(self, *args: Any, num_api_spec_tokens: Any, **kwargs: Any) -> Result: ...
    @overload
    def __call__(self, *args: Any, frequency_penalty: Any, **kwargs: Any) -> Result: ...
    @overload
    def __call__(self, *args: Any, ignore_eos: Any, **kwargs: Any) -> Result: ...
    @overload
    def __call__(self, *args: Any, logit_bias: Any, **kwargs: Any) -> Result: ...
    @overload
    def __call__(self, *args: Any, logprob_start_len: Any, **kwargs: Any) -> Result: ...
    @overload
    def __call__(self, *args: Any, max_new_tokens: Any, **kwargs: Any) -> Result: ...
    @overload
    def __call__(self, *args: Any, max_thinking_tokens: Any, **kwargs: Any) -> Result: ...
    @overload
    def __call__(self, *args: Any, max_tokens: Any, **kwargs: Any) -> Result: ...
    @overload
    def __call__(self, *args: Any, min_new_tokens: Any, **kwargs: Any) -> Result: ...
    @overload
    def __call__(self, *args: Any, min_p: Any, **kwargs: Any) -> Result: ...
    @overload
    def __call__(self, *args: Any, min_tokens: Any, **kwargs: Any) -> Result: ...
    @overload
    def __call__(self, *args: Any, n: Any, **kwargs: Any) -> Result: ...
    @overload
    def __call__(self, *args: Any, presence_penalty: Any, **kwargs: Any) -> Result: ...
    @overload
    def __call__(self, *args: Any, repetition_penalty: Any, **kwargs: Any) -> Result: ...
    @overload
    def __call__(self, *args: Any, require_reasoning: Any, **kwargs: Any) -> Result: ...
    @overload
    def __call__(self, *args: Any, return_logprob: Any, **kwargs: Any) -> Result: ...
    @overload
    def __call__(self, *args: Any, return_text_in_logprobs: Any, **kwargs: Any) -> Result: ...
    @overload
    def __call__(self, *args: Any, schema_format: Any, **kwargs: Any) -> Result: ...
    @overload
    def __call__(self, *args: Any, seed: Any, **kwargs: Any) -> Result: ...
    @overload
    def __call__(self, *args: Any, skip_special_tokens: Any, **kwargs: Any) -> Result: ...
    @overload
    def __call__(self, *args: Any, stop: Any, **kwargs: Any) -> Result: ...
    @overload
    def __call__(self, *args: Any, stop_regex: Any, **kwargs: Any) -> Result: ...
    @overload
    def __call__(self, *args: Any, stop_token_ids: Any, **kwargs: Any) -> Result: ...
    @overload
    def __call__(self, *args: Any, temperature: Any, **kwargs: Any) -> Result: ...
    @overload
    def __call__(self, *args: Any, token_healing: Any, **kwargs: Any) -> Result: ...
    @overload
    def __call__(self, *args: Any, top_k: Any, **kwargs: Any) -> Result: ...
    @overload
    def __call__(self, *args: Any, top_logprobs_num: Any, **kwargs: Any) -> Result: ...
    @overload
    def __call__(self, *args: Any, top_p: Any, **kwargs: Any) -> Result: ...
    @overload
    def __call__(self, *args: Any, whitespace: Any, **kwargs: Any) -> Result: ...

class Running:
    """`run` and `stream`, which take the function's parameters."""

    @overload
    def __get__(
        self, program: Signature[P, Coroutine[Any, Any, R]], owner: object = None
    ) -> Runs[P, State[R]]: ...
    @overload
    def __get__(self, program: Signature[P, R], owner: object = None) -> Runs[P, State[R]]: ...

class StreamingAsync:
    """astream."""

    @overload
    def __get__(
        self, program: Signature[P, Coroutine[Any, Any, R]], owner: object = None
    ) -> Runs[P, StartingState[R]]: ...
    @overload
    def __get__(self, program: Signature[P, R], owner: object = None) -> Runs[P, StartingState[R]]: ...

class RunningAsync:
    """arun."""

    @overload
    def __get__(
        self, program: Signature[P, Coroutine[Any, Any, R]], owner: object = None
    ) -> Runs[P, Coroutine[Any, Any, AsyncState[R]]]: ...
    @overload
    def __get__(
        self, program: Signature[P, R], owner: object = None
    ) -> Runs[P, Coroutine[Any, Any, AsyncState[R]]]: ...

class Calling:
    """A program called as a function; the call of an async one is awaited."""

    @overload
    def __get__(
        self, program: Signature[P, Coroutine[Any, Any, R]], owner: object = None
    ) -> Runs[P, Coroutine[Any, Any, AsyncState[R]]]: ...
    @overload
    def __get__(self, program: Signature[P, R], owner: object = None) -> Runs[P, State[R]]: ...

class RunningBatches:
    """run_batch."""

    @overload
    def __get__(
        self, program: Signature[..., Coroutine[Any, Any, R]], owner: object = None
    ) -> Batches[R]: ...
    @overload
    def __get__(self, program: Signature[..., R], owner: object = None) -> Batches[R]: ...

class RunningBatchesAsync:
    """arun_batch."""

    @overload
    def __get__(
        self, program: Signature[..., Coroutine[Any, Any, R]], owner: object = None
    ) -> AsyncBatches[R]: ...
    @overload
    def __get__(self, program: Signature[..., R], owner: object = None) -> AsyncBatches[R]: ...

class RunArguments(GenArguments, total=False):
    """Keyword arguments of run, and of @function."""

    backend: Any
    stream: bool
    budget: Budget | None
    cache: Literal["rw", "ro", "off"]
    cache_dir: str | PathLike[str] | None
    use_thread: bool
    num_api_spec_tokens: int | None
    n: int | None
    max_new_tokens: int | None
    min_new_tokens: int | None

class BatchArguments(RunArguments, total=False):
    """And run_batch's, without those that decide the result."""

    num_threads: int | Literal["auto"]
    progress_bar: bool
    ordered: bool
    resume: str | PathLike[str] | None

class BlockingBatchArguments(BatchArguments, total=False):
    """And those of run_batch alone."""

    engine: Any

class Batches(Generic[S]):
    @overload
    def __call__(
        self,
        batch_kwargs: Iterable[Any],
        *,
        generator_style: Literal[False] = False,
        on_error: Literal["raise"] = "raise",
        **kwargs: Unpack[BlockingBatchArguments],
    ) -> Batch[State[S]]: ...
    @overload
    def __call__(
        self,
        batch_kwargs: Iterable[Any],
        *,
        generator_style: Literal[False] = False,
        on_error: Literal["return"],
        **kwargs: Unpack[BlockingBatchArguments],
    ) -> Batch[State[S] | Exception]: ...
    @overload
    def __call__(
        self,
        batch_kwargs: Iterable[Any],
        *,
        generator_style: Literal[True],
        on_error: Literal["raise"] = "raise",
        **kwargs: Unpack[BlockingBatchArguments],
    ) -> Iterator[State[S]]: ...
    @overload
    def __call__(
        self,
        batch_kwargs: Iterable[Any],
        *,
        generator_style: Literal[True],
        on_error: Literal["return"],
        **kwargs: Unpack[BlockingBatchArguments],
    ) -> Iterator[State[S] | Exception]: ...
    @overload
    def __call__(
        self,
        batch_kwargs: Iterable[Any],
        *,
        generator_style: bool = False,
        on_error: Literal["raise", "return"] = "raise",
        **kwargs: Unpack[BlockingBatchArguments],
    ) -> (
        Batch[State[S]] | Batch[State[S] | Exception] | Iterator[State[S]] | Iterator[State[S] | Exception]
    ): ...

class AsyncBatches(Generic[S]):
    @overload
    def __call__(
        self,
        batch_kwargs: Iterable[Any] | AsyncIterable[Any],
        *,
        on_error: Literal["raise"] = "raise",
        **kwargs: Unpack[BatchArguments],
    ) -> AsyncIterator[AsyncState[S]]: ...
    @overload
    def __call__(
        self,
        batch_kwargs: Iterable[Any] | AsyncIterable[Any],
        *,
        on_error: Literal["return"],
        **kwargs: Unpack[BatchArguments],
    ) -> AsyncIterator[AsyncState[S] | Exception]: ...

# Decorators of the methods of a program in function.py; at run time they do nothing.

def runs(method: Callable[..., Any]) -> Running: ...
def runs_async(method: Callable[..., Any]) -> RunningAsync: ...
def streams_async(method: Callable[..., Any]) -> StreamingAsync: ...
def calls_as_it_runs(method: Callable[..., Any]) -> Calling: ...
def runs_batches(method: Callable[..., Any]) -> RunningBatches: ...
def runs_batches_async(method: Callable[..., Any]) -> RunningBatchesAsync: ...

class Decorator:
    """@function(temperature=0)"""

    @overload
    def __call__(self, func: Callable[Concatenate[Any, P], R], /) -> SglFunction[P, R]: ...
    @overload
    def __call__(self, func: Callable[..., Any], /) -> SglFunction[..., Any]: ...
