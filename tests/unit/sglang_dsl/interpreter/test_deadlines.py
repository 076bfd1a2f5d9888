"""Deadlines that share timers: never sooner than said, hardly later, and nobody else's cancellation is taken
for one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sglang_dsl.concurrency.loop import Deadlines


class Clock:
    """A loop's clock and timers, moved by hand; the task is the running loop's."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[tuple[float, Callable[..., None], tuple[Any, ...]]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, then: Callable[..., None], *args: Any) -> None:
        self.timers.append((when, then, args))


class Task:
    """What a deadline asks of its task."""

    def __init__(self) -> None:
        self.cancelled = 0

    def cancelling(self) -> int:
        return self.cancelled

    def uncancel(self) -> int:
        self.cancelled -= 1
        return self.cancelled

    def cancel(self) -> None:
        self.cancelled += 1


@given(
    st.lists(st.tuples(st.floats(1e-3, 1e5), st.floats(0, 100)), min_size=1, max_size=60),
    st.floats(0, 1e6),
)
def test_no_deadline_is_early_and_none_more_than_a_64th_late(
    asked: list[tuple[float, float]], start: float
) -> None:
    clock, task = Clock(), Task()
    clock.now = start
    made = Deadlines(clock, lambda loop: task)  # type: ignore[arg-type, return-value]
    latest: dict[float, float] = {}
    for limit, later in asked:
        clock.now += later
        before = {when for when, _, _ in clock.timers}
        deadline = made.begin(limit)
        when = next(when for when, due in made._due.items() if deadline in due)
        assert when >= clock.now + limit - 1e-9 * (1 + clock.now)
        assert when <= (clock.now + limit) + limit / 64 + 1e-9 * (1 + clock.now)
        assert {when for when, _, _ in clock.timers} == before | {when}
        latest[when] = limit
        deadline.end(None)
    assert len(clock.timers) == len(latest)


def test_calls_of_one_length_have_few_timers_however_many_there_are() -> None:
    clock, task = Clock(), Task()
    made = Deadlines(clock, lambda loop: task)  # type: ignore[arg-type, return-value]
    for _ in range(10_000):
        clock.now += 0.05
        made.begin(600.0).end(None)
        for timer in [one for one in clock.timers if one[0] <= clock.now]:
            clock.timers.remove(timer)
            timer[1](*timer[2])
        assert len(clock.timers) <= 129
    assert task.cancelled == 0


async def late(limit_s: float, work: Any) -> tuple[BaseException | None, bool]:
    deadline = Deadlines(asyncio.get_running_loop()).begin(limit_s)
    try:
        await work
    except BaseException as error:  # noqa: BLE001 - what the test looks at
        return error, deadline.end(error)
    return None, deadline.end(None)


def test_what_takes_too_long_is_cut_short_and_the_task_goes_on() -> None:
    async def both() -> Any:
        return await late(0.01, asyncio.sleep(60)), await late(60, asyncio.sleep(0, "done"))

    (error, mine), in_time = asyncio.run(both())
    assert isinstance(error, asyncio.CancelledError)
    assert mine
    assert in_time == (None, False)


def test_a_cancellation_by_others_stays_theirs() -> None:
    async def cancelled() -> Any:
        task = asyncio.create_task(late(60, asyncio.sleep(60)))
        await asyncio.sleep(0)
        task.cancel()
        return await task

    error, mine = asyncio.run(cancelled())
    assert isinstance(error, asyncio.CancelledError)
    assert not mine


def test_an_error_that_comes_with_the_deadline_stays_that_error() -> None:
    async def stubborn() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise LookupError("its own") from None

    async def run() -> Any:
        told = await late(0.01, stubborn())
        task = asyncio.current_task()
        assert task is not None
        return told, task.cancelling()

    (error, mine), cancelling = asyncio.run(run())
    assert isinstance(error, LookupError)
    assert not mine
    assert cancelling == 0
