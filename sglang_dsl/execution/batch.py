"""Many programs at once: bounded, lazy, results in input order. Knows jobs, not functions or arguments.

Functions run on a bounded pool of threads. A function that has returned frees its thread while its
generations are still running on the event loop, so far more items than threads can be in progress.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

from sglang_dsl.concurrency.loop import background
from sglang_dsl.concurrency.streams import Signal
from sglang_dsl.concurrency.threads import Threads
from sglang_dsl.errors import again
from sglang_dsl.interpreter.executor import Executor
from sglang_dsl.interpreter.run import stop_here
from sglang_dsl.settings import global_config
from sglang_dsl.state.program_state import ProgramState

IN_FLIGHT = 256


@dataclass(frozen=True, slots=True)
class Work:
    """What to do for one item of a batch. `make`: runs its function."""

    make: Callable[[], Any]
    index: int
    item: Any


class Job:
    """One item. `error` is the exception of its function, or the error of its generations."""

    def __init__(self, work: Work, signal: Signal, ended: deque[Job]) -> None:
        self.work = work
        self.state: ProgramState | None = None
        self.error: BaseException | None = None
        self.done = False
        self.dropped: bool = False
        self._signal = signal
        self._ended = ended
        self._task: asyncio.Task[Any] | None = None
        self._stop_body = stop_here()

    def run(self, make: Callable[[], ProgramState]) -> None:
        """On a pool thread: run the function. The event loop waits for the rest."""
        self._stop_body.inside()
        try:
            self.state = make()
        except BaseException as error:  # noqa: BLE001 - kept for whoever reads the result
            self._finish(error)
            return
        self._follow()

    async def run_async(self, make: Callable[[], Awaitable[ProgramState]]) -> None:
        """The same on the event loop, for an async function."""
        self._task = asyncio.current_task()
        self._stop_body.inside()
        if self.dropped:
            self._finish(None)
            return
        try:
            self.state = await make()
        except BaseException as error:  # noqa: BLE001 - kept for whoever reads the result
            self._finish(error)
            return
        finally:
            self._task = None
        self._follow()

    def _follow(self) -> None:
        """The function has returned; its generations may still be running."""
        assert self.state is not None
        if self.dropped:
            self.state.cancel()
        core = self.state.core
        if not isinstance(core, Executor):
            self._finish(None)
            return
        mark = core.mark()
        if mark.done:
            self._finish(mark.error)
        else:
            mark.signal.when(lambda: mark.done, lambda: self._finish(mark.error))

    def _finish(self, error: BaseException | None) -> None:
        self.error = None if error is None else again(error)
        self._ended.append(self)  # first: who sees that it is done has counted it
        self.done = True
        self._signal.notify()

    def drop(self) -> None:
        """The result is no longer needed."""
        self.dropped = True
        self._stop_body.cancel()
        if self.state is not None:
            self.state.cancel()
        if self._task is not None:
            background().call(self._stop)

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()


def in_order(
    work: Iterator[Work],
    *,
    limit: int | None,
    lazy: bool,
    total: int | None,
    progress: bool,
    on_loop: bool = False,
    ordered: bool = True,
) -> Generator[Job, None, None]:
    """Run `work`, at most `limit` at once, and yield the finished jobs in order, or as they finish.

    The next piece of work is taken only when there is room for it. A slow item delays the results of later
    items, but not their start; with `lazy`, at most four times `limit` of them are started, so that results
    do not pile up before a slow reader. `on_loop`: the pieces of work return coroutines, which run on the
    event loop and need no threads.
    """
    most = limit or IN_FLIGHT
    signal = Signal()
    # Begun and not given out: what runs, and, where the order counts, what is done behind a slow one.
    begun: deque[Job] | set[Job] = deque() if ordered else set()
    ended: deque[Job] = deque()  # and not counted
    under_way, more = 0, True
    bar = bar_of(total) if progress else None
    threads = limit or global_config.max_threads
    pool = None if on_loop else Threads(threads, "sglang-dsl-batch", background().turns.pass_on)

    def room() -> bool:
        return more and under_way - len(ended) < most and not (lazy and len(begun) >= 4 * most)

    def progressed() -> bool:
        return (begun[0].done if isinstance(begun, deque) else bool(ended)) or room()

    try:
        while begun or more:
            while room():
                piece = next(work, None)
                if piece is None:
                    more = False
                    break
                job = Job(piece, signal, ended)
                begun.append(job) if isinstance(begun, deque) else begun.add(job)
                under_way += 1
                if pool is None:
                    background().start(functools.partial(job.run_async, piece.make))
                else:
                    pool.submit(functools.partial(contextvars.copy_context().run, job.run, piece.make))
            if not begun:
                break
            signal.wait(progressed)
            while ended:
                job = ended.popleft()
                under_way -= 1
                if bar is not None:
                    bar.update(1)
                if isinstance(begun, set):
                    begun.remove(job)
                    yield job
            while isinstance(begun, deque) and begun and begun[0].done:
                yield begun.popleft()
    finally:
        for job in begun:
            job.drop()
        # Where all is done the threads are idle, and gone when the caller goes on.
        if pool is not None:
            pool.close(wait=not begun)
        if bar is not None:
            bar.close()


def bar_of(total: int | None) -> Any:
    """A progress bar."""
    from tqdm.auto import tqdm  # only who wants a bar pays for it; a notebook's own in a notebook

    return tqdm(total=total, unit="program")
