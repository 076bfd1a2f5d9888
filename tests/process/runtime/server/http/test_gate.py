"""What every request passes: key, limits, and how what goes wrong is answered. The routes are the test's
own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route, Router

from runtime.config.serving.server import ServerConfig
from runtime.processes.pipeline.launch import Pipeline
from runtime.protocol.errors import BadRequest, EngineDead, QueueFull, RuntimeFault
from runtime.server.app import MODULES, build_app
from runtime.server.http.body import read_body
from runtime.server.http.errors import json_response
from runtime.server.http.limits import Gate
from runtime.server.http.metrics import Metrics

KEY = "correct horse"


def served(
    handler: Callable[[Request], Awaitable[Response]], metrics: Metrics | None = None, **options: Any
) -> Gate:
    config = ServerConfig(**options).verify()
    methods = ["GET", "POST"]
    router = Router(
        [
            Route("/generate", handler, methods=methods),
            Route("/v1/models/{name}", handler, methods=["GET"]),
            Route("/v1/messages", handler, methods=["POST"]),
            *(Route(path, handler) for path in ("/health", "/health_generate", "/ready", "/metrics")),
        ]
    )
    shapes = [("/v1/messages", lambda fault: {"type": "error", "message": fault.message})]
    return Gate(router, config, (metrics or Metrics("pocket")).http, shapes)


def ask(app: Gate, *requests: tuple[str, str] | tuple[str, str, dict[str, Any]]) -> list[httpx.Response]:
    async def main() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            answers = [
                client.request(method, path, **(more[0] if more else {})) for method, path, *more in requests
            ]
            return list(await asyncio.gather(*answers))

    return asyncio.run(main())


async def fine(request: Request) -> Response:
    return PlainTextResponse("fine")


def raising(error: Exception) -> Callable[[Request], Awaitable[Response]]:
    async def handler(request: Request) -> Response:
        raise error

    return handler


@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": "Bearer wrong"}, {"authorization": "Basic " + KEY}, {"authorization": KEY},
     {"authorization": "Bearer "}, {"x-api-key": "wrong"}],
)  # fmt: skip
def test_without_the_key_nobody_comes_in(headers: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    app = served(fine, api_key=KEY)
    with caplog.at_level(logging.DEBUG):
        answer, shaped = ask(app, ("POST", "/generate", {"headers": headers}),
                             ("POST", "/v1/messages", {"headers": headers}))  # fmt: skip
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    body = answer.json()
    assert body["error"]["type"] == body["type"] == "authentication_error"
    assert body["error"]["code"] == "invalid_api_key"
    assert body["object"] == "error"
    assert shaped.json()["type"] == "error"
    assert KEY not in answer.text + caplog.text


@pytest.mark.parametrize("headers", [{"authorization": f"Bearer {KEY}"}, {"authorization": f"bearer  {KEY}"},
                                     {"x-api-key": KEY}])  # fmt: skip
def test_with_the_key(headers: dict[str, str]) -> None:
    (answer,) = ask(served(fine, api_key=KEY), ("GET", "/generate", {"headers": headers}))
    assert answer.text == "fine"


def test_a_key_of_any_letters() -> None:
    app = served(fine, api_key="clé 🔑 ")
    for key, status in (("clé 🔑", 200), ("clé", 401), ("\xff", 401)):
        raw = [(b"authorization", b"Bearer " + key.encode())]
        (answer,) = ask(app, ("GET", "/generate", {"headers": raw}))
        assert answer.status_code == status


def test_health_needs_no_key_and_metrics_only_on_demand() -> None:
    open_paths = ("/health", "/health_generate", "/ready", "/metrics")
    for needed in (False, True):
        answers = ask(served(fine, api_key=KEY, metrics_need_key=needed), *(("GET", p) for p in open_paths))
        assert [answer.status_code for answer in answers] == [200, 200, 200, 401 if needed else 200]


def test_a_path_that_does_not_exist_asks_for_the_key_first() -> None:
    (answer,) = ask(served(fine, api_key=KEY), ("GET", "/admin"))
    assert answer.status_code == 401


def test_unknown_paths_and_methods() -> None:
    missing, wrong = ask(served(fine), ("GET", "/nope"), ("DELETE", "/generate"))
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert "POST" in wrong.headers["allow"]


@pytest.mark.parametrize(
    ("error", "status", "kind", "retry"),
    [
        (BadRequest("no", where="text", hint="do this"), 400, "invalid_request_error", False),
        (QueueFull("full"), 503, "service_unavailable_error", True),
        (EngineDead("gone"), 503, "service_unavailable_error", True),
        (ZeroDivisionError("the secret inside"), 500, "server_error", False),
    ],
)
def test_errors_have_one_shape(error: Exception, status: int, kind: str, retry: bool) -> None:
    (answer,) = ask(served(raising(error)), ("POST", "/generate"))
    assert answer.status_code == status
    body = answer.json()
    told = body.pop("error")
    assert told["type"] == kind
    assert told["retryable"] is retry
    assert ("retry-after" in answer.headers) is (status == 503)
    assert body == {"object": "error", **{name: told[name] for name in ("message", "type", "param", "code")}}
    if isinstance(error, RuntimeFault):
        assert (told["message"], told["param"], told["code"]) == (str(error), error.where, error.code)
    else:
        assert "secret" not in answer.text


def test_too_many_at_once_are_turned_away_and_health_is_not() -> None:
    async def main() -> None:
        go, inside = asyncio.Event(), asyncio.Semaphore(0)

        async def slow(request: Request) -> Response:
            if request.url.path == "/generate":
                inside.release()
                await go.wait()
            return PlainTextResponse("fine")

        app = served(slow, max_concurrent_requests=2)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            held = [asyncio.ensure_future(client.get("/generate")) for _ in range(2)]
            for _ in held:
                await inside.acquire()
            refused, health = await client.get("/generate"), await client.get("/health")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
            assert refused.headers["retry-after"]
            assert health.status_code == 200
            go.set()
            assert [(await one).status_code for one in held] == [200, 200]
            assert (await client.get("/generate")).status_code == 200
            assert app.active == 0

    asyncio.run(main())


def test_bodies_are_limited_whether_announced_or_not() -> None:
    config = ServerConfig(max_body_bytes=1000)

    async def echo(request: Request) -> Response:
        return json_response((await read_body(request, config)).data)

    async def drip() -> Any:
        for _ in range(50):
            yield b" " * 100

    kind = {"content-type": "application/json"}
    app = served(echo)
    small, announced, chunked, form, none, listed, empty = ask(
        app,
        ("POST", "/generate", {"json": {"a": 1}}),
        ("POST", "/generate", {"content": b"x" * 2000, "headers": kind}),
        ("POST", "/generate", {"content": drip(), "headers": kind}),
        ("POST", "/generate", {"data": {"text": "a"}}),
        ("POST", "/generate", {"content": b'{"a": 1}'}),
        ("POST", "/generate", {"json": [1]}),
        ("POST", "/generate", {"headers": kind}),
    )
    assert small.json() == {"a": 1}
    assert [a.status_code for a in (announced, chunked, form, none, listed, empty)] == [
        413,
        413,
        415,
        415,
        400,
        400,
    ]
    assert "1000 bytes" in announced.json()["message"]
    assert "application/json" in form.json()["message"]


def test_a_body_that_never_ends_is_given_up() -> None:
    config = ServerConfig(body_timeout_s=0.05)

    async def read(request: Request) -> Response:
        return json_response((await read_body(request, config)).data)

    async def main() -> None:
        app = served(read)
        sent: list[Any] = []

        async def receive() -> Any:
            if sent_body:
                await asyncio.sleep(60)
            sent_body.append(True)
            return {"type": "http.request", "body": b"{", "more_body": True}

        async def send(message: Any) -> None:
            sent.append(message)

        sent_body: list[bool] = []
        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/generate", "headers": headers,
                 "query_string": b"", "root_path": ""}  # fmt: skip
        await asyncio.wait_for(app(scope, receive, send), 50)
        assert sent[0]["status"] == 408
        assert msgspec.json.decode(sent[1]["body"])["error"]["code"] == "body_timeout"

    asyncio.run(main())


def test_requests_are_counted_by_the_path_they_match() -> None:
    metrics = Metrics("pocket")
    app = served(fine, metrics)
    ask(
        app,
        ("BREW", "/generate"),
        ("PULL", "/generate"),
        ("GET", "/v1/models/a"),
        ("GET", "/v1/models/b"),
        ("GET", "/x1"),
        ("GET", "/x2"),
        ("POST", "/generate"),
    )
    text = metrics.render(None)[0].decode()
    assert "BREW" not in text
    found = {
        (sample.labels["endpoint"], sample.labels["status_code"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "sglang_dsl:http_responses_total"
    }
    assert found == {("/v1/models/{name}", "200"): 2, ("other", "404"): 2, ("/generate", "200"): 1,
                     ("/generate", "405"): 2}  # fmt: skip
    assert "sglang_dsl:http_requests_active" in text


def test_other_origins_may_ask_only_when_the_config_says_so(pipeline: Pipeline) -> None:
    preflight = {"origin": "https://a.example", "access-control-request-method": "POST",
                 "access-control-request-headers": "authorization"}  # fmt: skip
    for origins, allowed in (((), None), (("https://a.example",), "https://a.example"), (("*",), "*")):
        app = build_app(pipeline.manager, ServerConfig(cors_origins=origins, api_key=KEY))
        before, plain = ask(
            app,
            ("OPTIONS", "/generate", {"headers": preflight}),
            ("GET", "/ready", {"headers": {"origin": "https://a.example"}}),
        )
        assert plain.headers.get("access-control-allow-origin") == allowed
        assert (before.status_code == 200) is (allowed is not None)
        refused, _ = ask(
            app, ("POST", "/generate", {"headers": {"origin": "https://b.example"}}), ("GET", "/ready")
        )
        assert refused.status_code == 401


OWN = {"host": "models.example:30000"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"origin": "http://models.example:30000"}, 200),
        ({"origin": "HTTP://Models.Example:30000", "sec-fetch-site": "same-origin"}, 200),
        ({"origin": "https://a.example", "sec-fetch-site": "cross-site"}, 200),
        ({"origin": "https://a.example"}, 200),
        ({"sec-fetch-site": "none"}, 200),
        ({"origin": "https://b.example"}, 403),
        ({"origin": "http://models.example"}, 403),
        ({"origin": "http://models.example:30001"}, 403),
        ({"origin": "http://models.example:x"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": ""}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"origin": "http://models.example:30000", "sec-fetch-site": "cross-site"}, 403),
    ],
)
def test_a_page_of_another_origin_changes_nothing(headers: dict[str, str], status: int) -> None:
    app = served(fine, cors_origins=("https://a.example",), allowed_hosts=("models.example",))
    post, get = ask(
        app,
        ("POST", "/generate", {"headers": OWN | headers}),
        ("GET", "/generate", {"headers": OWN | headers}),
    )
    assert (post.status_code, get.status_code) == (status, 200)
    if status == 403:
        assert post.json()["error"]["code"] == "foreign_origin"
        assert "cors_origins" in post.text


@pytest.mark.parametrize(
    ("host", "options", "status"),
    [
        ("127.0.0.1:30000", {}, 200),
        ("localhost", {}, 200),
        ("LOCALHOST.:80", {}, 200),
        ("app.localhost:1", {}, 200),
        ("[::1]:30000", {}, 200),
        ("10.0.0.7:8080", {}, 200),
        ("box:30000", {}, 200),
        ("pages.example", {}, 403),
        ("pages.", {}, 403),
        ("pages.example:30000", {}, 403),
        ("127.0.0.1.pages.example", {}, 403),
        ("localhost.pages.example", {}, 403),
        ("a@pages.example", {}, 403),
        ("pages.example:x", {}, 403),
        ("[", {}, 403),
        ("models.example:1", {"allowed_hosts": ("models.example",)}, 200),
        ("pages.example", {"allowed_hosts": ("models.example",)}, 403),
        ("pages.example", {"allowed_hosts": ("models.example",), "host": "0.0.0.0"}, 403),
        ("pages.example", {"allowed_hosts": ("*",)}, 200),
        ("pages.example", {"host": "0.0.0.0"}, 200),
        ("pages.example", {"api_key": KEY}, 200),
        ("pages.example", {"cors_origins": ("*",)}, 200),
        ("a.example", {"cors_origins": ("https://a.example",)}, 200),
        ("box.lan", {"host": "box.lan"}, 200),
        ("box", {"allowed_hosts": ("models.example",), "host": "0.0.0.0"}, 200),
    ],
)
def test_a_name_that_was_made_to_lead_here_is_none_of_the_servers(
    host: str, options: dict[str, Any], status: int
) -> None:
    headers = {"host": host, "origin": f"http://{host}", "authorization": f"Bearer {KEY}"}
    if "cors_origins" in options:
        del headers["origin"]
    post, get, ready = ask(
        served(fine, **options),
        *(("POST", "/generate", {"headers": headers}), ("GET", "/generate", {"headers": headers})),
        ("GET", "/ready", {"headers": {"host": host}}),
    )
    assert (get.status_code, ready.status_code) == (status, 200)
    assert (post.status_code == 200) is (status == 200)
    if status == 403:
        assert get.json()["error"]["code"] == "foreign_origin"
        assert "allowed_hosts" in get.text


def test_default_ports_are_the_same_place_and_all_origins_may_be_allowed() -> None:
    headers = {"host": "models.example", "origin": "https://models.example:443"}
    app = served(fine, host="0.0.0.0")
    (answer,) = ask(app, ("POST", "/generate", {"headers": headers}))
    assert answer.status_code == 200
    (answer,) = ask(served(fine, cors_origins=("*",)), ("POST", "/generate", {"headers": {"origin": "x"}}))
    assert answer.status_code == 200


@pytest.mark.parametrize("path", [
    path for module in MODULES for key in module.OPENAPI for method, path in [key.split()]
    if method in ("POST", "PUT", "DELETE")
])  # fmt: skip
def test_every_route_that_changes_something_is_guarded(pipeline: Pipeline, path: str) -> None:
    app = build_app(pipeline.manager, ServerConfig())
    headers = {"origin": "https://b.example", "sec-fetch-site": "cross-site"}
    methods = ("POST", "PUT", "DELETE")
    answers = ask(app, *((method, path, {"headers": headers}) for method in methods))  # type: ignore[arg-type]
    assert [answer.status_code for answer in answers] == [403] * 3
