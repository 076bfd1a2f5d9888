"""Many pieces of async work at once, on the caller's event loop: bounded, lazy, in order or as they end.
Knows no programs.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, TypeVar

from sglang_dsl.errors import ProgramCancelled
from sglang_dsl.execution.batch import IN_FLIGHT, bar_of

T = TypeVar("T")


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
    at once. The next item is taken only when there is room for it. With `ordered`, at most four times `limit`
    results wait for a slow one. Leaving early cancels what is running and waits for it."""
    most = limit or IN_FLIGHT
    source = _numbered(items)
    begun: dict[asyncio.Task[T], tuple[int, Any]] = {}  # and not given out
    done: deque[asyncio.Task[T]] = deque()  # of these, where the order does not count: as they ended
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
                taken = await anext(source, None)
                if taken is None:
                    more = False
                    break
                task = asyncio.ensure_future(work(*taken))
                begun[task] = taken
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
                task.cancelled() or task.exception()  # nobody will ask for these
        if bar is not None:
            bar.close()


def _outcome(task: asyncio.Task[T]) -> T | Exception:
    if task.cancelled():
        # By its own doing: when this batch is cancelled nobody asks.
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
