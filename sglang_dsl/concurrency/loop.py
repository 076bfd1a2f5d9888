"""The one background event loop, deadlines of its tasks, how waiting threads and coroutines are woken, and
the bounded threads for ordinary functions. Knows no programs.

Every running program of the process is a coroutine on this loop: never a thread per state or per fork.
Threads are only for user functions that must run beside their caller (stream, run_batch), and their number is
bounded.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import functools
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import wait
from typing import Any, TypeVar

from sglang_dsl.concurrency.threads import Threads
from sglang_dsl.errors import SglError
from sglang_dsl.settings import global_config

try:
    import uvloop as loops
except ImportError:  # it is not built for every system
    loops = asyncio  # type: ignore[misc]

T = TypeVar("T")

_START = threading.Lock()
_DEPTH: contextvars.ContextVar[int] = contextvars.ContextVar("sglang_dsl_thread_depth", default=0)
_CLOSE_S = 5.0
PATIENCE_S = 5e-3
"""How long one thread may keep its turn while others wait for theirs."""
LONGEST_S = 2e-2
"""How long the loop rests for one chain of turns, at most."""
APART_S = 0.1
"""After a chain that was broken, threads are woken at once for so long."""
_SHORTEST_S = 1e-3
LOOK_S = 0.5
"""How long the main thread waits at a time: an interrupt between its last check for signals and the wait is
seen only after the wait."""


# -- deadlines -----------------------------------------------------------------------------------------------


class Deadline:
    """The deadline of a task. `expired`: it has passed, and the task was cancelled for it."""

    __slots__ = ("_before", "_due", "expired", "task")

    def __init__(self, task: asyncio.Task[Any] | None, due: set[Deadline]) -> None:
        assert task is not None
        self.task, self._due, self.expired = task, due, False
        self._before = task.cancelling()
        due.add(self)

    def end(self, error: BaseException | None) -> bool:
        """The work has ended. Returns whether `error` is the cancellation by this deadline alone; the task
        then counts as not cancelled."""
        self._due.discard(self)
        if not self.expired:
            return False
        return self.task.uncancel() <= self._before and isinstance(error, asyncio.CancelledError)


class Deadlines:
    """Deadlines of many tasks on one loop, with few timers; used on its thread.

    Nearly all calls end long before their deadline, so deadlines that fall close together share a timer: they
    are rounded up to a 64th of the limit, or less. A call may be cut short that much later than its limit,
    never sooner. `running`: returns the loop's current task.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        running: Callable[[asyncio.AbstractEventLoop], asyncio.Task[Any] | None] = asyncio.current_task,
    ) -> None:
        self._loop, self._running = loop, running
        self._due: dict[float, set[Deadline]] = {}

    def begin(self, limit_s: float) -> Deadline:
        """The calling task is cancelled in `limit_s` seconds, unless the deadline has ended by then."""
        grain = _grain(limit_s)
        when = math.ceil((self._loop.time() + limit_s) / grain) * grain
        due = self._due.get(when)
        if due is None:
            due = self._due[when] = set()
            self._loop.call_at(when, self._pass, when)
        return Deadline(self._running(self._loop), due)

    def _pass(self, when: float) -> None:
        for deadline in self._due.pop(when):
            deadline.expired = True
            deadline.task.cancel()


@functools.lru_cache(maxsize=64)
def _grain(limit_s: float) -> float:
    """A power of 2, between a 128th and a 64th of the limit."""
    return math.ldexp(1.0, math.frexp(max(limit_s, _SHORTEST_S))[1] - 7)


# -- turns ---------------------------------------------------------------------------------------------------


