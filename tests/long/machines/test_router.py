"""process/machines/test_router.py, at length."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.process.machines.test_router import GREEDY, Routed, start_router
from tests.process.patience import PATIENCE_S, until


def test_a_killed_replica_loses_no_request_but_those_in_flight_on_it(
    start_server: Callable[..., Any], start_router: Callable[..., Routed]
) -> None:
    """Streams that have begun on it end with an error that names it; all else is answered, and again by both
    when it is back."""
    servers = [start_server("--restart").wait_ready() for _ in range(2)]
    router = start_router(
        "--worker", *(one.url for one in servers), "--policy", "round_robin", "--cooldown-s", "1"
    )
    ended, begun, failed = threading.Event(), threading.Semaphore(0), []

    def client(number: int) -> int:
        count = 0
        with httpx.Client(base_url=router.url, timeout=PATIENCE_S) as http:
            while not ended.is_set():
                stream = (number + count) % 2 == 0
                body = {"text": f"Request {number} {count}:", "sampling_params": GREEDY, "stream": stream}
                answer = http.post("/generate", json=body)
                assert answer.status_code == 200, answer.text
                if stream:
                    assert answer.text.endswith("data: [DONE]\n\n")
                    events = [line for line in answer.text.splitlines() if line.startswith("data: {")]
                    told = json.loads(events[-1].removeprefix("data: "))
                    if "error" in told:
                        assert len(events) > 1, "it had begun"
                        failed.append(told["error"])
                    else:
                        assert (
                            told["meta_info"]["completion_tokens"] == 12 or told["meta_info"]["finish_reason"]
                        )
                else:
                    assert answer.json()["output_ids"]
                count += 1
                begun.release()
        return count

    with ThreadPoolExecutor(6) as pool, contextlib.ExitStack() as stack:
        stack.callback(ended.set)
        clients = [pool.submit(client, number) for number in range(6)]
        for _ in range(20):
            assert begun.acquire(timeout=PATIENCE_S)
        servers[0].children()["worker-0"].kill()
        for _ in range(40):
            assert begun.acquire(timeout=PATIENCE_S)
        until(lambda: state_of(router, servers[0].url) == "available", lambda: router.log)
        ended.set()
        assert all(one.result(PATIENCE_S) > 0 for one in clients)
    for error in failed:
        assert error["code"] in ("worker_failed", "engine_dead")
        assert error["code"] == "engine_dead" or servers[0].url in error["message"]
    assert router.end(signal.SIGINT) == 0
    assert "Traceback" not in router.log


def state_of(router: Routed, url: str) -> str:
    told = httpx.get(f"{router.url}/workers", timeout=PATIENCE_S).json()["workers"]
    return str(next(one["state"] for one in told if one["url"] == url))


def test_what_is_in_hand_when_it_ends(shared_server: Any, start_router: Callable[..., Routed]) -> None:
    """It is finished within drain_timeout_s; later, the client is told."""
    router = start_router("--worker", shared_server.url, "--drain-timeout-s", "0")
    long = {"max_new_tokens": 2000, "ignore_eos": True, "temperature": 0.0}
    with httpx.stream(
        "POST", f"{router.url}/generate", timeout=PATIENCE_S,
        json={"text": "Q:", "sampling_params": long, "stream": True},
    ) as answer:  # fmt: skip
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        began = time.monotonic()
        router.process.send_signal(signal.SIGTERM)
        rest = list(lines)
    told = [line for line in rest if '"error"' in line]
    assert len(told) == 1, rest[-3:]
    assert "the router is ending" in told[0]
    assert time.monotonic() - began < PATIENCE_S
    assert router.process.wait(PATIENCE_S) == 0


QUESTION = "Q: Which river runs through Ostrel?\nA:"


HELLO: dict[str, Any] = {"model": "default", "messages": [{"role": "user", "content": "Hello!"}]}


SHORT = {"temperature": 0, "max_tokens": 8}


LOGPROBS = {"return_logprob": True, "top_logprobs_num": 2}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("/generate", {"text": QUESTION, "sampling_params": GREEDY}),
    "one token": ("/generate", {"text": QUESTION, "sampling_params": {**GREEDY, "max_new_tokens": 1}}),
    "scored": (
        "/generate", {"text": QUESTION, "sampling_params": GREEDY, "logprob_start_len": 0, **LOGPROBS}
    ),
    "batch": (
        "/generate",
        {
            "text": [QUESTION, "Q: Who rules Hesper?\nA:"], "sampling_params": GREEDY,
            "logprob_start_len": 2, **LOGPROBS,
        },
    ),
    "samples": ("/generate", {"text": QUESTION, "sampling_params": {"n": 3, "seed": 7, "max_new_tokens": 8}}),
    "regex": (
        "/generate",
        {"text": QUESTION, "sampling_params": {**GREEDY, "regex": r" The river [a-zA-Z ]+ is [A-Z][a-z]+"}},
    ),
    "choices": ("/generate", {"text": QUESTION, "choices": [" Sarn", " The Sarn"]}),
    "completion": ("/v1/completions", {"model": "default", "prompt": QUESTION, **SHORT}),
    "echo": (
        "/v1/completions",
        {"model": "default", "prompt": QUESTION, "echo": True, "logprobs": 2, "n": 2, **SHORT},
    ),
    "chat": ("/v1/chat/completions", {**HELLO, "logprobs": True, "top_logprobs": 2, **SHORT}),
    "messages": ("/v1/messages", {**HELLO, **SHORT}),
    "tokenize": ("/tokenize", {"prompt": "Hello!"}),
    "wrong": ("/generate", {"text": QUESTION, "sampling_params": {"temperature": -1}}),
}  # fmt: skip


OF_THE_MOMENT = frozenset(
    {
        "id", "created", "queue_time", "first_token_latency", "e2e_latency", "cached_tokens", "decode_steps",
        "usage", "request_id", "compile_s", "cached", "num_retractions",
    }
)  # fmt: skip


def lasting(answer: Any) -> Any:
    """What of an answer is the same each time; numbers rounded."""
    match answer:
        case dict():
            return {name: lasting(value) for name, value in answer.items() if name not in OF_THE_MOMENT}
        case list():
            return [lasting(value) for value in answer]
        case float():
            return round(answer, 2)
        case _:
            return answer


def streamed(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """What the events of a stream make together: texts and the prompt's log-probabilities, by index."""
    answer = httpx.post(f"{url}{path}", json={**body, "stream": True}, timeout=PATIENCE_S)
    made: dict[str, Any] = {"status": answer.status_code}
    for line in answer.text.splitlines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        assert "error" not in event, event
        meta = event.get("meta_info", {})
        if "text" in event:  # of /generate: all so far
            made[f"text {event.get('index')}"] = event["text"]
            for name in ("input_token_logprobs", "input_top_logprobs", "output_token_logprobs"):
                if meta.get(name):
                    made[f"{name} {event.get('index')}"] = lasting(meta[name])
        for choice in event.get("choices", ()):
            place = choice["index"]
            text = choice.get("text") or choice.get("delta", {}).get("content") or ""
            made[f"text {place}"] = made.get(f"text {place}", "") + text
            for name, values in (choice.get("logprobs") or {}).items():
                made[f"{name} {place}"] = made.get(f"{name} {place}", []) + lasting(values or [])
        if event.get("type") == "content_block_delta":
            made["text"] = made.get("text", "") + event["delta"]["text"]
    return made


