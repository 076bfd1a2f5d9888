"""The server's own limits hold on the routes of other interfaces as well."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from runtime.config.serving.server import ServerConfig
from runtime.processes.pipeline.launch import Pipeline
from runtime.protocol.io_struct import GenerateReqInput
from runtime.protocol.requests.generate import SingleGenerateReq
from runtime.server.app import build_app
from runtime.server.http.keys import KeyRing

TURNS = [{"role": "user", "content": "Which river runs through Ostrel?"}]
Serving = Callable[..., AbstractContextManager[Any]]


@pytest.fixture(scope="module")
def hurried(pipeline: Pipeline, serving: Serving) -> Iterator[httpx.Client]:
    """A server that gives requests a minute, and takes four prompts at most."""
    config = ServerConfig(max_batch_items=4, served_model_name="pocket", request_timeout_s=60.0)
    with (
        serving(build_app(pipeline.manager, config), config) as made,
        httpx.Client(base_url=made.url, timeout=300) as client,
    ):
        yield client


def test_a_deadline_changes_nothing_else(hurried: httpx.Client) -> None:
    body = {"messages": TURNS, "temperature": 1.0, "seed": 3, "n": 2, "max_tokens": 6}
    choices = hurried.post("/v1/chat/completions", json=body).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    texts = {"prompt": ["The Queen", "Hello"], "n": 2, "temperature": 1.0, "seed": 3, "max_tokens": 4}
    assert len(hurried.post("/v1/completions", json=texts).json()["choices"]) == 4
    assert len(hurried.post("/v1/embeddings", json={"input": ["a", "b"]}).json()["data"]) == 2


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": TURNS, "n": 3}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": TURNS, "model": "pocket"}),
    ],
)
def test_the_deadline_holds(pipeline: Pipeline, serving: Serving, path: str, body: dict[str, Any]) -> None:
    config = ServerConfig(served_model_name="pocket", request_timeout_s=0.002)
    limit = "max_output_tokens" if path.endswith("responses") else "max_tokens"
    with serving(build_app(pipeline.manager, config), config) as made:
        answer = httpx.post(made.url + path, json={**body, limit: 400, "temperature": 0}, timeout=300)
    assert answer.status_code == 504, answer.text
    assert "error" in answer.json()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": TURNS, "n": 5}, "n"),
        ("/v1/completions", {"prompt": "a", "n": 5}, "n"),
        ("/v1/completions", {"prompt": ["a"] * 5}, "prompt"),
        ("/v1/completions", {"prompt": "a", "best_of": 5}, "n"),
    ],
)
def test_too_many_at_once_are_refused(
    hurried: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    answer = hurried.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert "at most 4" in answer.json()["error"]["message"]


def test_too_many_texts_for_vectors_are_refused(hurried: httpx.Client) -> None:
    answer = hurried.post("/v1/embeddings", json={"input": ["a"] * 5})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "input"


@pytest.fixture(scope="module")
def roomy(pipeline: Pipeline, serving: Serving) -> Iterator[httpx.Client]:
    """A server with the limits it has by itself."""
    config = ServerConfig(served_model_name="pocket")
    with (
        serving(build_app(pipeline.manager, config), config) as made,
        httpx.Client(base_url=made.url, timeout=300) as client,
    ):
        yield client


HUGE = "Once there was a river called Sarn. " * 860_000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": HUGE}),
        ("/v1/completions", {"prompt": HUGE}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": HUGE}]}),
        ("/v1/responses", {"input": HUGE}),
        (
            "/v1/messages",
            {"model": "pocket", "max_tokens": 4, "messages": [{"role": "user", "content": HUGE}]},
        ),
        ("/tokenize", {"prompt": HUGE}),
    ],
    ids=lambda case: case if isinstance(case, str) else "",
)
def test_a_prompt_of_thirty_megabytes_is_refused_by_its_size(
    roomy: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    answer = roomy.post(path, json=body)
    assert answer.status_code == 400
    assert f"has {len(HUGE)} characters" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"top_logprobs_num": 1280}, "top_logprobs_num"),
        ({"top_logprobs_num": 33, "return_logprob": True, "logprob_start_len": 0}, "top_logprobs_num"),
        ({"token_ids_logprob": list(range(1280))}, "token_ids_logprob"),
        ({"token_ids_logprob": [5] * 65, "stream": True}, "token_ids_logprob"),
    ],
)
def test_log_probabilities_of_the_whole_vocabulary_are_not_told(
    roomy: httpx.Client, fields: dict[str, Any], where: str
) -> None:
    answer = roomy.post("/generate", json={"text": "a", **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == where
    assert f"max_{where.removesuffix('_num')}" in answer.json()["error"]["message"]


def test_tokens_are_counted_for_the_key_that_asked(
    pipeline: Pipeline, serving: Serving, tmp_path: Path
) -> None:
    """Prompts once, however many samples are made of them; log_metrics changes nothing of that."""
    file = tmp_path / "keys.yaml"
    file.write_text("alice: {key: a}\nbob: {key: b}\n")
    config = ServerConfig(api_keys_file=str(file))
    ring = KeyRing(config)
    with serving(build_app(pipeline.manager, config, ring=ring), config) as server:
        params = {"max_new_tokens": 3, "ignore_eos": True, "n": 4}
        answer = httpx.post(
            f"{server.url}/generate",
            json={"text": "Q: Who rules Hesper?\nA:", "sampling_params": params, "log_metrics": False},
            headers={"authorization": "Bearer a"},
            timeout=300,
        )
        vectorless = httpx.get(f"{server.url}/v1/models", headers={"x-api-key": "b"}, timeout=300)
    assert (answer.status_code, vectorless.status_code) == (200, 200)
    spent = {quota.key_name: (quota.requests, quota.tokens, quota.running) for quota in ring.quotas}
    assert spent == {"alice": (1, 11 + 4 * 3, 0), "bob": (0, 0, 0)}


def held_requests() -> list[object]:
    kinds = (GenerateReqInput, SingleGenerateReq)
    return [one for one in gc.get_objects() if type(one) in kinds and len(one.text or "") == len(HUGE)]


def test_what_is_refused_is_let_go_of_at_once(roomy: httpx.Client) -> None:
    """An error that somebody keeps refers to frames that refer to it, and to the prompt. No collector runs:
    what is still held once the server's coroutines have returned is held by a circle."""
    gc.collect()
    gc.disable()
    try:
        assert roomy.post("/generate", json={"text": HUGE}).status_code == 400
        deadline = time.monotonic() + 20  # the answer is sent before the route's frames are left
        while held_requests() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not held_requests()
    finally:
        gc.enable()