class Inbox:
    """Coroutines of one loop that are to be woken. Waking a loop takes longer than waking a coroutine: those
    added meanwhile are woken together with the first."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._to_wake: deque[asyncio.Future[None]] = deque()
        self._coming = False

    def put(self, waiting: asyncio.Future[None]) -> None:
        """Complete the future `waiting`. From any thread."""
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
        self._coming = False  # first: later ones wake the loop again
        while self._to_wake:
            _let_go(self._to_wake.popleft())


def _let_go(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


class Turns:
    """Wakes the threads that wait for one loop, one after another.

    The interpreter runs one thread at a time: a loop that wakes forty threads and goes on makes forty-one of
    them contend for it. Threads whose values came in one round of the loop are woken as a chain instead: each
    wakes the next when it waits again, and the last one the loop, which rests meanwhile. If a thread keeps
    its turn too long, all others are woken and the loop goes on. `resume`: called on the loop after a chain.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, resume: Callable[[], None]) -> None:
        self._loop, self._resume = loop, resume
        self._lock = threading.Lock()
        # Threads to be woken, each with the lock that it waits for. Filled by the loop alone.
        self._waiting: deque[tuple[int, threading.Lock]] = deque()
        self._holder = 0  # the thread whose turn it is; 0: the loop runs
        self._passed = 0
        self._ended = threading.Lock()  # released at the end of a chain
        self._ended.acquire()
        self._planned = False
        self._not_before = 0.0

    @property
    def mine(self) -> bool:
        """Whether it is the calling thread's turn: the loop then continues by itself when the chain ends."""
        return self._holder == threading.get_ident()

    def add(self, thread: int, woken: threading.Lock) -> None:
        """Release `woken`, which `thread` waits for, when its turn comes. Called on the loop."""
        self._waiting.append((thread, woken))
        if not self._planned:
            self._planned = True
            self._loop.call_soon(self._begin)

    def pass_on(self) -> None:
        """The calling thread is about to wait, or idle: end its turn, if it has one."""
        if self._holder != threading.get_ident():
            return
        with self._lock:
            if self._holder != threading.get_ident():
                return  # its turn was ended
            self._passed += 1
            self._holder, woken = self._waiting.popleft() if self._waiting else (0, self._ended)
        woken.release()

    def _begin(self) -> None:
        """Begin a chain with the threads that were added in the last round. On the loop."""
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
        """Wait until the chain has ended, or a thread has kept its turn for too long."""
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
        while self._waiting:
            self._waiting.popleft()[1].release()


# -- the loop ------------------------------------------------------------------------------------------------