def start_pairs(
    start: Callable[..., Any], prefill: int, decode: int, *more: str
) -> tuple[list[Any], list[Any]]:
    common = ("--dtype", "float32", "--log-level", "warning", *more)
    prefills = [
        start("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", "0", *common)
        for _ in range(prefill)
    ]
    decodes = [start("--disaggregation-mode", "decode", *common) for _ in range(decode)]
    for one in (*prefills, *decodes):
        one.wait_ready()
    return prefills, decodes


def test_a_pair_answers_as_one_server(
    shared_server: Any,
    start_server: Callable[..., Any],
    start_router: Callable[..., Routed],
    wait_idle: Callable[..., None],
) -> None:
    [prefill], [decode] = start_pairs(start_server, 1, 1)
    router = start_router("--prefill", prefill.url, "--decode", decode.url)
    for name, (path, body) in CASES.items():
        one, other = (
            httpx.post(f"{url}{path}", json=body, timeout=PATIENCE_S)
            for url in (shared_server.url, router.url)
        )
        assert (one.status_code, lasting(one.json())) == (other.status_code, lasting(other.json())), name
        if name not in ("tokenize", "choices"):
            assert streamed(shared_server.url, path, body) == streamed(router.url, path, body), name
    session = httpx.post(f"{router.url}/open_session", json={}, timeout=PATIENCE_S).json()
    for _ in range(2):
        turn = {"text": QUESTION, "session_params": {"id": session}, "sampling_params": GREEDY}
        assert httpx.post(f"{router.url}/generate", json=turn, timeout=PATIENCE_S).status_code == 200
    httpx.post(f"{router.url}/close_session", json={"session_id": session}, timeout=PATIENCE_S)
    # A client that leaves: both sides forget its request.
    long = {"text": QUESTION, "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True}, "stream": True}
    with httpx.stream("POST", f"{router.url}/generate", json=long, timeout=PATIENCE_S) as answer:
        next(answer.iter_lines())
    wait_idle(prefill)
    wait_idle(decode)
    assert router.end() == 0
    assert "Traceback" not in router.log


def test_a_pair_of_different_numbers_of_ranks_answers_as_one_server(
    shared_server: Any, start_server: Callable[..., Any], start_router: Callable[..., Routed]
) -> None:
    common = ("--dtype", "float32", "--page-size", "16")
    prefill = start_server(
        "--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", "0", "--tp", "2", *common
    )
    decode = start_server("--disaggregation-mode", "decode", *common)
    router = start_router("--prefill", prefill.wait_ready().url, "--decode", decode.wait_ready().url)
    for number in range(6):
        body = {"text": QUESTION * number + QUESTION[number:], "sampling_params": GREEDY}
        one, other = (
            httpx.post(f"{url}/generate", json=body, timeout=PATIENCE_S).json()
            for url in (shared_server.url, router.url)
        )
        assert one["text"] == other["text"]
    state = httpx.get(f"{decode.url}/server_info", timeout=PATIENCE_S).json()["internal_states"][0]
    assert state["num_transferred_requests_total"] == 6


@pytest.mark.timeout(1200)
def test_pairs_that_are_killed_again_and_again(
    shared_server: Any,
    start_server: Callable[..., Any],
    start_router: Callable[..., Routed],
    wait_idle: Callable[..., None],
) -> None:
    """Every request ends with the right answer, or with an error that names the cause; then all work."""
    patience = ("--restart", "--disaggregation-timeout-s", "30", "--disaggregation-heartbeat-s", "1")
    prefills, decodes = start_pairs(start_server, 2, 2, *patience)
    urls = [one.url for one in (*prefills, *decodes)]
    router = start_router(
        "--prefill", *urls[:2], "--decode", *urls[2:], "--policy", "round_robin", "--cooldown-s", "1"
    )
    prompts = [f"{QUESTION} The{' river' * number}" for number in range(8)]
    expected = [
        httpx.post(
            f"{shared_server.url}/generate", json={"text": one, "sampling_params": GREEDY}, timeout=PATIENCE_S
        ).json()["text"]
        for one in prompts
    ]
    ended, answered, errors = threading.Event(), threading.Semaphore(0), []

    def client(number: int) -> None:
        count = number
        with httpx.Client(base_url=router.url, timeout=PATIENCE_S) as http:
            while not ended.is_set():
                which, stream = count % len(prompts), count % 3 == 0
                body = {"text": prompts[which], "sampling_params": GREEDY, "stream": stream}
                answer = http.post("/generate", json=body)
                if stream and answer.status_code == 200:
                    assert answer.text.endswith("data: [DONE]\n\n")
                    told = [line for line in answer.text.splitlines() if line.startswith("data: {")][-1]
                    made = json.loads(told.removeprefix("data: "))
                else:
                    made = answer.json()
                if "error" in made:
                    errors.append(made["error"])
                else:
                    assert made["text"] == expected[which]
                    answered.release()
                count += 1

    generator = random.Random(3)
    with ThreadPoolExecutor(4) as pool, contextlib.ExitStack() as stack:
        stack.callback(ended.set)
        clients = [pool.submit(client, number) for number in range(4)]
        for server in (prefills[0], decodes[0], prefills[1], decodes[1]):
            for _ in range(10):
                assert answered.acquire(timeout=PATIENCE_S)
            victim = generator.choice(["scheduler", "worker-0"])
            killed = server.children()[victim]
            killed.kill()
            if victim == "scheduler":
                until(lambda url=server.url: state_of(router, url) != "available", lambda: router.log)  # type: ignore[misc]
            else:  # another takes its place at once
                until(lambda server=server, killed=killed: server.children().get("worker-0") != killed)  # type: ignore[misc]
            until(lambda url=server.url: state_of(router, url) == "available", lambda: router.log)  # type: ignore[misc]
        for _ in range(20):
            assert answered.acquire(timeout=PATIENCE_S)
        ended.set()
        for one in clients:
            one.result(PATIENCE_S)
    known = {
        "worker_failed",
        "no_worker",
        "engine_dead",
        "transfer_failed",
        "transfer_peer_lost",
        "transfer_late",
    }
    assert {error["code"] for error in errors} <= known
    for one in (*prefills, *decodes):
        wait_idle(one)
    assert router.end() == 0
    assert "Traceback" not in router.log
