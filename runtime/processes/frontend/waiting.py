"""How callers of the frontend wait: coroutines for outputs, and both kinds for the answer to a question."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from weakref import WeakKeyDictionary, ref

from runtime.protocol.errors import DeadlineExceeded, RuntimeFault
from runtime.protocol.io_struct import ControlOutput


class Waker:
    """Wakes the coroutines of one event loop from any thread. Those notified before the loop comes to it
    are woken together: a step with many streams costs one system call, not one each."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = ref(loop)  # the table of wakers must not keep it
        self._told: deque[Waiter] = deque()
        self._called = False

    def wake(self, waiter: Waiter) -> None:
        """Raises RuntimeError when the loop is closed."""
        self._told.append(waiter)
        loop = self._loop()
        if loop is None:
            raise RuntimeError("the event loop is gone")
        if not self._called or loop.is_closed():
            self._called = True
            loop.call_soon_threadsafe(self._wake_all)

    def _wake_all(self) -> None:
        self._called = False  # before they are looked at: who comes now calls again
        while self._told:
            self._told.popleft().wake()


_WAKERS: WeakKeyDictionary[asyncio.AbstractEventLoop, Waker] = WeakKeyDictionary()
_LOCK = threading.Lock()


class Waiter:
    """A coroutine of some event loop, waiting until there is something new."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        with _LOCK:
            self._waker = _WAKERS.setdefault(self.loop, Waker(self.loop))
        self._woken = False
        self._waiting: asyncio.Future[None] | None = None

    def notifier(self, on_closed: Callable[[], None]) -> Callable[[], None]:
        """What wakes the coroutine, from any thread. `on_closed`: called instead when its loop is closed."""

        def notify() -> None:
            try:
                self._waker.wake(self)
            except RuntimeError:
                on_closed()

        return notify

    def wake(self) -> None:
        """Called by its loop."""
        self._woken = True
        self._stop_waiting()

    def _stop_waiting(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def wait(self, timeout: float | None) -> bool:
        """False when `timeout` seconds pass without anything new."""
        if not self._woken:
            # A future of its own: wait_for() loses a cancellation that comes together with the waking.
            self._waiting = self.loop.create_future()
            timer = None if timeout is None else self.loop.call_later(timeout, self._stop_waiting)
            try:
                await self._waiting
            finally:
                self._waiting = None
                if timer is not None:
                    timer.cancel()
        woken, self._woken = self._woken, False
        return woken


class Answer:
    """The answer to one question, once it is there; none when nobody is left to give one."""

    def __init__(self, notify: Callable[[], None]) -> None:
        self._notify = notify
        self.output: ControlOutput | None = None

    def give(self, output: ControlOutput | None) -> None:
        self.output = output
        self._notify()

    def get(self, in_time: bool, timeout: float, gone: Callable[[], RuntimeFault]) -> ControlOutput:
        """Raises DeadlineExceeded, or what `gone` makes where nobody can answer any more."""
        if not in_time:
            raise DeadlineExceeded(f"the scheduler did not answer within {timeout:g} s")
        if self.output is None:
            raise gone()
        return self.output
