"""Waiting: values and streamed pieces that one thread produces and any number of threads or event loops read.

    Signal      wakes whoever waits for a condition, thread or coroutine alike
    Feed        append-only pieces with an end; every reader has its own cursor
    Variable    a named value to come, with the pieces it arrives in
    Mark        a point in a program's queue: what was said up to there, or why it failed

Knows no nodes and no backends.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any

import msgspec

from sglang_dsl.errors import SglError, again
from sglang_dsl.loop import LOOK_S, LoopThread, background
from sglang_dsl.snapshot import VariableSnapshot
from sglang_dsl.threads import Worker
from sglang_dsl.transcript import Transcript
from sglang_dsl.typed import Typed


def _acquired(lock: threading.Lock, until: float | None) -> bool:
    """Whether `lock` came free by `until` (None: whenever)."""
    slices = threading.current_thread() is threading.main_thread()
    while True:
        left = -1.0 if until is None else max(0.0, until - time.monotonic())
        most = LOOK_S if slices and (left < 0 or left > LOOK_S) else left
        if lock.acquire(timeout=most):
            return True
        if most == left:
            return False


def _in_turn(loop: LoopThread, thread: int, woken: threading.Lock) -> None:
    """Wake a pool's thread, in its turn where it is the loop that wakes it."""
    if loop.here:
        loop.turns.add(thread, woken)
    else:
        woken.release()


