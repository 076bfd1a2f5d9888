"""Code that waits, written once for callers of both kinds: a coroutine that is told how its caller waits.

    await core.settled(awaiting)            gives way to the caller's event loop meanwhile
    run_here(core.settled(blocking))        blocks the caller's thread, and so never gives way

run_here() needs no event loop: a hop to the language's own and back would cost more than most reads.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from inspect import isawaitable
from typing import Any, Protocol, TypeVar, cast

from sglang_dsl.concurrency.streams import Signal
from sglang_dsl.errors import BadProgram

T = TypeVar("T")


class Until(Protocol):
    """Waits until `ready()`, which whoever makes it true tells by `signal`, for at most `timeout_s` seconds;
    whether it came true."""

    def __call__(
        self, signal: Signal, ready: Callable[[], bool], timeout_s: float | None = None
    ) -> Coroutine[Any, Any, bool]: ...


async def blocking(signal: Signal, ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
    """By blocking the thread."""
    return signal.wait_for(ready, timeout_s)


async def awaiting(signal: Signal, ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
    """By giving way to the caller's event loop."""
    if timeout_s is not None:
        return await signal.wait_for_async(ready, timeout_s)
    await signal.wait_async(ready)
    return True


def run_here(work: Awaitable[T]) -> T:
    """What a coroutine gives that waits by `blocking`."""
    running = cast("Coroutine[Any, Any, T]", work)
    try:
        running.send(None)
    except StopIteration as ended:
        return cast(T, ended.value)
    running.close()
    raise BadProgram("an async function was passed to a blocking method; use the async method")


def iterate_here(pieces: AsyncGenerator[T, None]) -> Iterator[T]:
    """The items of an async generator that waits by `blocking`; closed with this one."""
    try:
        while True:
            try:
                piece = run_here(anext(pieces))
            except StopAsyncIteration:
                return
            yield piece
    finally:
        run_here(pieces.aclose())


async def value_of(made: Any) -> Any:
    """What a user's function gave, awaited where it is a coroutine."""
    return await made if isawaitable(made) else made
