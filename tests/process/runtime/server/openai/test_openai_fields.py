"""OpenAI's routes in this process: extensions, and what becomes of a request that is cancelled."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from runtime.config.engine import EngineConfig
from runtime.config.serving.server import ServerConfig
from runtime.processes.pipeline.launch import Pipeline, launch
from runtime.protocol.control import GetStateReq
from runtime.server.app import build_app

TURNS = [{"role": "user", "content": "What is 2 plus 3?"}]
CHAT: tuple[str, dict[str, Any]] = ("/v1/chat/completions", {"messages": TURNS})
TEXT: tuple[str, dict[str, Any]] = ("/v1/completions", {"prompt": "The capital"})
BOTH = pytest.mark.parametrize(("path", "prompt"), [CHAT, TEXT], ids=["chat", "text"])
GREEDY = {"temperature": 0, "max_tokens": 4}


def choices_of(lines: list[str]) -> list[Any]:
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    return [choice for chunk in chunks for choice in chunk["choices"]]


@BOTH
def test_a_cancelled_request_ends_with_what_there_is(
    client: httpx.Client,
    pipeline: Pipeline,
    wait_until: Callable[..., None],
    path: str,
    prompt: dict[str, Any],
) -> None:
    body = {**prompt, "temperature": 0, "max_tokens": 1500, "ignore_eos": True, "rid": "long"}
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(client.post, path, json=body)
        wait_until(lambda: pipeline.manager.control(GetStateReq(), 60).data["running"] > 0)
        client.post("/abort_request", json={"rid": "long"})
        answer = held.result(300)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["finish_reason"] == "abort"
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        lines = response.iter_lines()
        first = next(lines)
        client.post("/abort_request", json={"rid": "long"})
        found = choices_of([line for line in (first, *lines) if line])
    assert [choice["finish_reason"] for choice in found[-2:]] == [None, "abort"]


@BOTH
@pytest.mark.parametrize("stream", [False, True])
def test_hidden_states_and_prompt_ids_come_with_a_choice(
    client: httpx.Client, path: str, prompt: dict[str, Any], stream: bool
) -> None:
    body = {**prompt, **GREEDY, "return_hidden_states": True, "return_prompt_token_ids": True}
    if stream:
        with client.stream("POST", path, json={**body, "stream": True}) as response:
            found = choices_of([line for line in response.iter_lines() if line])
        assert not any("hidden_states" in choice for choice in found[:-1])
    else:
        found = client.post(path, json=body).json()["choices"]
    assert found[-1]["finish_reason"]
    ids = found[-1]["prompt_token_ids"]
    assert len(found[-1]["hidden_states"]) >= len(ids)
    asked = {"messages": TURNS} if "messages" in prompt else {"prompt": prompt["prompt"]}
    assert ids == client.post("/tokenize", json=asked).json()["tokens"]
    plain = client.post(path, json={**prompt, **GREEDY}).json()["choices"][0]
    assert not {"hidden_states", "prompt_token_ids"} & set(plain)


@BOTH
def test_fields_about_logs_and_routes_are_taken(
    client: httpx.Client, path: str, prompt: dict[str, Any]
) -> None:
    plain = client.post(path, json={**prompt, **GREEDY}).json()
    more = {"custom_labels": {"team": "x"}, "no_logs": True, "log_metrics": False, "routed_dp_rank": 0,
            "data_parallel_rank": 0, "user": "me", "priority": 2}  # fmt: skip
    answer = client.post(path, json={**prompt, **GREEDY, **more})
    assert answer.status_code == 200, answer.text
    told, expected = answer.json()["choices"][0], plain["choices"][0]
    assert told == expected
    other = client.post(path, json={**prompt, **GREEDY, "routed_dp_rank": 1})
    assert (other.status_code, other.json()["error"]["param"]) == (400, "routed_dp_rank")
    for name in ("lora_path", "bootstrap_pair_key"):
        refused = client.post(path, json={**prompt, **GREEDY, name: "x"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


def test_a_chats_prompt_can_be_given_as_ids(client: httpx.Client) -> None:
    ids = client.post("/tokenize", json={"messages": TURNS}).json()["tokens"]
    path = "/v1/chat/completions"
    by_text = client.post(path, json={"messages": TURNS, **GREEDY}).json()
    for given in (
        {"input_ids": ids},
        {"input_ids": ids, "messages": []},
        {"input_ids": ids, "messages": TURNS},
    ):
        by_ids = client.post(path, json={**given, **GREEDY}).json()
        assert by_ids["choices"] == by_text["choices"]
        assert by_ids["usage"] == by_text["usage"]
    for wrong in (
        {},
        {"input_ids": []},
        {"input_ids": [10**9]},
        {"input_ids": ids, "continue_final_message": True},
    ):
        assert client.post(path, json={**wrong, **GREEDY}).status_code == 400


def test_reasoning_that_nobody_can_keep_apart_is_refused(
    client: httpx.Client, serving: Callable[..., Any]
) -> None:
    """Where the model marks none."""
    for name in ("separate_reasoning", "stream_reasoning"):
        told = client.post("/v1/chat/completions", json={**CHAT[1], **GREEDY, name: True})
        assert told.status_code == 200
        both = {**CHAT[1], **GREEDY, "max_tokens": 12, name: True, "require_reasoning": True}
        assert client.post("/v1/chat/completions", json={**both, "max_thinking_tokens": 3}).status_code == 200
    engine = EngineConfig(
        model="pocket", device="cpu", threads=1, max_total_tokens=1024, reasoning_end="none"
    )
    pipeline, config = launch(engine), ServerConfig(served_model_name="pocket")
    try:
        with (
            serving(build_app(pipeline.manager, config), config) as made,
            httpx.Client(base_url=made.url, timeout=300) as silent,
        ):
            for name in ("separate_reasoning", "stream_reasoning"):
                for said in (True, False):  # sglang's clients send its default, which is true
                    answer = silent.post("/v1/chat/completions", json={**CHAT[1], **GREEDY, name: said})
                    assert answer.status_code == 200
                    assert answer.json()["choices"][0]["message"]["reasoning_content"] is None
            told = silent.post("/v1/chat/completions", json={**CHAT[1], **GREEDY, "require_reasoning": True})
            assert (told.status_code, told.json()["error"]["param"]) == (400, "require_reasoning")
            thinking = {"type": "enabled", "budget_tokens": 2}
            body = {"messages": TURNS, "model": "pocket", "max_tokens": 4, "thinking": thinking}
            told = silent.post("/v1/messages", json=body)
            assert told.status_code == 400
            assert told.json()["error"]["message"].startswith("thinking: it is not known")
    finally:
        pipeline.close()