class Signal:
    """notify() wakes all that wait; each then looks at its own condition again."""

    __slots__ = ("_wakers",)

    def __init__(self) -> None:
        # Without a lock, which most signals would never need: adding and taking are atomic, and who has added
        # himself looks at his condition again, so that of two that meet one sees the other.
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
        """Block this thread until `ready()`. Whoever makes it true must notify()."""
        self.wait_for(ready, None)

    def wait_for(self, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        """The same for at most `timeout_s` seconds; whether it came true."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while not ready():
            if background().here:
                raise SglError(
                    "a value was read on the language's own event loop, which would wait for itself"
                )
            woken = threading.Lock()  # held until a waker lets it go; an Event would be a good deal dearer
            woken.acquire()
            wake = woken.release
            if isinstance(threading.current_thread(), Worker):
                wake = functools.partial(_in_turn, background(), threading.get_ident(), woken)
            self._wakers.append(wake)
            # Looked at again after registering: a notify() in between is not lost.
            if ready():
                return True
            background().turns.pass_on()
            if not _acquired(woken, until):
                self._forget(wake)
                return ready()
        return True

    def _forget(self, waker: Callable[[], object]) -> None:
        """Who has left waits no more: a signal that never comes does not collect them."""
        with contextlib.suppress(ValueError):
            self._wakers.remove(waker)

    def when(self, ready: Callable[[], bool], then: Callable[[], object]) -> None:
        """Call `then` once `ready()`, here or where that comes true; soon and briefly done, as a waker is."""

        def look() -> None:
            self.when(ready, then)

        if ready():
            then()
            return
        self._wakers.append(look)
        if ready():
            # Whoever takes it out calls it: notify(), or this.
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
    """Some streamed text, with what the backend said about it, if anything."""

    text: str
    meta: dict[str, Any] | None = None


class Feed(Signal):
    """Pieces in order, and the signal that tells of new ones. A reader goes on until `end()` says it has had
    enough."""

    __slots__ = ("pieces",)

    def __init__(self) -> None:
        self._wakers = []
        # A list from the first piece on; most feeds are made long before.
        self.pieces: Sequence[Piece] = ()

    @property
    def signal(self) -> Signal:
        """What its readers wait for."""
        return self

    def put(self, text: str, meta: dict[str, Any] | None = None) -> None:
        if text or meta:
            self._add(text, meta)
            self.notify()

    def so_far(self) -> Sequence[Piece]:
        """The pieces that there are by now."""
        return self.pieces

    def _add(self, text: str, meta: dict[str, Any] | None) -> None:
        if isinstance(self.pieces, list):
            self.pieces.append(Piece(text, meta))
        else:
            self.pieces = [Piece(text, meta)]

    def read(self, end: Callable[[], int | None]) -> Iterator[Piece]:
        """All pieces up to index `end()`, which is None while that is not known."""
        cursor = 0
        while True:
            at = cursor
            self.wait(lambda at=at: len(self.so_far()) > at or end() is not None)  # type: ignore[misc]
            stop = end()
            fresh = self.so_far()[cursor:stop]
            cursor += len(fresh)
            yield from fresh
            if stop is not None and cursor >= stop:
                return

    async def read_async(self, end: Callable[[], int | None]) -> AsyncGenerator[Piece, None]:
        cursor = 0
        while True:
            at = cursor
            await self.wait_async(lambda at=at: len(self.so_far()) > at or end() is not None)  # type: ignore[misc]
            stop = end()
            fresh = self.so_far()[cursor:stop]
            cursor += len(fresh)
            for piece in fresh:
                yield piece
            if stop is not None and cursor >= stop:
                return


_NOTHING: dict[str, Any] = {}  # what was said of a variable before it is there


class Variable(Feed):
    """One setting of a name, with the pieces it comes in. Ends exactly once, with a value or with an error.
    `typed`: as what its text is read; `raw`: the text or texts, where they were generated, also when they
    could not be read."""

    __slots__ = ("done", "error", "meta", "name", "raw", "typed", "value")

    def __init__(self, name: str | None, typed: Typed | None = None) -> None:
        self._wakers = []
        self.pieces = ()
        self.name, self.typed = name, typed
        self.raw: str | list[str] | None = None
        self.value: Any = None
        self.meta: dict[str, Any] = _NOTHING
        self.error: BaseException | None = None
        self.done = False

    @property
    def feed(self) -> Feed:
        """Its pieces."""
        return self

    def settle(self, value: Any, meta: dict[str, Any] | None = None) -> None:
        """The value is there."""
        self.value, self.meta = value, meta or {}
        self.done = True
        self.notify()

    def so_far(self) -> Sequence[Piece]:
        """The pieces that there are by now; one for a value that was not streamed, made when it is read."""
        if not self.pieces and self.done and self.error is None:
            text = self.value if self.raw is None else self.raw
            text = text[0] if isinstance(text, list) and text else text
            self.pieces = [Piece(str(text), self.meta)]
        return self.pieces

    def fail(self, error: BaseException) -> None:
        self.error, self.done = error, True
        self.notify()

    def ended(self) -> int | None:
        """How many pieces there are, once there will be no more."""
        return len(self.so_far()) if self.done else None

    def result(self) -> Any:
        if self.error is not None:
            raise again(self.error)
        return self.value

    def get(self) -> Any:
        """The value; blocks. Raises the program's error."""
        self.wait(lambda: self.done)
        return self.result()

    def text(self) -> Any:
        """What was generated, as it was written; blocks. Raises the program's error where nothing was."""
        self.wait(lambda: self.done)
        return self.result() if self.raw is None else self.raw

    def snapshot(self) -> VariableSnapshot:
        """How it stands now; does not wait."""
        done = self.done  # before what is set before it
        text = "".join(piece.text for piece in self.pieces) if self.raw is None else self.raw
        name = self.name or ""
        if not done:
            return VariableSnapshot(name, "pending", text)
        if self.error is not None:
            return VariableSnapshot(name, "failed", text, None, self.error, self.meta)
        if self.raw is None and isinstance(self.value, str):
            text = self.value
        return VariableSnapshot(name, "done", text, self.value, None, self.meta)


class Mark:
    """A point in the queue. `index`: how many streamed pieces stood before it."""

    __slots__ = ("done", "error", "index", "signal", "transcript")

    def __init__(self, signal: Signal | None = None) -> None:
        self.transcript = Transcript.EMPTY
        self.error: BaseException | None = None
        self.index: int | None = None
        self.done = False
        self.signal = signal or Signal()

    def reach(self, transcript: Transcript, error: BaseException | None, index: int) -> None:
        self.transcript, self.error, self.index, self.done = transcript, error, index, True
        self.signal.notify()

    def result(self) -> Transcript:
        if self.error is not None:
            raise again(self.error)
        return self.transcript

    def wait(self) -> Transcript:
        """What was said up to here; blocks. Raises what went wrong before it."""
        self.signal.wait(lambda: self.done)
        return self.result()
