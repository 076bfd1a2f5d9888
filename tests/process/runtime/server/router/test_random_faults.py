"""Workers that fail at random, and clients that leave at random: every request ends with its own whole
answer, or with an error that names the cause; nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from typing import Any

import httpx
import pytest

from tests.exploring import EXPLORE
from tests.process.runtime.server.router.playing import (
    Behaviour,
    Call,
    Cut,
    Played,
    Scene,
    play,
    scene,
    until,
)

FAULTS = ("cut", "cut whole", "cut comments", "cut begun", "full", "ending", "defect", "wrong", "late KV")
CODES = {
    "worker_failed",
    "queue_full",
    "engine_dead",
    "internal_fault",
    "bad_request",
    "transfer_late",
    "no_worker",
}
EVENTS = 4


def acts(generator: random.Random, share: float) -> Behaviour:
    """Answers with what the request says, in so many events or as a whole; for a share of them it fails."""

    async def does(worker: Played, call: Call) -> None:
        fault = generator.choice(FAULTS) if generator.random() < share else ""
        text, stream = call.json["text"], call.json.get("stream", False)
        await asyncio.sleep(generator.random() * 0.01)
        match fault:
            case "cut":
                raise Cut
            case "full":
                await refuse(call, 503, "queue_full")
            case "ending":
                await refuse(call, 503, "engine_dead")
            case "defect":
                await refuse(call, 500, "internal_fault")
            case "wrong":
                await refuse(call, 400, "bad_request")
            case "late KV":
                await refuse(call, 504, "transfer_late")
            case "cut whole":
                await call.start(200, "application/json", 1000)
                await call.piece(b'{"text": "')
                raise Cut
            case "cut comments":
                await call.start()
                await call.piece(b": still working\n\n")
                raise Cut
            case _ if stream:
                await call.start()
                for number in range(EVENTS):
                    data = {"text": text, "worker": worker.name, "number": number}
                    whole = b"data: " + json.dumps(data).encode() + b"\n\n"
                    half = generator.randrange(len(whole))
                    await call.piece(whole[:half])
                    if fault == "cut begun" and number == 2:
                        raise Cut
                    await asyncio.sleep(0)
                    await call.piece(whole[half:])
                await call.piece(b"data: [DONE]\n\n", last=True)
            case _:
                await call.answer({"text": text, "worker": worker.name})

    return does


async def refuse(call: Call, status: int, code: str) -> None:
    await call.answer({"error": {"message": f"it is {code}", "code": code}}, status)


def judge(here: Scene, text: str, answer: httpx.Response) -> str:
    """What became of a request: its whole answer, or the code of an error that says where it comes from."""
    lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    found = [json.loads(line[6:]) for line in lines if line != "data: [DONE]"] if lines else [answer.json()]
    *events, last = found
    assert all(one["text"] == text for one in events), "of this request alone"
    assert len({one["worker"] for one in events}) <= 1, "of one worker"
    assert [one["number"] for one in events] == list(range(len(events))) or not lines
    if "error" not in last:
        assert last["text"] == text
        assert not lines or (lines[-1] == "data: [DONE]" and len(found) == EVENTS)
        return "answered"
    code = last["error"]["code"]
    assert code in CODES, last
    if code in ("worker_failed", "no_worker"):
        assert any(one.url in last["error"]["message"] for one in here.workers), last
    return str(code)


async def traffic(here: Scene, count: int, generator: random.Random, at_once: int = 8) -> Counter[str]:
    ends: Counter[str] = Counter()
    places = asyncio.Semaphore(at_once)

    async def one(number: int) -> None:
        body: dict[str, Any] = {"text": f"request {number}", "stream": generator.random() < 0.5}
        if generator.random() < 0.2:
            body["routing_key"] = f"program {number % 3}"
        leaves = generator.random() < 0.1
        async with places:
            asked = asyncio.create_task(here.post("/generate", **body))
            if leaves:
                await asyncio.sleep(generator.random() * 0.02)
                asked.cancel()
            await asyncio.wait({asked})
        if asked.cancelled():
            ends["left"] += 1
        else:
            ends[judge(here, body["text"], asked.result())] += 1

    await asyncio.gather(*(one(number) for number in range(count)))
    return ends


@pytest.mark.parametrize("prefill", [0, 2], ids=["replicas", "pairs"])
@pytest.mark.parametrize("count", [100])
def test_faults_at_random(prefill: int, count: int) -> None:
    async def work() -> None:
        generator = random.Random(EXPLORE or 11)
        workers = [Played(f"w{number}", acts(generator, 0.25)) for number in range(4)]
        options = {"cooldown_s": 0.02, "retries": 3, "policy": "cache_aware"}
        before = len(asyncio.all_tasks())
        async with scene(*workers, prefill=prefill, **options) as here:
            ends = await traffic(here, count, generator)
            assert ends.total() == count
            assert ends["answered"] > count // 2, ends
            known = here.router.workers
            await until(lambda: not any(one.active for one in known))
            for worker in workers:
                worker.does = acts(generator, 0.0)
            await until(lambda: all(one.available for one in known))
            ends = await traffic(here, 40, generator)
            assert ends["answered"] + ends["left"] == 40, ends
            await until(lambda: not any(one.active for one in known))
        await until(lambda: len(asyncio.all_tasks()) <= before)

    play(work(), 1000.0)
