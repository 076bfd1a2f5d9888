"""Many programs at once, for blocking and for async code: bounded, lazy, results in input order or as they
come.

Functions run on a bounded pool of threads. A function that has returned frees its thread while its
generations are still running on the event loop, so far more items than threads can be in progress.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import itertools
from collections import deque
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sized,
)
from contextlib import aclosing, closing
from dataclasses import dataclass
from typing import Any, TypeVar

from sglang_dsl.compiler.follow import Args, Kwargs, Startable
from sglang_dsl.compiler.trace import Program
from sglang_dsl.concurrency.loop import background
from sglang_dsl.concurrency.streams import Signal
from sglang_dsl.concurrency.threads import Threads
from sglang_dsl.errors import BadProgram, ProgramCancelled, again, of_item
from sglang_dsl.errors.tracebacks import exposed, trim
from sglang_dsl.execution.launch import (
    SCOPE,
    launch,
    launch_async,
    precompile_constraints,
    with_batch_budget,
)
from sglang_dsl.execution.results import Batch, Items
from sglang_dsl.interpreter.executor import Executor
from sglang_dsl.interpreter.parameters import Options
from sglang_dsl.interpreter.run import Scope, stop_here
from sglang_dsl.settings import global_config
from sglang_dsl.state.async_state import AsyncProgramState
from sglang_dsl.state.program_state import ProgramState

T = TypeVar("T")
IN_FLIGHT = 256


# -- programs ------------------------------------------------------------------------------------------------


def run_batch(
    program: Startable,
    options: Options,
    items: Iterable[Any],
    *,
    limit: int | None,
    lazy: bool,
    progress: bool,
    on_error: str,
    ordered: bool = True,
    traced: Program | None = None,
) -> Any:
    """Run a program for each item; see SglFunction.run_batch. `traced`: the program as it was traced last."""
    if traced is not None:
        precompile_constraints(options, traced)
    options = with_batch_budget(options)
    start = _item_async if program.is_async else _item
    total = len(items) if isinstance(items, Sized) else None
    source = items if lazy else Items(program.signature, items)
    work = (
        Work(functools.partial(start, program, options, item, index), index, item)
        for index, item in enumerate(source)
    )
    jobs = in_order(
        work,
        limit=limit,
        lazy=lazy,
        total=total,
        progress=progress,
        on_loop=program.is_async,
        ordered=ordered,
    )
    results = _settle(jobs, on_error, program.name)
    if not isinstance(source, Items):
        return results
    return Batch(results, program.name, source.arguments, ordered=ordered)


def run_items(
    program: Startable, options: Options, scope: Scope, items: Iterable[tuple[int, Any]], limit: int
) -> list[Job]:
    """Run a program in `scope` for each item, a pair of its position in the batch and the item. Returns the
    finished jobs in that order."""
    start = _item_async if program.is_async else _item
    work = (
        Work(functools.partial(start, program, options, item, index), index, item) for index, item in items
    )
    before = SCOPE.set(scope)
    try:
        return list(
            in_order(work, limit=limit, lazy=False, total=None, progress=False, on_loop=program.is_async)
        )
    finally:
        SCOPE.reset(before)


def _item(program: Startable, options: Options, item: Any, index: int) -> ProgramState:
    return launch(program, options, *_arguments(item), index)


async def _item_async(program: Startable, options: Options, item: Any, index: int) -> ProgramState:
    return (await launch_async(program, options, *_arguments(item), index, in_its_task=True)).blocking


def batch_of(program: str) -> str:
    """The place of an item, for its error."""
    return f"the batch of {program!r}"


def _arguments(item: Any) -> tuple[Args, Kwargs]:
    match item:
        case dict() | Mapping():
            return (), dict(item)
        case tuple() | list():
            return tuple(item), {}
        case _:
            shown = f"{item!r:.80}"
            hint = f"; write ({shown},)" if isinstance(item, str | int | float) else ""
            raise BadProgram(f"an item of a batch is a dict or a tuple of arguments, got {shown}{hint}")


@exposed
async def run_batch_async(
    program: Startable,
    options: Options,
    items: Iterable[Any] | AsyncIterable[Any],
    *,
    limit: int | None,
    on_error: str,
    ordered: bool = True,
    progress: bool = False,
) -> AsyncIterator[Any]:
    """run_batch on the caller's own event loop; see SglFunction.arun_batch."""
    options = with_batch_budget(options)

    async def one(index: int, item: Any) -> AsyncProgramState:
        state = await launch_async(program, options, *_arguments(item), index, in_its_task=True)
        try:
            await state.sync()
        except asyncio.CancelledError:
            state.cancel()
            raise
        return state

    total = len(items) if isinstance(items, Sized) else None
    results = as_they_end(items, one, limit=limit, ordered=ordered, total=total, progress=progress)
    async with aclosing(results):  # type: ignore[type-var]
        async for index, item, result in results:
            if isinstance(result, BaseException):
                of_item(result, index, item, batch_of(program.name))
                trim(result)
                if on_error != "return":
                    raise result
            yield result


