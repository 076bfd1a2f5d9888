"""How those who wait for the language's loop are woken: its own coroutines at once, those of another loop
many at a time, the threads of a pool one after another, and the loop after the last of them.

The interpreter runs one thread at a time. A loop that wakes forty threads and goes on itself makes forty-one
of them contend for that one place, which costs each a sleep or two more. Here the threads whose values came
in one round of the loop are woken as a chain: each wakes the next when it waits again, the last one wakes the
loop, which rests meanwhile, as it would for want of the interpreter. Nobody depends on it: where a thread
keeps its turn (it waits for something else), all others are woken and the loop goes on.

Knows no programs and no variables.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

PATIENCE_S = 5e-3
"""How long one thread may keep its turn while others wait for theirs."""
LONGEST_S = 2e-2
"""How long the loop rests for one chain, at most."""
APART_S = 0.1
"""For so long nobody is made to wait after a chain that was broken: its programs do other things, too."""


class Inbox:
    """Coroutines of one loop that are to be woken. To wake a loop takes longer than to wake a coroutine:
    those that come meanwhile are woken with the first."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        # Not kept alive by its own inbox.
        self._loop = weakref.ref(loop)
        self._to_wake: deque[asyncio.Future[None]] = deque()
        self._coming = False

    def put(self, waiting: asyncio.Future[None]) -> None:
        """Let what awaits `waiting` go on. From any thread."""
        loop = self._loop()
        if loop is None:
            return
        if asyncio._get_running_loop() is loop:
            _let_go(waiting)
            return
        self._to_wake.append(waiting)
        if not self._coming:
            self._coming = True
            with contextlib.suppress(RuntimeError):  # that loop was closed, and its coroutines with it
                loop.call_soon_threadsafe(self._wake_all)

    def _wake_all(self) -> None:
        self._coming = False  # first: what comes from now on wakes the loop again
        while self._to_wake:
            _let_go(self._to_wake.popleft())


def _let_go(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


class Turns:
    """Of one loop. `resume`: called on it when a chain has ended."""

    def __init__(self, loop: asyncio.AbstractEventLoop, resume: Callable[[], None]) -> None:
        self._loop, self._resume = loop, resume
        self._lock = threading.Lock()
        # Threads to be woken, each with the lock that it waits for. Filled by the loop alone.
        self._waiting: deque[tuple[int, threading.Lock]] = deque()
        self._holder = 0  # the thread whose turn it is; 0: nobody's, the loop runs
        self._passed = 0
        self._ended = threading.Lock()  # what the loop waits for
        self._ended.acquire()
        self._planned = False
        self._not_before = 0.0

    @property
    def mine(self) -> bool:
        """Whether it is the calling thread's turn: the loop will look at what it has done when the chain
        ends, and need not be woken."""
        return self._holder == threading.get_ident()

    def add(self, thread: int, woken: threading.Lock) -> None:
        """`thread` waits for `woken` and may go on, when its turn comes. Called on the loop."""
        self._waiting.append((thread, woken))
        if not self._planned:
            self._planned = True
            self._loop.call_soon(self._begin)

    def pass_on(self) -> None:
        """The calling thread is about to wait, or has nothing to do: the next one's turn, if this was its."""
        if self._holder != threading.get_ident():
            return
        with self._lock:
            if self._holder != threading.get_ident():
                return  # it took too long
            self._passed += 1
            self._holder, woken = self._waiting.popleft() if self._waiting else (0, self._ended)
        # Last, so that this thread has given up the interpreter when that one asks for it.
        woken.release()

    def _begin(self) -> None:
        """The round has ended in which threads were added: theirs begins. On the loop."""
        self._planned = False
        with self._lock:
            if len(self._waiting) == 1 or time.monotonic() < self._not_before:
                self._wake_all()
                return
            self._holder, woken = self._waiting.popleft()
            woken.release()
        self._rest()
        self._resume()

    def _rest(self) -> None:
        """Until the chain has ended, or somebody has kept his turn for too long."""
        passed, until = -1, time.monotonic() + LONGEST_S
        while not self._ended.acquire(timeout=PATIENCE_S):
            with self._lock:
                if not self._holder:  # it ended just now
                    self._ended.acquire()
                    return
                if passed == self._passed or time.monotonic() > until:
                    self._holder = 0
                    self._not_before = time.monotonic() + APART_S
                    self._wake_all()
                    return
                passed = self._passed

    def _wake_all(self) -> None:
        """The lock is held."""
        while self._waiting:
            self._waiting.popleft()[1].release()
