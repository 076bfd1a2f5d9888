"""unit/runtime/server/http/test_held_loop.py, at length."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router

from runtime.config.serving.server import ServerConfig
from runtime.processes.pipeline.launch import Pipeline
from runtime.server.app import build_app
from runtime.server.http.body import read_object
from runtime.server.http.limits import Gate
from runtime.server.http.metrics import Metrics
from tests.unit.runtime.server.http.test_held_loop import BODIES, body, frozen

MOST_S = 0.5
"""Of processor time between two turns of the loop. Without the limits it is 2 to 20 s; 0.05 to 0.2 s with
them, and 0.3 s where the core's other thread is busy."""


async def worst(
    app: Any, content: bytes, times: int, clock: Callable[[], float] = time.process_time
) -> float:
    """The most processor time that passed between two turns of the loop while the body was answered."""
    most, done = 0.0, False

    async def tick() -> None:
        nonlocal most
        last = clock()
        while not done:
            await asyncio.sleep(0.001)
            now = clock()
            most, last = max(most, now - last), now

    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        ticking = asyncio.create_task(tick())
        headers = {"content-type": "application/json"}
        posts = [client.post("/generate", content=pieces(content), headers=headers) for _ in range(times)]
        answers = await asyncio.gather(*posts)
        done = True
        await ticking
    assert {answer.status_code for answer in answers} <= {200, 400, 413}
    return most


async def pieces(content: bytes) -> Any:
    for at in range(0, len(content), 1 << 16):
        yield content[at : at + (1 << 16)]
        await asyncio.sleep(0)


@pytest.mark.parametrize("name", BODIES)
def test_a_body_does_not_hold_the_loop(name: str) -> None:
    config = ServerConfig()

    async def read(request: Request) -> Response:
        await read_object(request, config)
        return Response("ok")

    app = Gate(Router([Route("/generate", read, methods=["POST"])]), config, Metrics("pocket").http)
    assert asyncio.run(worst(app, BODIES[name](), 2)) < MOST_S


def test_a_prompt_does_not_hold_the_loop(pipeline: Pipeline) -> None:
    """Of the loop's own thread: the engine computes in this process, too."""
    app = build_app(pipeline.manager, ServerConfig())
    assert asyncio.run(worst(app, BODIES["one text"](), 2, time.thread_time)) < MOST_S
    assert asyncio.run(worst(app, BODIES["as many numbers as may be"](), 2, time.thread_time)) < MOST_S


def test_a_thousand_samples_do_not_hold_the_loop(pipeline: Pipeline) -> None:
    app = build_app(pipeline.manager, ServerConfig())
    for stream in (b"false", b"true"):
        many = b'{"text":"a","stream":' + stream + b',"sampling_params":{"n":1024,"max_new_tokens":1}}'
        assert asyncio.run(worst(app, many, 1, time.thread_time)) < MOST_S
