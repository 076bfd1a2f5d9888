"""Requests through the router, and what becomes of them when workers fail: real servers, played answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from runtime.protocol.control import VERBS
from runtime.server.router.answer import WholeEvents
from tests.process.runtime.server.router.playing import Call, Cut, Played, echo, hosting, play, scene, until

DATA = b'data: {"text": "a"}\n\n'
COMMENT = b": still working\n\n"


async def dies(worker: Played, call: Call) -> None:
    raise Cut


async def refuses(worker: Played, call: Call) -> None:
    error = {"message": "the queue is full", "code": "queue_full"}
    await call.answer({"error": error}, 503)


async def dies_in_a_whole_answer(worker: Played, call: Call) -> None:
    await call.start(200, "application/json", 1000)
    await call.piece(b'{"text": "')
    raise Cut


async def comments_and_dies(worker: Played, call: Call) -> None:
    await call.start()
    await call.piece(COMMENT)
    raise Cut


async def begins_and_dies(worker: Played, call: Call) -> None:
    await call.start()
    await call.piece(DATA)
    await call.piece(b'data: {"text": "torn')
    raise Cut


async def streams(worker: Played, call: Call) -> None:
    await call.start()
    await call.piece(b'data: {"worker": "%s"}\n\n' % worker.name.encode())
    await call.piece(b"data: [DONE]\n\n", last=True)


def test_bytes_and_paths_are_passed_on_as_they_are() -> None:
    async def work() -> None:
        async with scene(Played("a")) as here:
            body = b'{"text":  "\\u00e9 one", "x": 1e3}'
            headers = {"content-type": "application/json", "x-mine": "7 \xe9".encode(), "cookie": "c=1"}
            answer = await here.client.post("/v1/chat/completions?a=b%20c", content=body, headers=headers)
            assert answer.json() == {"worker": "a", "path": "/v1/chat/completions"}
            [call] = here.workers[0].got
            assert call.body == body
            assert call.headers["x-mine"] == "7 \xe9"
            assert call.headers["x-request-id"] == answer.headers["x-request-id"]
            assert "cookie" not in call.headers
            for path in ("/v1/models", "/v1/models/a/b", "/openapi.json"):
                assert (await here.client.get(path)).json()["path"] == path
            assert (await here.client.get("/nowhere")).status_code == 404

    play(work())


@pytest.mark.parametrize("failing", [dies, refuses, dies_in_a_whole_answer])
def test_another_worker_answers_when_one_fails(failing: Any) -> None:
    async def work() -> None:
        async with scene(Played("a", failing), Played("b")) as here:
            for _ in range(6):
                answer = await here.post(text="one")
                assert answer.status_code == 200, answer.text
                assert answer.json()["worker"] == "b"
            assert here.workers[0].got, "it was tried"

    play(work())


@pytest.mark.parametrize("failing", [dies, refuses, comments_and_dies])
def test_a_stream_begins_with_another_worker(failing: Any) -> None:
    async def work() -> None:
        async with scene(Played("a", failing), Played("b", streams)) as here:
            for _ in range(4):
                answer = await here.post(text="one", stream=True)
                assert answer.status_code == 200
                assert answer.content.replace(COMMENT, b"") == b'data: {"worker": "b"}\n\ndata: [DONE]\n\n'
            assert here.workers[0].got

    play(work())


@pytest.mark.parametrize("prefill", [0, 2], ids=["replicas", "pairs"])
def test_another_attempt_has_the_time_that_is_left(prefill: int) -> None:
    async def work() -> None:
        workers = [Played(name, late_death) for name in "abcd"]
        async with scene(*workers, prefill=prefill, retries=1) as here:
            answer = await here.post(text="one", timeout_s=100)
            assert answer.status_code == 502
            given = sorted(call.json["timeout_s"] for one in workers for call in one.got if call.body)
            assert given[0] < given[-1] - 0.05 <= 100
            answer = await here.post(text="one", timeout_s=0.01)
            assert answer.status_code == 502
        calls = [call for one in workers for call in one.got if call.body and call.json["timeout_s"] < 1]
        assert 1 <= len(calls) <= (2 if prefill else 1), "no time is left for another attempt"

    play(work())


async def late_death(worker: Played, call: Call) -> None:
    if call.path == "/server_info":
        await call.answer({})
        return
    await asyncio.sleep(0.06)
    raise Cut


def test_a_stream_that_broke_off_ends_with_an_error_and_whole_events() -> None:
    async def work() -> None:
        async with scene(Played("a", begins_and_dies)) as here:
            for path in ("/generate", "/v1/messages", "/v1/responses"):
                answer = await here.post(path, text="one", stream=True)
                assert answer.content.startswith(DATA)
                rest = answer.content.removeprefix(DATA)
                assert b"torn" not in rest
                lines = [line for line in rest.decode().splitlines() if line.startswith("data: {")]
                told = json.loads(lines[0].removeprefix("data: "))
                message = told["error"]["message"] if "error" in told else told["message"]
                assert message.startswith(f"{here.workers[0].url}: broke off")
            assert len(here.workers[0].got) == 3, "none was tried again"

    play(work())


def test_what_no_worker_can_do_is_an_error_that_names_it() -> None:
    async def work() -> None:
        async with scene(Played("a", dies)) as here:
            answer = await here.post(text="one")
            assert (answer.status_code, answer.json()["error"]["code"]) == (502, "worker_failed")
            assert here.workers[0].url in answer.json()["error"]["message"]
            assert answer.json()["error"]["retryable"]
            answer = await here.post("/v1/messages", text="one")
            assert answer.json()["type"] == "error"
        async with scene(Played("a", refuses)) as here:
            answer = await here.post(text="one")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "queue_full")
        async with scene(Played("a", ready=False), wait=False) as here:
            await until(lambda: here.router.workers[0].reason == "being loaded")
            answer = await here.post(text="one")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_worker")
            assert answer.headers["retry-after"] == "1"
            assert f"{here.workers[0].url} is not_ready: being loaded" in answer.json()["error"]["message"]

    play(work())


def test_a_worker_that_is_gone_and_comes_back() -> None:
    async def work() -> None:
        async with contextlib.AsyncExitStack() as stack:
            other = Played("other")
            away = await stack.enter_async_context(contextlib.AsyncExitStack())
            other.url = await away.enter_async_context(hosting(other))
            port = int(other.url.rpartition(":")[2])
            here = await stack.enter_async_context(scene(cooldown_s=0.05, worker=[other.url]))
            [worker] = here.router.workers
            await until(lambda: worker.available)
            assert (await here.post(text="one")).json()["worker"] == "other"
            await away.aclose()
            answer = await here.post(text="one")
            assert answer.status_code in (502, 503)
            assert other.url in answer.json()["error"]["message"]
            await until(lambda: not worker.ready)
            assert (await here.post(text="one")).status_code == 503
            assert (await here.client.get("/ready")).status_code == 503
            assert (await here.client.get("/health")).status_code == 200
            await stack.enter_async_context(hosting(other, port))
            await until(lambda: worker.available)
            assert (await here.post(text="one")).json()["worker"] == "other"
            assert (await here.client.get("/ready")).status_code == 200

    play(work())


def test_the_circuit_opens_and_one_request_tries_it() -> None:
    async def work() -> None:
        worker, entered, gate = Played("a", dies), asyncio.Event(), asyncio.Event()
        # Longer than a request takes on a busy machine, or a second one would be let in to try as well.
        async with scene(worker, failure_threshold=2, cooldown_s=2.0, retries=0) as here:
            for status in (502, 502, 503):
                assert (await here.post(text="one")).status_code == status
            assert len(worker.got) == 2
            told = (await here.client.get("/workers")).json()["workers"][0]
            assert told["state"] == "failed"
            assert "broke off" in told["reason"]

            async def waits(worker: Played, call: Call) -> None:
                entered.set()
                await gate.wait()
                await echo(worker, call)

            worker.does = waits
            await until(lambda: here.known(worker).state == "trial")
            trial = asyncio.create_task(here.post(text="one"))
            await entered.wait()
            assert (await here.post(text="one")).status_code == 503, "one at a time"
            await until(lambda: here.known(worker).state == "trial")  # it takes long, and has not failed
            gate.set()
            assert (await trial).status_code == 200
            assert here.known(worker).state == "available"
            assert (await here.post(text="one")).status_code == 200

    play(work())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_the_request(stream: bool) -> None:
    async def work() -> None:
        entered, left = asyncio.Event(), asyncio.Event()

        async def waits(worker: Played, call: Call) -> None:
            if stream:
                await call.start()
                await call.piece(DATA)
            entered.set()
            await call.gone()
            left.set()

        async with scene(Played("a", waits)) as here:
            client = asyncio.create_task(here.post(text="one", stream=stream))
            await entered.wait()
            client.cancel()
            await left.wait()
            await until(lambda: here.known(here.workers[0]).active == 0)
            assert here.known(here.workers[0]).state == "available", "that is no failure"

    play(work())


def test_a_slow_reader_holds_the_worker_back() -> None:
    async def work() -> None:
        sent, full, whole = 0, 200 << 20, b"data: " + b"x" * 65536 + b"\n\n"

        async def floods(worker: Played, call: Call) -> None:
            nonlocal sent
            await call.start()
            while sent < full:
                await call.piece(whole)
                sent += len(whole)
            await call.piece(b"", last=True)

        async with (
            scene(Played("a", floods)) as here,
            here.client.stream("POST", "/generate", json={"stream": True}) as answer,
        ):
            before = -1
            while before != sent:  # until nothing moves any more
                before = sent
                await asyncio.sleep(0.3)
            assert 0 < sent < full // 4
            async for _ in answer.aiter_raw():
                if sent > before:
                    break

    play(work())


def test_a_worker_that_dies_without_a_word_fails_its_requests() -> None:
    async def work() -> None:
        entered, silent = asyncio.Event(), asyncio.Event()

        async def waits(worker: Played, call: Call) -> None:
            entered.set()
            await silent.wait()

        worker = Played("a", waits)
        async with scene(worker, probe_timeout_s=0.05, retries=0) as here:
            asked = asyncio.create_task(here.post(text="one"))
            await entered.wait()
            worker.mute = True
            answer = await asked
            assert answer.status_code == 502
            assert "did not answer within 0.05 s" in answer.json()["error"]["message"]
            assert here.known(worker).state == "not_ready"
            silent.set()

    play(work())


def test_long_answers_are_passed_on_as_they_come() -> None:
    async def work() -> None:
        rest = asyncio.Event()

        async def long(worker: Played, call: Call) -> None:
            await call.start(200, "application/json")
            await call.piece(b'"' + b"x" * (2 << 20))
            await rest.wait()
            await call.piece(b'"', last=True)

        async with scene(Played("a", long)) as here:
            async with here.client.stream("POST", "/generate", json={}) as answer:
                pieces = answer.aiter_raw()
                first = await anext(pieces)
                rest.set()
                body = first + b"".join([piece async for piece in pieces])
            assert len(body) == (2 << 20) + 2

    play(work())


def test_whose_turn_it_is_goes_along() -> None:
    async def work() -> None:
        async with scene(Played("a"), worker_api_key="theirs", api_key="mine") as here:
            labels = []
            for flow in ("one", "two", "one", None):
                headers = {"authorization": "Bearer mine"} | ({"x-sglang-dsl-flow": flow} if flow else {})
                await here.post(text="one", headers=headers)
                labels.append(here.workers[0].got[-1].headers.get("x-sglang-dsl-flow"))
            assert labels[0] == labels[2] != labels[1]
            assert None not in labels[:3]
            assert labels[3] is None

    play(work())


def test_keys() -> None:
    async def work() -> None:
        async with scene(Played("a"), worker_api_key="theirs", api_key="mine") as here:
            assert (await here.post(text="one")).status_code == 401
            good = {"authorization": "Bearer mine"}
            assert (await here.post(text="one", headers=good)).status_code == 200
            assert here.workers[0].got[-1].headers["authorization"] == "Bearer theirs"
            assert "theirs" not in repr(here.router.config)
        async with scene(Played("a"), api_key="mine") as here:
            await here.post(text="one", headers={"x-api-key": "mine"})
            assert not {"authorization", "x-api-key"} & set(here.workers[0].got[-1].headers)
        async with scene(Played("a")) as here:
            await here.post(text="one", headers={"authorization": "Bearer client's"})
            assert here.workers[0].got[-1].headers["authorization"] == "Bearer client's"

        async def turns_down(worker: Played, call: Call) -> None:
            await call.answer({"error": {"message": "the API key is invalid"}}, 401)

        async with scene(Played("a", turns_down), worker_api_key="theirs", retries=0) as here:
            answer = await here.post(text="one")
            assert answer.status_code == 502
            assert "does not accept the router's key" in answer.text
        async with scene(Played("a", turns_down)) as here:
            assert (await here.post(text="one")).status_code == 401

    play(work())


def test_sessions_and_responses_stay_with_their_worker() -> None:
    async def answers(worker: Played, call: Call) -> None:
        if call.path == "/open_session":
            await call.answer(f"session of {worker.name}")
        elif call.path == "/v1/responses":
            await call.answer({"id": f"resp_{worker.name}", "worker": worker.name})
        else:
            await echo(worker, call)

    async def work() -> None:
        async with scene(Played("a", answers), Played("b", answers), cooldown_s=60.0) as here:
            opened = [(await here.client.post("/open_session")).json() for _ in range(2)]
            assert sorted(opened) == ["session of a", "session of b"]
            for _ in range(3):
                for name in ("a", "b"):
                    for fields in (
                        {"session_id": f"session of {name}"},
                        {"session_params": {"id": f"session of {name}"}},
                    ):
                        assert (await here.post(text="one", **fields)).json()["worker"] == name
            made = [(await here.post("/v1/responses", input="x")).json()["worker"] for _ in range(2)]
            assert sorted(made) == ["a", "b"]
            for name in ("a", "b", "a"):
                assert (await here.client.get(f"/v1/responses/resp_{name}")).json()["worker"] == name
                next_one = await here.post("/v1/responses", input="x", previous_response_id=f"resp_{name}")
                assert next_one.json()["worker"] == name
            here.workers[0].ready = False
            await until(lambda: not here.known(here.workers[0]).ready)
            answer = await here.post(text="one", session_id="session of a")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_worker")
            assert here.workers[0].url in answer.json()["error"]["message"]
            await here.post("/close_session", session_id="session of b")
            here.workers[0].ready = True
            await until(lambda: here.known(here.workers[0]).ready)
            seen = {
                (await here.post(text="one", session_id="session of b")).json()["worker"] for _ in range(2)
            }
            assert seen == {"a", "b"}

    play(work())


def test_programs_stay_with_their_worker_while_it_works() -> None:
    async def work() -> None:
        async with scene(Played("a"), Played("b"), cooldown_s=60.0) as here:
            first = (await here.post(text="one", routing_key="p")).json()["worker"]
            for _ in range(3):
                assert (await here.post(text="one", routing_key="p")).json()["worker"] == first
                await here.post(text="one")
                assert (await here.post("/v1/completions", prompt_cache_key="p")).json()["worker"] == first
            played = next(one for one in here.workers if one.name == first)
            played.does = dies
            for _ in range(3):
                assert (await here.post(text="one", routing_key="p")).json()["worker"] != first

    play(work())


def test_orders_go_to_all_and_what_is_told_comes_from_all() -> None:
    async def answers(worker: Played, call: Call) -> None:
        if call.path == "/server_info":
            await call.answer({"model_path": "m", "internal_states": [{"of": worker.name}]})
        elif call.path == "/get_load":
            await call.answer([{"dp_rank": 0, "num_reqs": 1}])
        else:
            await echo(worker, call)

    async def work() -> None:
        async with scene(Played("a", answers), Played("b", answers)) as here:
            for path in (path for verb in VERBS.values() if verb.admin for path in verb.paths):
                assert (await here.post(path, json={})).status_code == 200
                assert [one.got[-1].path for one in here.workers] == [path] * 2
            info = (await here.client.get("/server_info")).json()
            assert info["internal_states"] == [{"of": "a"}, {"of": "b"}]
            assert [one["state"] for one in info["workers"]] == ["available"] * 2
            loads = (await here.client.get("/get_load")).json()
            assert [one["dp_rank"] for one in loads] == [0, 1]
            here.workers[1].does = dies
            answer = await here.post("/flush_cache", json={})
            assert answer.status_code == 502
            assert here.workers[1].url in answer.text
            assert (await here.client.get("/health_generate")).status_code == 200
            here.workers[0].does = dies
            assert (await here.client.get("/health_generate")).status_code == 503

    play(work())


def test_metrics() -> None:
    async def work() -> None:
        async with scene(Played("a", dies), Played("b"), failure_threshold=1, cooldown_s=60.0) as here:
            for _ in range(3):
                await here.post(text="one")
            text = (await here.client.get("/metrics")).text
            values = {
                (
                    sample.name.partition("router_")[2],
                    here.worker_at(sample.labels["worker"]).name,
                ): sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
                if sample.name.startswith("sglang_dsl:router_")
            }
            assert values["requests_total", "a"] == 1
            assert values["worker_failures_total", "a"] == 1
            assert values["requests_total", "b"] == 3
            assert values["retries_total", "b"] == 1
            assert values["first_byte_seconds_count", "b"] == 3
            assert [values["worker_available", name] for name in ("a", "b")] == [0, 1]
            assert [values["worker_active", name] for name in ("a", "b")] == [0, 0]

    play(work())


def test_a_body_that_is_too_large_is_refused_here() -> None:
    async def work() -> None:
        async with scene(Played("a"), max_body_bytes=100) as here:
            assert (await here.post(text="x" * 200)).status_code == 413
            assert here.workers[0].got == []

    play(work())


def test_what_is_not_json_is_the_workers_business() -> None:
    async def work() -> None:
        async with scene(Played("a")) as here:
            for body in (b"{", b"[1]", b"", b"[" * 100_000, b'{"session_id": 7, "session_params": [3]}'):
                answer = await here.client.post("/generate", content=body)
                assert answer.status_code == 200
                assert here.workers[0].got[-1].body == body

    play(work())


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_events_are_whole_however_they_come(size: int) -> None:
    stream = COMMENT * 2 + DATA + COMMENT + b"event: x\ndata: 1\n\n" + b"data: [DONE]\n\n"
    events, made, begun_at = WholeEvents(), b"", None
    for start in range(0, len(stream), size):
        whole = events.feed(stream[start : start + size])
        assert whole == b"" or whole.endswith(b"\n\n")
        made += whole
        if events.begun and begun_at is None:
            begun_at = len(made)
    assert made + events.rest() == stream
    assert begun_at is not None
    assert begun_at >= len(COMMENT) * 2 + len(DATA)


def test_an_event_without_end_is_passed_on_in_pieces() -> None:
    events = WholeEvents()
    assert events.feed(b"data: " + b"x" * (1 << 20)) != b""
    assert events.torn
    assert events.feed(b"y") == b"y"
    assert events.feed(b"z\n\n") == b"z\n\n"
    assert not events.torn
