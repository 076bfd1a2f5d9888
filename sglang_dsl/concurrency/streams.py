"""Waiting for what another thread or the event loop produces, by threads and coroutines alike.

    Signal      wakes the threads and coroutines that wait for a condition
    Stream      append-only pieces with an end; every reader has its own cursor

Code that waits is written once for callers of both kinds, as a coroutine with an argument `until`:

    await core.settled(awaiting)            gives way to the caller's event loop meanwhile
    run_here(core.settled(blocking))        blocks the caller's thread, and never gives way

run_here() needs no event loop: a hop to the language's own and back would cost more than most reads. Knows no
nodes and no backends.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Sequence
from inspect import isawaitable
from typing import Any, TypeAlias, TypeVar, cast

import msgspec

from sglang_dsl.concurrency.loop import LOOK_S, LoopThread, background
from sglang_dsl.concurrency.threads import Worker
from sglang_dsl.errors import BadProgram, SglError

T = TypeVar("T")
Until: TypeAlias = "Callable[..., Coroutine[Any, Any, bool]]"
"""`blocking` or `awaiting`, called with (signal, ready, timeout_s=None): waits until `ready()`, checked again
when `signal` is notified. Returns whether it came true within `timeout_s` seconds."""


def _acquired(lock: threading.Lock, until: float | None) -> bool:
    """Acquire `lock` by `until`, if that is not None; whether it was acquired."""
    slices = threading.current_thread() is threading.main_thread()
    while True:
        left = -1.0 if until is None else max(0.0, until - time.monotonic())
        most = LOOK_S if slices and (left < 0 or left > LOOK_S) else left
        if lock.acquire(timeout=most):
            return True
        if most == left:
            return False


def _in_turn(loop: LoopThread, thread: int, woken: threading.Lock) -> None:
    """Wake a pool's thread, in its turn if the loop wakes it."""
    if loop.here:
        loop.turns.add(thread, woken)
    else:
        woken.release()


class Signal:
    """notify() wakes all that wait; each then looks at its own condition again."""

    __slots__ = ("_wakers",)

    def __init__(self) -> None:
        # No lock: list operations are atomic, and a waiter checks its condition again after adding itself.
        self._wakers: list[Callable[[], object]] = []

    def notify(self) -> None:
        wakers = self._wakers
        if not wakers:
            return
        for _ in range(len(wakers)):
            try:
                wake = wakers.pop(0)
            except IndexError:  # another notify() took it
                return
            wake()

    def wait(self, ready: Callable[[], bool]) -> None:
        """Block this thread until `ready()`. The code that makes it true must notify()."""
        self.wait_for(ready, None)

    def wait_for(self, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        """The same for at most `timeout_s` seconds; whether it came true."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while not ready():
            if background().here:
                raise SglError("a value was read on the language's own event loop, which would block it")
            woken = threading.Lock()  # an Event is slower
            woken.acquire()
            wake = woken.release
            if isinstance(threading.current_thread(), Worker):
                wake = functools.partial(_in_turn, background(), threading.get_ident(), woken)
            self._wakers.append(wake)
            # Checked again after registering, so that a notify() in between is not lost.
            if ready():
                return True
            background().turns.pass_on()
            if not _acquired(woken, until):
                self._forget(wake)
                return ready()
        return True

    def _forget(self, waker: Callable[[], object]) -> None:
        """Remove a waiter that gave up: a signal that never comes does not collect them."""
        with contextlib.suppress(ValueError):
            self._wakers.remove(waker)

    def when(self, ready: Callable[[], bool], then: Callable[[], object]) -> None:
        """Call `then`, which must be quick, when `ready()`: now, or where that is notified."""

        def look() -> None:
            self.when(ready, then)

        if ready():
            then()
            return
        self._wakers.append(look)
        if ready():
            # Called by the one that removes it: notify(), or this.
            try:
                self._wakers.remove(look)
            except ValueError:
                return
            then()

    async def wait_for_async(self, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        """wait_for() for a coroutine on any event loop."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.wait_async(ready)
        except TimeoutError:
            return ready()
        return True

    async def wait_async(self, ready: Callable[[], bool]) -> None:
        """wait() for a coroutine on any event loop."""
        while not ready():
            loop = asyncio.get_running_loop()
            woken: asyncio.Future[None] = loop.create_future()

            wake = functools.partial(background().inbox(loop).put, woken)
            self._wakers.append(wake)
            if ready():
                return
            try:
                await woken
            finally:
                if not woken.done() or woken.cancelled():
                    self._forget(wake)


class Piece(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A piece of streamed text, with metadata from the backend, if any."""

    text: str
    meta: dict[str, Any] | None = None


class Stream(Signal):
    """Pieces in order, and the signal that there are new ones."""

    __slots__ = ("pieces",)

    def __init__(self) -> None:
        self._wakers = []
        # A list from the first piece on.
        self.pieces: Sequence[Piece] = ()

    def put(self, text: str, meta: dict[str, Any] | None = None) -> None:
        if text or meta:
            self._add(text, meta)
            self.notify()

    def so_far(self) -> Sequence[Piece]:
        """The pieces by now."""
        return self.pieces

    def _add(self, text: str, meta: dict[str, Any] | None) -> None:
        if isinstance(self.pieces, list):
            self.pieces.append(Piece(text, meta))
        else:
            self.pieces = [Piece(text, meta)]

    async def read(self, end: Callable[[], int | None], until: Until) -> AsyncGenerator[Piece, None]:
        """All pieces up to index `end()`, which is None while it is not known; waits by `until`."""
        cursor = 0
        while True:
            at = cursor
            await until(self, lambda at=at: len(self.so_far()) > at or end() is not None)
            stop = end()
            fresh = self.so_far()[cursor:stop]
            cursor += len(fresh)
            for piece in fresh:
                yield piece
            if stop is not None and cursor >= stop:
                return


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
    """The result of a coroutine that waits by `blocking`."""
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


async def value_of(value: Any) -> Any:
    """The result of a user's function, which may be a coroutine."""
    return await value if isawaitable(value) else value
