"""The router's workers become others while it runs."""

from __future__ import annotations

import asyncio

import pytest

from runtime.protocol.errors import BadRequest
from tests.process.runtime.server.router.playing import Call, Played, hosting, play, scene, until


def test_workers_come_and_go() -> None:
    async def work() -> None:
        async with scene(Played("a")) as here, hosting(came := Played("b")) as url:
            [pool] = here.router.pools
            old = here.workers[0]
            await here.router.become(pool, [old.url, url])
            await until(lambda: len([one for one in here.router.workers if one.available]) == 2)
            assert {(await here.post(text="x")).json()["worker"] for _ in range(4)} == {"a", "b"}
            kept = here.known(old)
            await here.router.become(pool, [url + "/"])
            assert [one.name for one in here.router.workers] == [url]
            assert not kept.available
            got = len(old.got)
            assert {(await here.post(text="x")).json()["worker"] for _ in range(4)} == {"b"}
            assert len(old.got) == got
            assert old.url not in (await here.client.get("/metrics")).text.partition("worker_active")[2]
            assert came.got
            with pytest.raises(BadRequest, match="not the URL"):
                await here.router.become(pool, ["nowhere"])

    play(work())


def test_without_workers_it_says_so_and_goes_on_when_one_comes() -> None:
    async def work() -> None:
        async with scene(Played("a")) as here:
            [pool] = here.router.pools
            await here.router.become(pool, [])
            answer = await here.post(text="x")
            assert (answer.status_code, "there is none" in answer.text) == (503, True)
            assert (await here.client.get("/ready")).status_code == 503
            assert (await here.client.post("/flush_cache", json={})).status_code == 503
            assert (await here.client.get("/workers")).json() == {"workers": []}
            await here.router.become(pool, [here.workers[0].url])
            await until(lambda: pool.available)
            assert (await here.post(text="x")).status_code == 200

    play(work())


def test_a_worker_that_is_taken_out_finishes_what_it_has() -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def waits(worker: Played, call: Call) -> None:
        begun.set()
        await go_on.wait()
        await call.answer({"worker": worker.name})

    async def work() -> None:
        async with scene(Played("a", waits)) as here:
            [pool] = here.router.pools
            under_way = asyncio.create_task(here.post(text="x"))
            await begun.wait()
            await here.router.become(pool, [])
            go_on.set()
            assert (await under_way).json() == {"worker": "a"}

    play(work())
