"""Callers that wait for news and are cancelled at the very moment it comes."""

from __future__ import annotations

import asyncio

import pytest

from runtime.processes.frontend.batch_request import Waiter


@pytest.mark.parametrize("steps", range(6))
def test_a_cancellation_is_not_lost_when_news_comes_with_it(steps: int) -> None:
    """`steps`: turns of the loop between the news and the cancellation."""

    async def run() -> None:
        waiter = Waiter()
        waiting = asyncio.create_task(waiter.wait(300))
        for _ in range(3):
            await asyncio.sleep(0)
        waiter.notifier(lambda: None)()
        for _ in range(steps):
            await asyncio.sleep(0)
        if waiting.cancel():  # it was not over yet
            with pytest.raises(asyncio.CancelledError):
                await waiting
        else:
            assert waiting.result() is True

    asyncio.run(run())


def test_time_that_is_up_is_no_news() -> None:
    async def run() -> None:
        waiter = Waiter()
        assert not await waiter.wait(0)
        assert not await waiter.wait(0.001)
        waiter.notifier(lambda: None)()
        assert await waiter.wait(300)
        assert not await waiter.wait(0), "news is told once"

    asyncio.run(run())
