"""A bounded pool of threads for ordinary functions. Its threads are daemons: a program that waits for an
answer forever must not block the end of the interpreter. Knows no programs.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Worker(threading.Thread):
    """A thread of a pool."""


class Threads:
    """At most `most` threads, each started when there is work and no idle thread.

    One thread at a time is woken, and wakes the next when it has taken a piece of work. As long as functions
    do not block, a few threads do all of it; when they block, others are started. The thread that became idle
    last is woken first. `idle`: called on a thread that is about to wait for work, or to end.
    """

    def __init__(self, most: int, name: str, idle: Callable[[], None] = lambda: None) -> None:
        self._most, self._name, self._rests = most, name, idle
        self._work: deque[Callable[[], object]] = deque()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._idle: list[threading.Lock] = []  # of each idle thread the lock that it waits for
        self._coming = False  # a thread was woken and has not arrived
        self._closed = False

    def submit(self, work: Callable[[], object]) -> None:
        """Run `work` soon; its exceptions are dropped."""
        with self._lock:
            if self._closed:
                return
            self._work.append(work)
            self._call_one()

    def close(self, *, wait: bool) -> None:
        """Accept no more work, and drop what has not begun. `wait`: until the threads have ended."""
        with self._lock:
            self._closed = True
            self._work.clear()
            idle, self._idle = self._idle, []
            threads = list(self._threads)
        for waits in idle:
            waits.release()
        for thread in threads if wait else ():
            thread.join()

    def _call_one(self) -> None:
        """Wake or start a thread, unless one is on its way. The lock is held."""
        if self._coming or not self._work:
            return
        if self._idle:
            self._coming = True
            self._idle.pop().release()
        elif len(self._threads) < self._most:
            name = f"{self._name}-{len(self._threads)}"
            thread = Worker(target=self._serve, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system has no more of them
                if not self._threads:
                    self._work.pop()
                    raise
                return
            self._threads.append(thread)
            self._coming = True

    def _serve(self) -> None:
        called = threading.Lock()
        called.acquire()
        came = True
        while True:
            work = None
            with self._lock:
                if came:
                    self._coming = came = False
                if self._work:
                    work = self._work.popleft()
                    self._call_one()  # this one may block
                elif self._closed:
                    break
                else:
                    self._idle.append(called)
            if work is None:
                self._rests()
                called.acquire()
                came = True
                continue
            with contextlib.suppress(BaseException):  # the submitter keeps its exceptions
                work()
            del work  # it may hold a program
        self._rests()


async def awaited(submit: Callable[[Callable[[], object]], object], function: Callable[[], T]) -> T:
    """The result of a function that `submit` calls on a thread. Cancelling does not stop it; its result is
    dropped then."""
    # The error is part of the result, as a future cannot hold a StopIteration.
    done: Future[tuple[Any, BaseException | None]] = Future()

    def work() -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            done.set_result((function(), None))
        except BaseException as raised:  # noqa: BLE001 - raised by the waiting coroutine
            done.set_result((None, raised))

    submit(work)
    value, error = await asyncio.wrap_future(done)
    if error is not None:
        raise error
    return value  # type: ignore[no-any-return]
