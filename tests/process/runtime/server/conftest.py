"""A real HTTP server around an application, in a thread; and one around the bundled checkpoint."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.types import ASGIApp

from runtime.config.engine import EngineConfig
from runtime.config.serving.server import ServerConfig
from runtime.processes.pipeline.launch import Pipeline, launch
from runtime.protocol.control import GetStateReq
from runtime.server.app import build_app
from runtime.server.http.serve import make_server


@dataclass
class Listening:
    port: int
    server: uvicorn.Server

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def connect(self, timeout: float = 300.0) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout)


@contextlib.contextmanager
def listening(app: ASGIApp, config: ServerConfig) -> Iterator[Listening]:
    """The application behind a socket of its own."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        server = make_server(app, config)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[held])), daemon=True)
        thread.start()
        until(lambda: server.started)
        try:
            yield Listening(held.getsockname()[1], server)
        finally:
            server.should_exit = True
            thread.join(300)
            assert not thread.is_alive()


def until(true: Callable[[], bool], timeout: float = 300.0) -> None:
    """Wait until something is true."""
    deadline = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.005)


@pytest.fixture(scope="session")
def serving() -> Callable[[ASGIApp, ServerConfig], contextlib.AbstractContextManager[Listening]]:
    return listening


@pytest.fixture(scope="session")
def wait_until() -> Callable[..., None]:
    return until


@pytest.fixture(scope="session")
def pipeline() -> Iterator[Pipeline]:
    """The bundled checkpoint, in this process."""
    made = launch(
        EngineConfig(model="pocket", device="cpu", dtype="float32", threads=1, max_total_tokens=16384, seed=1)
    )
    yield made
    made.close()


@pytest.fixture(scope="session")
def server(pipeline: Pipeline) -> Iterator[Listening]:
    config = ServerConfig(
        max_batch_items=64,
        max_body_bytes=1 << 20,
        served_model_name="pocket",
        control_timeout_s=100,
        health_timeout_s=100,
    )
    with listening(build_app(pipeline.manager, config), config) as made:
        yield made


@pytest.fixture(autouse=True)
def paced(pace: Any) -> Any:
    """What is meant to be endless is slow in all of these tests."""
    return pace


def idle(pipeline: Pipeline) -> bool:
    return bool(pipeline.manager.live == pipeline.manager.control(GetStateReq(), 60).data["live"] == 0)


@pytest.fixture
def client(server: Listening, pipeline: Pipeline, paced: Any) -> Iterator[httpx.Client]:
    """Nothing that an earlier test has left runs any more."""
    until(lambda: idle(pipeline))
    with httpx.Client(base_url=server.url, timeout=300) as made:
        yield made