@exposed
def _settle(jobs: Generator[Job, None, None], on_error: str, program: str) -> Iterator[Any]:
    """A finished job's state, or its error by policy, with its item; what is no Exception (SystemExit, ...)
    is raised."""
    # Closed at once: an exception keeps its frames, and with them a generator without a reader.
    with closing(jobs):
        for job in jobs:
            if job.error is None:
                yield job.state
                continue
            of_item(job.error, job.work.index, job.work.item, batch_of(program))
            if on_error == "return" and isinstance(job.error, Exception):
                trim(job.error)
                yield job.error
            else:
                raise job.error


# -- jobs ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Work:
    """One item of a batch. `make`: runs its function."""

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
        except BaseException as error:  # noqa: BLE001 - kept for the reader of the result
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
        except BaseException as error:  # noqa: BLE001 - kept for the reader of the result
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
        self._ended.append(self)  # first: a job that is done is counted
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

    The next piece of work is taken when it can start. A slow item delays the results of later items, but not
    their start; with `lazy`, at most four times `limit` of them are started, so that results do not pile up
    before a slow reader. `on_loop`: the pieces of work return coroutines, which run on the event loop.
    """
    most = limit or IN_FLIGHT
    signal = Signal()
    # Started and not yielded: running jobs and, in order, those that are done behind a slow one.
    begun: deque[Job] | set[Job] = deque() if ordered else set()
    ended: deque[Job] = deque()  # and not counted
    running, more = 0, True
    bar = bar_of(total) if progress else None
    threads = limit or global_config.max_threads
    pool = None if on_loop else Threads(threads, "sglang-dsl-batch", background().turns.pass_on)

    def may_start() -> bool:
        return more and running - len(ended) < most and not (lazy and len(begun) >= 4 * most)

    def progressed() -> bool:
        return (begun[0].done if isinstance(begun, deque) else bool(ended)) or may_start()

    try:
        while begun or more:
            while may_start():
                piece = next(work, None)
                if piece is None:
                    more = False
                    break
                job = Job(piece, signal, ended)
                begun.append(job) if isinstance(begun, deque) else begun.add(job)
                running += 1
                if pool is None:
                    background().start(functools.partial(job.run_async, piece.make))
                else:
                    pool.submit(functools.partial(contextvars.copy_context().run, job.run, piece.make))
            if not begun:
                break
            signal.wait(progressed)
            while ended:
                job = ended.popleft()
                running -= 1
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
        # If all are done, the threads are idle, and have ended when the caller continues.
        if pool is not None:
            pool.close(wait=not begun)
        if bar is not None:
            bar.close()


def bar_of(total: int | None) -> Any:
    """A progress bar."""
    from tqdm.auto import tqdm  # slow to import; a notebook's own in a notebook

    return tqdm(total=total, unit="program")


# -- async work ----------------------------------------------------------------------------------------------


async def as_they_end(
    items: Iterable[Any] | AsyncIterable[Any],
    work: Callable[[int, Any], Awaitable[T]],
    *,
    limit: int | None = None,
    ordered: bool = True,
    total: int | None = None,
    progress: bool = False,
) -> AsyncIterator[tuple[int, Any, T | Exception]]:
    """Yield each item's index, the item, and what `work(index, item)` returns or raises; at most `limit` run
    at once. The next item is taken when it can start. With `ordered`, at most four times `limit` results wait
    for a slow one. Leaving early cancels what is running and waits for it."""
    most = limit or IN_FLIGHT
    source = _numbered(items)
    begun: dict[asyncio.Task[T], tuple[int, Any]] = {}  # and not yielded
    done: deque[asyncio.Task[T]] = deque()  # of these; as they ended, unless in order
    more = True
    running = 0
    progressed = asyncio.Event()  # some have ended since it was cleared
    bar = bar_of(total) if progress else None

    def ended(task: asyncio.Task[T]) -> None:
        nonlocal running
        running -= 1
        if not ordered:
            done.append(task)
        progressed.set()

    try:
        while begun or more:
            while more and running < most and len(begun) < 4 * most:
                numbered = await anext(source, None)
                if numbered is None:
                    more = False
                    break
                task = asyncio.ensure_future(work(*numbered))
                begun[task] = numbered
                task.add_done_callback(ended)
                running += 1
            if not begun:
                return
            await progressed.wait()
            progressed.clear()
            if ordered:
                done.extend(itertools.takewhile(asyncio.Task.done, begun))
            while done:
                task = done.popleft()
                index, item = begun.pop(task)
                if bar is not None:
                    bar.update(1)
                yield index, item, _outcome(task)
    finally:
        for task in begun:
            task.cancel()
        if begun:
            await asyncio.wait(begun)
            for task in begun:
                task.cancelled() or task.exception()  # without a reader
        if bar is not None:
            bar.close()


def _outcome(task: asyncio.Task[T]) -> T | Exception:
    if task.cancelled():
        # By its own code: a cancelled batch has no reader.
        return ProgramCancelled("the item's own code was cancelled")
    error = task.exception()
    if error is None:
        return task.result()
    if not isinstance(error, Exception):
        raise error
    return error


async def _numbered(items: Iterable[Any] | AsyncIterable[Any]) -> AsyncIterator[tuple[int, Any]]:
    index = 0
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield index, item
            index += 1
        return
    for item in items:
        yield index, item
        index += 1