class LoopThread:
    """An event loop on its own daemon thread."""

    def __init__(self) -> None:
        self._closables: weakref.WeakSet[Any] = weakref.WeakSet()
        self._loop: asyncio.AbstractEventLoop = loops.new_event_loop()
        self.deadlines = Deadlines(self._loop)
        self.turns = Turns(self._loop, self._spawn_all)
        self._inboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, weakref.ref[Inbox]] = (
            weakref.WeakKeyDictionary()
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._to_begin: deque[tuple[Callable[[], Coroutine[Any, Any, None]], contextvars.Context]] = deque()
        self._woken = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._serve, name="sglang-dsl-loop", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                self._loop.run_forever()
            except (KeyboardInterrupt, SystemExit):
                # asyncio lets these end the loop. Here they are the error of their task alone.
                continue
            return

    @property
    def here(self) -> bool:
        """Whether this is the loop's thread."""
        return threading.get_ident() == self._thread.ident

    @property
    def alive(self) -> bool:
        """Whether it accepts work."""
        return self._loop.is_running()

    @property
    def task_count(self) -> int:
        """Number of tasks begun with start() and not done."""
        return len(self._to_begin) + len(self._tasks)

    def start(self, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Begin a task; returns at once. The loop keeps it until it ends."""
        context = contextvars.copy_context()
        if self.here:
            self._spawn(make, context)
            return
        # Waking the loop takes longer than beginning a task: tasks added meanwhile begin together.
        self._to_begin.append((make, context))
        # Checked after appending: if the turn has just ended, the loop sees the task.
        if not self._woken and not self.turns.mine:
            self._woken = True
            try:
                self._loop.call_soon_threadsafe(self._spawn_all)
            except BaseException:  # an interrupt: the next task wakes the loop
                self._woken = False
                raise

    def _spawn_all(self) -> None:
        self._woken = False  # first: later ones wake the loop again
        while self._to_begin:
            try:
                self._spawn(*self._to_begin[0])
            finally:
                self._to_begin.popleft()  # counted until it is a task

    def _spawn(self, make: Callable[[], Coroutine[Any, Any, None]], context: contextvars.Context) -> None:
        task = self._loop.create_task(make(), context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def inbox(self, loop: asyncio.AbstractEventLoop) -> Inbox:
        """Wakes the coroutines of `loop`, this one or another. Kept alive by the waiting coroutines alone, so
        that it does not outlive a loop that was dropped."""
        known = self._inboxes.get(loop)
        inbox = None if known is None else known()
        if inbox is None:
            inbox = Inbox(loop)
            self._inboxes[loop] = weakref.ref(inbox)
        return inbox

    def close_with(self, thing: Any) -> None:
        """Await `thing.aclose()` before the loop ends. Called on the loop's thread; holds it weakly."""
        self._closables.add(thing)

    def call(self, action: Callable[[], object]) -> None:
        """Run `action` on the loop's thread, soon."""
        self._loop.call_soon_threadsafe(action)

    def finalize(self, thing: object, action: Callable[[], object]) -> None:
        """call() `action` when `thing` is garbage. Finalizers may run in code that holds any lock: no lock is
        taken here."""
        weakref.finalize(thing, self._finalized, action).atexit = False

    def _finalized(self, action: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            if self._pid == os.getpid():
                self.call(action)

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine there and wait for its result here. Raises TimeoutError."""
        if self.here:
            work.close()
            raise SglError("this would block the language's own event loop; use the async method here")
        self.turns.pass_on()
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            until = math.inf if timeout_s is None else time.monotonic() + timeout_s
            while (left := until - time.monotonic()) > LOOK_S and not future.done():
                wait([future], LOOK_S)
            return future.result(max(0.0, left) if left < math.inf else None)
        except BaseException:  # too late, or the waiting was interrupted
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel what runs and stop the thread."""
        if not self._loop.is_running() or self._pid != os.getpid():
            return  # a forked child has its parent's loop, and no thread that runs it
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop).result(_CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def _cancel_all(self) -> None:
        # Cancelled tasks may begin new ones while they clean up; two rounds reach those.
        for _ in range(2):
            others = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
            for task in others:
                task.cancel()
            if others:
                await asyncio.wait(others, timeout=_CLOSE_S / 4)
        closing = (asyncio.wait_for(thing.aclose(), _CLOSE_S / 4) for thing in list(self._closables))
        await asyncio.gather(*closing, return_exceptions=True)
        await self._loop.shutdown_asyncgens()


_LOOP: LoopThread | None = None


def background() -> LoopThread:
    """The process's loop; started on first use."""
    global _LOOP
    if _LOOP is not None:
        return _LOOP
    with _START:
        if _LOOP is None:
            _LOOP = LoopThread()
            atexit.register(_LOOP.close)
        return _LOOP


def running() -> LoopThread | None:
    """The process's loop, where it was started."""
    return _LOOP


@functools.cache
def _make_pool(depth: int) -> Threads:
    # Called with the lock held.
    return Threads(global_config.max_threads, f"sglang-dsl-body{depth}", background().turns.pass_on)


def in_thread(work: Callable[[], object]) -> None:
    """Run an ordinary function beside the caller, on a bounded pool, under the caller's context variables.

    A function started from such a thread runs in the pool of the next level, so that waiting callers cannot
    hold all the threads it needs.
    """
    depth = _DEPTH.get()
    context = contextvars.copy_context()
    context.run(_DEPTH.set, depth + 1)
    background()  # the pool needs it, and starting it takes the lock
    with _START:
        pool = _make_pool(depth)
    pool.submit(functools.partial(context.run, work))


def _forget() -> None:
    # A forked child has none of its parent's threads; one of them may have held the lock.
    global _START, _LOOP
    _START, _LOOP = threading.Lock(), None
    _make_pool.cache_clear()


os.register_at_fork(after_in_child=_forget)
