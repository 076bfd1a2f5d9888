"""Threads: a bounded pool for ordinary functions. Its threads do not keep the process alive: a program that
waits for an answer which never comes must not hold up the interpreter's end. Knows no programs.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable


class Worker(threading.Thread):
    """A thread of a pool. Whatever it waits for, it comes back to the pool."""


class Threads:
    """At most `most` threads, each begun when there is work and nobody idle to do it.

    One thread at a time is called to the work, and calls the next when it has taken a piece. While bodies do
    not block, a few threads do all of it, without waking each other for each piece; when they do block,
    others come until `most` are there. The one that became idle last is called first. `idle`: called on a
    thread that is about to wait for work, or to end.
    """

    def __init__(self, most: int, name: str, idle: Callable[[], None] = lambda: None) -> None:
        self._most, self._name, self._rests = most, name, idle
        self._work: deque[Callable[[], object]] = deque()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._idle: list[threading.Lock] = []  # of each idle thread the lock that it waits for
        self._coming = False  # a thread was called and is not there yet
        self._closed = False

    def submit(self, work: Callable[[], object]) -> None:
        """Run `work` soon; what it raises is lost."""
        with self._lock:
            if self._closed:
                return
            self._work.append(work)
            self._call_one()

    def close(self, *, wait: bool) -> None:
        """Take no more; what was given and not begun is dropped. `wait`: until the threads have ended."""
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
        """Call a thread to the work, unless one is coming. The lock is held."""
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
                    self._call_one()  # this one may be long away
                elif self._closed:
                    break
                else:
                    self._idle.append(called)
            if work is None:
                self._rests()
                called.acquire()
                came = True
                continue
            with contextlib.suppress(BaseException):  # whoever gave the work keeps what it raises
                work()
            del work  # it may hold a program
        self._rests()
