"""API keys and what each may use; orders, and who may give them. No engine: the routes are the test's own."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route, Router

from runtime.config.serving.server import ServerConfig
from runtime.processes.frontend.client import CLIENT
from runtime.protocol.errors import BadRequest, RateLimited
from runtime.server.http.keys import KeyRing, Limits, Quota
from runtime.server.http.limits import Gate
from runtime.server.http.metrics import Metrics

ORDER = "/flush_cache"


async def fine(request: Request) -> Response:
    CLIENT.get().spend(int(request.query_params.get("tokens", "0")))
    return PlainTextResponse("fine")


def gate(**options: Any) -> tuple[Gate, KeyRing, Metrics]:
    config = ServerConfig(**options).verify()
    ring, metrics = KeyRing(config), Metrics("pocket")
    metrics.observe_keys(ring)
    router = Router([Route(path, fine, methods=["GET", "POST"]) for path in ("/generate", ORDER, "/ready")])
    return Gate(router, config, metrics.http, ring=ring, orders={ORDER}), ring, metrics


def ask(app: Gate, method: str, path: str, key: str | None = None, **more: Any) -> httpx.Response:
    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            return await client.request(method, path, headers={**headers, **more.pop("headers", {})}, **more)

    return asyncio.run(main())


def statuses(app: Gate, path: str, *keys: str | None, **more: Any) -> list[int]:
    return [ask(app, "POST", path, key, **more).status_code for key in keys]


def written(folder: Path, **lines: Any) -> str:
    file = folder / "keys.yaml"
    file.write_text(json.dumps(lines))
    file.chmod(0o600)
    return str(file)


# -- orders --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded", "jsonp"])
def test_an_order_without_a_key_must_be_json(content_type: str | None) -> None:
    app, _, _ = gate()
    headers = {} if content_type is None else {"content-type": content_type}
    refused = ask(app, "POST", ORDER, headers=headers)
    assert refused.status_code == 415
    assert "application/json" in refused.text
    assert ask(app, "POST", ORDER, json={}).status_code == 200
    assert ask(app, "POST", "/generate", headers=headers).status_code == 200  # its own body is its affair


def test_who_sends_a_key_is_no_page() -> None:
    app, _, _ = gate(api_key="k")
    assert statuses(app, ORDER, None, "x", "k") == [401, 401, 200]


def test_orders_take_the_admin_key_alone() -> None:
    app, _, _ = gate(api_key="k", admin_api_key="a")
    assert statuses(app, ORDER, None, "x", "k", "a", json={}) == [401, 401, 403, 200]
    assert statuses(app, "/generate", None, "k", "a") == [401, 200, 200]
    assert "admin key" in ask(app, "POST", ORDER, "k", json={}).text


def test_an_admin_key_alone_leaves_the_rest_open() -> None:
    app, _, _ = gate(admin_api_key="a")
    assert statuses(app, ORDER, None, "x", "a", json={}) == [401, 401, 200]
    assert statuses(app, "/generate", None) == [200]


def test_the_two_keys_differ() -> None:
    with pytest.raises(BadRequest, match="admin_api_key"):
        ServerConfig(api_key="k", admin_api_key="k").verify()


# -- several keys --------------------------------------------------------------------------------------------


def test_keys_of_a_file(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"of bob").hexdigest()
    file = written(tmp_path, alice={"key": "of alice"}, bob={"sha256": digest})
    app, _, _ = gate(api_keys_file=file)
    assert statuses(app, "/generate", None, "of alice", "of bob", digest, "alice") == [
        401,
        200,
        200,
        401,
        401,
    ]
    # Many clients: none of them stops the server for the others.
    assert statuses(app, ORDER, "of alice", json={}) == [403]
    assert statuses(gate(api_keys_file=file, admin_api_key="a")[0], ORDER, "of alice", "a", json={}) == [
        403,
        200,
    ]


def test_the_file_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = written(tmp_path, alice={"key": "one", "requests_per_minute": 2})
    app, ring, _ = gate(api_keys_file=file)
    assert statuses(app, "/generate", "one") == [200]
    written(tmp_path, alice={"key": "two", "requests_per_minute": 2}, bob={"key": "three"})
    ring.reload()
    # What alice has used still counts.
    assert statuses(app, "/generate", "one", "three", "two", "two") == [401, 200, 200, 429]
    Path(file).write_text("alice: {key: [")
    ring.reload()
    assert statuses(app, "/generate", "three") == [200]
    assert "not read again" in caplog.text
    assert "two" not in caplog.text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "must contain"),
        ("- a", "must contain"),
        ("a: {key: secret", "is not YAML"),
        ("a: {}", "either key or sha256"),
        ("a: {key: b, sha256: c}", "either key or sha256"),
        ("a: {key: ' '}", "either key or sha256"),
        ("a: {sha256: abc}", "64 hexadecimal"),
        ("a: {key: b, requests_per_minute: 0}", "at least 1"),
        ("a: {key: b, requests: 1}", "requests"),
        ("a: {key: b}\nb: {key: b}", "same key"),
        ("'': {key: b}", "not a valid name"),
    ],
)
def test_a_file_that_is_wrong(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    with pytest.raises(BadRequest) as raised:
        KeyRing(ServerConfig(api_keys_file=str(file)))
    assert says in str(raised.value)
    assert str(file) in str(raised.value)
    assert "secret" not in str(raised.value)
    with pytest.raises(BadRequest, match="cannot be read"):
        KeyRing(ServerConfig(api_keys_file=str(tmp_path / "none")))


# -- limits --------------------------------------------------------------------------------------------------


def test_requests_beyond_a_limit_say_when_to_come_again(tmp_path: Path) -> None:
    file = written(tmp_path, alice={"key": "a", "requests_per_minute": 2}, bob={"key": "b"})
    app, _, metrics = gate(api_keys_file=file)
    first, second, third = (ask(app, "POST", "/generate", "a") for _ in range(3))
    assert [one.status_code for one in (first, second, third)] == [200, 200, 429]
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert first.headers["x-ratelimit-reset-requests"].endswith("s")
    assert 1 <= int(third.headers["retry-after"]) <= 30
    error = third.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert error["retryable"] is True
    assert "alice" in error["message"]
    # Looking costs nothing, and the others are not held.
    assert ask(app, "GET", "/generate", "a").status_code == 200
    assert not any("ratelimit" in name for name in ask(app, "POST", "/generate", "b").headers)
    text = metrics.render(None)[0].decode()
    found = {
        (sample.name.removeprefix("sglang_dsl:"), sample.labels["key"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "key" in sample.labels
    }
    assert found["key_requests_total", "alice"] == 2
    assert found["key_refused_total", "alice"] == 1
    assert found["key_requests_total", "bob"] == 1
    assert found["key_running", "alice"] == 0


def test_tokens_are_owed(tmp_path: Path) -> None:
    file = written(tmp_path, alice={"key": "a", "tokens_per_minute": 100})
    app, _, _ = gate(api_keys_file=file)
    first, second = (ask(app, "POST", "/generate?tokens=250", "a") for _ in range(2))
    assert (first.status_code, second.status_code) == (200, 429)
    assert first.headers["x-ratelimit-remaining-tokens"] == "0"
    assert int(second.headers["retry-after"]) > 60  # 150 are owed


def test_a_bucket_fills_up() -> None:
    now = [0.0]
    quota = Quota("a", Limits(requests_per_minute=60), clock=lambda: now[0])
    for _ in range(60):
        quota.begin()
    with pytest.raises(RateLimited) as raised:
        quota.begin()
    assert raised.value.retry_after_s == pytest.approx(1.0)
    now[0] = 1.5
    quota.begin()
    with pytest.raises(RateLimited):
        quota.begin()
    now[0] = 1000.0
    for _ in range(60):
        quota.begin()
    with pytest.raises(RateLimited):
        quota.begin()


def test_requests_at_once() -> None:
    quota = Quota("a", Limits(running_requests=2))
    quota.begin()
    quota.begin()
    with pytest.raises(RateLimited, match="at once"):
        quota.begin()
    quota.end()
    quota.begin()
    assert (quota.running, quota.requests, quota.refused) == (2, 3, 1)


def test_workers_share_a_limit() -> None:
    given = Limits(requests_per_minute=100, running_requests=1)
    assert given.share(4) == Limits(requests_per_minute=25, running_requests=1)


# -- bodies --------------------------------------------------------------------------------------------------


def test_bodies_in_hand_are_bounded_for_a_client_and_in_all() -> None:
    config = ServerConfig(max_bodies_bytes=400)
    inside, go = asyncio.Event(), asyncio.Event()

    async def held(request: Request) -> Response:
        size = len(await request.body())
        inside.set()
        await go.wait()
        return PlainTextResponse(str(size))

    app = Gate(Router([Route("/generate", held, methods=["POST"])]), config, Metrics("pocket").http)

    async def main() -> list[int]:
        def client(host: str) -> httpx.AsyncClient:
            transport = httpx.ASGITransport(app=app, client=(host, 1))
            return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")

        async with client("10.0.0.1") as one, client("10.0.0.2") as other:
            first = asyncio.create_task(one.post("/generate", content=b"x" * 150))
            await inside.wait()
            again = await one.post("/generate", content=b"x" * 150)
            second = asyncio.create_task(other.post("/generate", content=b"x" * 150))
            inside.clear()
            await inside.wait()
            too_long = await other.post("/generate", content=b"x" * 201)
            go.set()
            ended = [(await first).status_code, (await second).status_code]
            later = await one.post("/generate", content=b"x" * 150)
            return [*ended, again.status_code, too_long.status_code, later.status_code]

    assert asyncio.run(main()) == [200, 200, 503, 400, 200]
