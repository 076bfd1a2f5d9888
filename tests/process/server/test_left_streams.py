"""A stream that is left stops at the model, in this process and on a server, also when it is a web service's
client that goes: few tokens are made after that."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

import sglang_dsl as sgl
from runtime.api import Engine
from sglang_dsl import EngineBackend, RuntimeEndpoint, gen
from sglang_dsl.concurrency.loop import background
from tests.process.patience import PATIENCE_S, until

LONG = 1900
"""Tokens of an answer that nobody waits for; far fewer are made until a reader is seen to have left."""


@sgl.function
def tale(s: Any) -> None:
    s += "Once " + gen("a", max_tokens=LONG, ignore_eos=True)


@pytest.fixture(params=["engine", "endpoint"])
def model(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Callable[[], dict[str, Any]]]]:
    """A backend, and what asks its scheduler how it stands."""
    if request.param == "engine":
        engine: Engine = request.getfixturevalue("engine")
        yield EngineBackend(engine), engine.state
        return
    server = request.getfixturevalue("shared_server")
    backend = RuntimeEndpoint(server.url)

    def state() -> dict[str, Any]:
        told: dict[str, Any] = httpx.get(f"{server.url}/server_info", timeout=PATIENCE_S).json()
        return dict(told["internal_states"][0])

    yield backend, state
    background().run(backend.aclose(), PATIENCE_S)


def breaks(backend: Any) -> None:
    for _ in tale.stream(backend=backend).text_iter("a"):
        break


def leaves_the_block(backend: Any) -> None:
    with tale.run(backend=backend, stream=True) as state:
        assert next(state.text_iter("a"))


async def is_cancelled(backend: Any) -> None:
    begun = asyncio.Event()

    async def read() -> None:
        async for _ in (await tale.astream(backend=backend)).text_iter("a"):
            begun.set()

    task = asyncio.create_task(read())
    await begun.wait()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def leaves_the_async_block(backend: Any) -> None:
    async with tale.astream(backend=backend) as state:
        assert await anext(state.text_iter("a"))


def a_client_goes(backend: Any) -> None:
    """One of a web service that streams what a program says."""

    async def pieces() -> AsyncIterator[str]:
        state = await tale.astream(backend=backend)
        async for piece in state.text_iter("a"):
            yield piece

    async def page(request: Request) -> StreamingResponse:
        return StreamingResponse(pieces(), media_type="text/plain")

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        config = uvicorn.Config(Starlette(routes=[Route("/", page)]), log_level="critical", lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
            with httpx.stream("GET", url, timeout=PATIENCE_S) as answer:
                assert next(answer.iter_text())
            until(lambda: not server.server_state.connections)
        finally:
            server.should_exit = True
            thread.join(PATIENCE_S)


@pytest.mark.parametrize(
    "leave", [breaks, leaves_the_block, is_cancelled, leaves_the_async_block, a_client_goes]
)
def test_few_tokens_are_made_after_a_reader_has_left(leave: Callable[[Any], Any], model: Any) -> None:
    backend, state = model
    made = []
    for _ in range(4):  # on a busy machine all may be made before the reader comes to leave
        before = state()["generation_tokens_total"]
        asyncio.run(leave(backend)) if asyncio.iscoroutinefunction(leave) else leave(backend)
        until(lambda: state()["live"] == 0, state)
        made.append(state()["generation_tokens_total"] - before)
        if 0 < made[-1] < LONG / 2:
            return
    assert 0 < min(made) < LONG, made
