"""How callers of the front door wait: coroutines for news, and both kinds for the answer to one question."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from runtime.protocol.errors import DeadlineExceeded, RuntimeFault
from runtime.protocol.io_struct import ControlOutput


class Waiter:
    """A coroutine of some event loop, waiting for news."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()

    def teller(self, on_closed: Callable[[], None]) -> Callable[[], None]:
        """What wakes the coroutine, from any thread. `on_closed`: called instead when its loop is closed."""

        def tell() -> None:
            try:
                self.loop.call_soon_threadsafe(self._changed.set)
            except RuntimeError:
                on_closed()

        return tell

    async def wait(self, timeout: float | None) -> bool:
        """False when `timeout` seconds pass without news."""
        try:
            # Not wait_for(): it loses a cancellation that comes together with the news.
            async with asyncio.timeout(timeout):
                await self._changed.wait()
        except TimeoutError:
            return False
        self._changed.clear()
        return True


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
