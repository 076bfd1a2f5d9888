"""What an operator sees of one request: its id, its line in the log, and where it came from."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route, Router

from runtime.config.serving.server import ServerConfig
from runtime.processes.supervise import logs
from runtime.protocol.errors import BadRequest, RuntimeFault
from runtime.server.anthropic.routes import error_body as anthropic_error
from runtime.server.http.limits import Gate
from runtime.server.http.metrics import Metrics
from runtime.server.http.sse import EventStream, event

log = logging.getLogger("runtime.test")
Serving = Callable[..., AbstractContextManager[Any]]


async def fine(request: Request) -> Response:
    log.info("at work")
    return PlainTextResponse("fine")


async def wrong(request: Request) -> Response:
    raise BadRequest("no")


async def cut(request: Request) -> Response:
    async def events() -> Any:
        yield event("one")
        raise BadRequest("later")

    return EventStream(events(), keep_alive_s=0)


def gate(config: ServerConfig) -> Gate:
    routes = [Route("/fine", fine), Route("/wrong", wrong), Route("/cut", cut), Route("/v1/messages", wrong)]
    shapes = [("/v1/messages", anthropic_error)]
    return Gate(Router([*routes, Route("/{any:path}", fine)]), config, Metrics("pocket").http, shapes)


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., io.StringIO]]:
    """Log as this config says, from now on; afterwards logging is as it was."""
    root = logging.getLogger()
    before = list(root.handlers), root.level, logging.getLogger(logs.ACCESS).disabled
    monkeypatch.setattr(logging, "raiseExceptions", logging.raiseExceptions)

    def start(config: ServerConfig) -> io.StringIO:
        made = io.StringIO()
        monkeypatch.setattr(sys, "stderr", made)  # not sooner: pytest sets it for each phase
        logs.set_up(config, "worker-3")
        return made

    yield start
    root.handlers[:], level, logging.getLogger(logs.ACCESS).disabled = before
    root.setLevel(level)


def ask(app: Gate, path: str, headers: Any = None) -> httpx.Response:
    async def main() -> httpx.Response:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://127.0.0.1"
        ) as client:
            return await client.get(path, headers=headers)

    return asyncio.run(main())


def test_the_clients_id_is_the_requests() -> None:
    app = gate(ServerConfig())
    answer = ask(app, "/fine", {"X-Request-Id": "order-66/a"})
    assert answer.headers.get_list("x-request-id") == ["order-66/a"]
    refused = ask(app, "/wrong", {"X-Request-Id": "order-66"})
    assert refused.headers["x-request-id"] == refused.json()["error"]["request_id"] == "order-66"
    assert ask(app, "/v1/messages", {"x-request-id": "order-66"}).json()["request_id"] == "order-66"
    streamed = ask(app, "/cut", {"x-request-id": "order-66"})
    assert streamed.headers["x-request-id"] == "order-66"
    assert json.loads(streamed.text.split("data: ")[2])["error"]["request_id"] == "order-66"
    assert logs.REQUEST_ID.get() is None


@pytest.mark.parametrize("given", [None, "", "a" * 101, "two words", 'quoted"', "line\x0bend", "\xe9"])
def test_an_id_that_is_no_plain_word_is_replaced(given: str | None) -> None:
    raw = [] if given is None else [(b"x-request-id", given.encode("latin-1"))]
    made = [ask(gate(ServerConfig()), "/fine", raw).headers["x-request-id"] for _ in range(2)]
    assert made[0] != made[1]
    assert all(len(one) == 32 and one != given for one in made)


@pytest.mark.parametrize("form", ["text", "json"])
def test_lines_say_which_request_they_are_about(form: str, logged: Callable[..., io.StringIO]) -> None:
    config = ServerConfig(access_log=True, log_format=form).verify()
    screen = logged(config)
    app = gate(config)
    ask(app, "/fine?key=secret", {"x-request-id": "order-66"})
    ask(app, "/wrong%0aINFO forged", {"x-request-id": "order-67"})
    log.info("about none")
    lines = [line for line in screen.getvalue().splitlines() if "order-" in line or "about none" in line]
    assert len(lines) == 4
    assert "secret" not in screen.getvalue()
    if form == "text":
        assert lines[0].endswith("worker-3: at work [order-66]")
        assert "127.0.0.1 GET /fine 200 " in lines[1]
        assert lines[1].endswith(" ms 4 bytes [order-66]")
        assert "GET /wrong%0AINFO%20forged 404" in lines[2]
        assert lines[3].endswith("about none")
        return
    work, access, other, none = map(json.loads, lines)
    assert (work["message"], work["request_id"], work["process"]) == ("at work", "order-66", "worker-3")
    assert (work["level"], work["logger"]) == ("info", "runtime.test")
    assert access["logger"] == logs.ACCESS
    told = {name: access[name] for name in ("client", "method", "path", "status", "bytes", "request_id")}
    assert told == {"client": "127.0.0.1", "method": "GET", "path": "/fine", "status": 200, "bytes": 4,
                    "request_id": "order-66"}  # fmt: skip
    assert access["duration_ms"] >= 0
    assert work["time"].endswith("+00:00")
    assert other["request_id"] == "order-67"
    assert "request_id" not in none


def test_a_line_of_json_holds_the_traceback(logged: Callable[..., io.StringIO]) -> None:
    screen = logged(ServerConfig(log_format="json"))
    try:
        raise ValueError("line\nend")
    except ValueError:
        log.exception("it failed")
    (line,) = [one for one in screen.getvalue().splitlines() if "it failed" in one]
    assert "ValueError: line\nend" in json.loads(line)["exception"]


def test_nothing_is_said_of_requests_unless_it_is_wanted(logged: Callable[..., io.StringIO]) -> None:
    screen = logged(ServerConfig())
    ask(gate(ServerConfig()), "/fine", {"x-request-id": "order-66"})
    assert "at work [order-66]" in screen.getvalue()
    assert "GET" not in screen.getvalue()


@pytest.mark.parametrize(
    ("trusted", "client", "scheme"),
    [((), "127.0.0.1", "http"), (("10.0.0.0/8",), "127.0.0.1", "http"),
     (("127.0.0.0/8",), "10.1.2.3", "https"), (("*",), "10.1.2.3", "https")],
)  # fmt: skip
def test_headers_of_trusted_proxies_alone_are_believed(
    serving: Serving, trusted: tuple[str, ...], client: str, scheme: str
) -> None:
    async def tell(scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse(f"{scope['client'][0]} {scope['scheme']}")(scope, receive, send)

    config = ServerConfig(forwarded_allow_ips=trusted).verify()
    with serving(tell, config) as server:
        headers = {"X-Forwarded-For": "10.1.2.3", "X-Forwarded-Proto": "https"}
        assert httpx.get(server.url, headers=headers).text == f"{client} {scheme}"


def test_a_proxy_is_an_address() -> None:
    with pytest.raises(RuntimeFault, match=r"forwarded_allow_ips.*got 'proxy'"):
        ServerConfig(forwarded_allow_ips=("proxy",)).verify()
