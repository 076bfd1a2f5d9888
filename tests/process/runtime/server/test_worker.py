"""What an HTTP worker says before its application is there, and what it tells of its options."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from runtime.config.engine import EngineConfig
from runtime.config.serving.server import ServerConfig
from runtime.processes.supervise.channel import ChildSpec
from runtime.server.worker import Entrance, shown_options


def get(app: Any, path: str, accept: str = "*/*") -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.get(path, headers={"accept": accept})

    return asyncio.run(ask())


def test_until_the_model_is_there_every_answer_says_so() -> None:
    entrance = Entrance()
    for path in ("/health", "/generate", "/v1/models", "/nowhere"):
        answer = get(entrance, path)
        assert answer.status_code == 503
        assert "being loaded" in answer.json()["error"]["message"]
        assert answer.json()["error"]["code"] == "not_ready"
        assert answer.headers["retry-after"] == "1"
    page = get(entrance, "/", "text/html,application/xhtml+xml,*/*;q=0.8")
    assert (page.status_code, page.headers["retry-after"]) == (503, "1")
    assert page.headers["content-type"].startswith("text/html")
    assert "being loaded" in page.text
    assert '<meta http-equiv="refresh"' in page.text

    async def hello(_: Any) -> PlainTextResponse:
        return PlainTextResponse("hello")

    entrance.app = Starlette(routes=[Route("/", hello)])
    assert get(entrance, "/").text == "hello"
    assert get(entrance, "/nowhere").status_code == 404


def test_the_key_is_not_among_the_options_that_are_told() -> None:
    spec = ChildSpec(
        role="http",
        name="worker-0",
        folder="/x",
        engine=EngineConfig(page_size=4),
        server=ServerConfig(api_key="k3y", port=5),
    )
    told = shown_options(spec)
    assert (told["port"], told["page_size"], told["model"]) == (5, 4, "pocket")
    assert "api_key" not in told
    assert "k3y" not in str(told)
