"""process/runtime/server/http/test_held_loop.py, at length."""

from __future__ import annotations

import asyncio
import time

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router

from runtime.config.serving.server import ServerConfig
from runtime.processes.pipeline.launch import Pipeline
from runtime.server.app import build_app
from runtime.server.http.body import read_body
from runtime.server.http.limits import Gate
from runtime.server.http.metrics import Metrics
from tests.process.runtime.server.http.test_held_loop import (
    BODIES,
    MOST_S,
    bodies_of_routes,
    frozen,
    largest_bodies,
    worst,
)


@pytest.mark.parametrize("name", BODIES)
def test_a_body_does_not_hold_the_loop(name: str) -> None:
    config = ServerConfig()

    async def read(request: Request) -> Response:
        await read_body(request, config)
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


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("path", bodies_of_routes())
def test_the_largest_value_of_a_field_does_not_hold_the_loop(path: str, pipeline: Pipeline) -> None:
    # What a request asks of the engine is not looked at here: it has little time for it.
    app = build_app(pipeline.manager, ServerConfig(request_timeout_s=2.0))
    for name, content in largest_bodies(path, bodies_of_routes()[path]):
        assert asyncio.run(worst(app, content, 1, time.thread_time, path, 0.02)) < MOST_S, name
