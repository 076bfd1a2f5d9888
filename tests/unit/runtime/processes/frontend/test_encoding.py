"""What waits to be encoded: in turn for every client, and bounded."""

from __future__ import annotations

import asyncio
import threading

import pytest

from runtime.processes.frontend.client import CLIENT, Client
from runtime.processes.frontend.encoding import EncodingPool, Shares
from runtime.protocol.errors import BadRequest, QueueFull


def test_clients_take_turns() -> None:
    order: list[str] = []
    go = threading.Event()

    async def ask(pool: EncodingPool, name: str, count: int) -> None:
        CLIENT.set(Client(name))
        await asyncio.gather(*(pool.run(1, lambda: order.append(name)) for _ in range(count)))

    async def main() -> None:
        pool = EncodingPool(1000, threads=1)
        held = asyncio.create_task(pool.run(1, lambda: go.wait(300)))
        await asyncio.sleep(0)
        many = asyncio.create_task(ask(pool, "many", 20))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        few = asyncio.create_task(ask(pool, "few", 2))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        go.set()
        await asyncio.gather(held, many, few)

    asyncio.run(main())
    assert sorted(order) == ["few"] * 2 + ["many"] * 20
    assert order[:4].count("few") == 2, order


def test_errors_come_back_and_room_is_given_back() -> None:
    def fails() -> None:
        raise BadRequest("no")

    async def main() -> int:
        pool = EncodingPool(10)
        for _ in range(20):
            with pytest.raises(BadRequest, match="no"):
                await pool.run(5, fails)
        return pool.shares.held

    assert asyncio.run(main()) == 0


def test_who_goes_away_leaves_no_work() -> None:
    ran = threading.Event()

    async def main() -> None:
        pool = EncodingPool(100, threads=1)
        go = threading.Event()
        held = asyncio.create_task(pool.run(1, lambda: go.wait(300)))
        await asyncio.sleep(0)
        gone = asyncio.create_task(pool.run(40, ran.set))
        await asyncio.sleep(0)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        assert pool.shares.held == 1
        go.set()
        await held
        assert await pool.run(1, lambda: 7) == 7

    asyncio.run(main())
    assert not ran.is_set()


def test_shares() -> None:
    shares = Shares(100, "characters", "max_it")
    shares.take("a", 30)
    with pytest.raises(QueueFull, match="of one client"):
        shares.take("a", 21)
    with pytest.raises(BadRequest, match="at most 50"):
        shares.take("b", 51)
    shares.take("b", 50)
    with pytest.raises(QueueFull, match="max_it"):
        shares.take("c", 21)
    shares.give_back("a", 30)
    shares.take("c", 21)
    assert shares.held == 71
