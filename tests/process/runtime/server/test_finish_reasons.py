"""Outputs that the engine completed because their budget ended: every API says so, and none of them calls a
tool."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

NAMES = ("title", "author", "town", "genre")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {name: {"type": "string"} for name in NAMES},
    "required": list(NAMES),
    "additionalProperties": False,
}
TOKENS = 30
TOOL = {"type": "function", "function": {"name": "note", "parameters": SCHEMA, "strict": True}}
CLAUDE_TOOL = {"name": "note", "input_schema": SCHEMA}
FLAT_TOOL = {"type": "function", "name": "note", "parameters": SCHEMA, "strict": True}
ASKED = [{"role": "user", "content": "Describe a book."}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "book", "schema": SCHEMA}}
HOT = {"temperature": 1.5, "seed": 3}
Sent = list[dict[str, Any]]


def sent(client: httpx.Client, path: str, body: dict[str, Any], *, stream: bool) -> Sent:
    """The answer, or the events of its stream."""
    answer = client.post(path, json={**body, "stream": stream})
    assert answer.status_code == 200, answer.text
    if not stream:
        return [answer.json()]
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line[:1] in ("d", "{")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def is_whole(text: str) -> bool:
    found = json.loads(text)
    return set(found) == set(NAMES)


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


both = pytest.mark.parametrize("stream", [False, True])


@both
def test_generate(client: httpx.Client, stream: bool) -> None:
    params = {"json_schema": json.dumps(SCHEMA), "max_new_tokens": TOKENS, "temperature": 1.5}
    last = sent(client, "/generate", {"text": "A book: ", "sampling_params": params}, stream=stream)[-1]
    meta = last["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": meta["completion_tokens"]}
    assert meta["grammar"]["closed_by_budget"]
    assert is_whole(last["text"])


def test_an_output_that_the_model_ends_is_a_stop(client: httpx.Client) -> None:
    params = {"regex": "[ab]{4}", "max_new_tokens": TOKENS, "temperature": 0}
    [made] = sent(client, "/generate", {"text": "Hi", "sampling_params": params}, stream=False)
    assert made["meta_info"]["finish_reason"]["type"] == "stop"
    assert not made["meta_info"]["grammar"]["closed_by_budget"]


@both
def test_a_stop_string_in_what_the_engine_wrote_is_no_stop(client: httpx.Client, stream: bool) -> None:
    """The end of the only match holds it, and is cut off in front of it as usual."""
    params = {"regex": "[a-c ]{60,}!!END", "max_new_tokens": 50, "stop": ["END"], "temperature": 1.5}
    last = sent(client, "/generate", {"text": "Hi", "sampling_params": params}, stream=stream)[-1]
    meta = last["meta_info"]
    assert meta["grammar"]["closed_by_budget"]
    assert meta["finish_reason"]["type"] == "length"
    assert "matched" not in meta["finish_reason"]
    assert last["text"].endswith("!!")


@both
def test_completions(client: httpx.Client, stream: bool) -> None:
    body = {"model": "pocket", "prompt": "A book: ", "json_schema": SCHEMA, "max_tokens": TOKENS, "n": 2}
    choices = [one for event in sent(client, "/v1/completions", {**body, **HOT}, stream=stream)
               for one in event["choices"]]  # fmt: skip
    reasons = {one["index"]: one["finish_reason"] for one in choices if one["finish_reason"]}
    assert reasons == {0: "length", 1: "length"}
    assert all(is_whole("".join(one["text"] for one in choices if one["index"] == at)) for at in (0, 1))


def chat(client: httpx.Client, *, stream: bool, **words: Any) -> tuple[str, str, Sent]:
    """Content, finish reason and calls."""
    body = {"model": "pocket", "messages": ASKED, "max_tokens": TOKENS, **HOT, **words}
    content, reason, calls = "", "", list[dict[str, Any]]()
    for event in sent(client, "/v1/chat/completions", body, stream=stream):
        [choice] = event["choices"]
        told = choice["delta" if stream else "message"]
        content += told.get("content") or ""
        reason = choice["finish_reason"] or reason
        for one in told.get("tool_calls") or ():
            if "id" in one:
                calls.append({"name": one["function"]["name"], "arguments": ""})
            calls[-1]["arguments"] += one["function"]["arguments"]
    return content, reason, calls


@both
def test_chat(client: httpx.Client, stream: bool) -> None:
    content, reason, calls = chat(client, stream=stream, response_format=FORMAT)
    assert (reason, calls, is_whole(content)) == ("length", [], True)


NAMED = {"type": "function", "function": {"name": "note"}}


@both
@pytest.mark.parametrize("choice", ["required", NAMED, "auto"])
def test_chat_calls_no_tool(client: httpx.Client, choice: Any, stream: bool) -> None:
    """A stream has told of the call before its budget ended: what the engine wrote is not told as its
    arguments. Where none need be called, the shortest end is an empty text."""
    messages = [{"role": "user", "content": "What is the weather in Lisbon?"}]
    tool = {"type": "function", "function": {**TOOL["function"], "name": "get_weather"}}
    if isinstance(choice, dict):
        choice = {"type": "function", "function": {"name": "get_weather"}}
    words = {"tools": [tool], "tool_choice": choice, "messages": messages, "temperature": 0, "max_tokens": 48}
    content, reason, calls = chat(client, stream=stream, **words)
    assert reason == "length"
    if stream:
        assert not any(is_json(one["arguments"]) for one in calls)
        assert content or calls or choice == "auto"
    else:
        assert not calls
        assert "get_weather" in content or choice == "auto"


def test_chat_tells_of_a_call_that_the_budget_is_enough_for(client: httpx.Client) -> None:
    tool = {"type": "function", "function": {"name": "note", "parameters": {"type": "object", "properties": {
        "cold": {"type": "boolean"}}, "required": ["cold"], "additionalProperties": False}}}  # fmt: skip
    words = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 100}
    content, reason, calls = chat(client, stream=False, **words)
    assert (content, reason, len(calls)) == ("", "tool_calls", 1)


@both
def test_a_call_that_a_stop_string_breaks_off_is_none(client: httpx.Client, stream: bool) -> None:
    words = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 200, "stop": ['"author"']}
    content, reason, calls = chat(client, stream=stream, **words)
    assert reason == "stop"
    assert not any(is_json(one["arguments"]) for one in calls)
    if not stream:
        assert not calls
        assert "title" in content


@both
@pytest.mark.parametrize("tools", [False, True])
def test_responses(client: httpx.Client, tools: bool, stream: bool) -> None:
    body: dict[str, Any] = {"model": "pocket", "input": "Describe a book.", "max_output_tokens": 32}
    if tools:
        body |= {"tools": [FLAT_TOOL], "tool_choice": "required"}
    else:
        body["text"] = {"format": {"type": "json_schema", "name": "book", "schema": SCHEMA}}
    last = sent(client, "/v1/responses", {**body, "temperature": 0}, stream=stream)[-1]
    made = last["response"] if stream else last
    assert not stream or last["type"] == "response.incomplete"
    assert (made["status"], made["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert made["output"]
    for item in made["output"]:
        assert item["status"] == "incomplete"
        assert item["type"] == "message" or (stream and not is_json(item["arguments"]))


@both
@pytest.mark.parametrize("tools", [False, True])
def test_messages(client: httpx.Client, tools: bool, stream: bool) -> None:
    body: dict[str, Any] = {"model": "pocket", "messages": ASKED, "max_tokens": 32, "temperature": 0}
    if tools:
        body |= {"tools": [CLAUDE_TOOL], "tool_choice": {"type": "any"}}
    else:
        body["output_format"] = {"type": "json_schema", "schema": SCHEMA}
    events = sent(client, "/v1/messages", body, stream=stream)
    if stream:
        [end] = [one["delta"] for one in events if one["type"] == "message_delta"]
        pieces = [one["delta"] for one in events if one["type"] == "content_block_delta"]
        text = "".join(one.get("partial_json") or one.get("text") or "" for one in pieces)
        assert is_json(text) is not tools
    else:
        [end] = events
        assert [one["type"] for one in end["content"]] == ["text"]
    assert (end["stop_reason"], end["stop_sequence"]) == ("max_tokens", None)


@both
@pytest.mark.parametrize("tools", [False, True])
def test_ollama(client: httpx.Client, tools: bool, stream: bool) -> None:
    question = "What is the weather in Lisbon?" if tools else "Describe a book."
    body: dict[str, Any] = {
        "model": "pocket",
        "messages": [{"role": "user", "content": question}],
        "options": {"num_predict": 48, "temperature": 0},
    }
    if tools:
        body["tools"] = [{"type": "function", "function": {**TOOL["function"], "name": "get_weather"}}]
    else:
        body["format"] = SCHEMA
    lines = sent(client, "/api/chat", body, stream=stream)
    assert lines[-1]["done_reason"] == "length"
    assert not any(one["message"].get("tool_calls") for one in lines)
    assert tools or is_whole("".join(one["message"]["content"] for one in lines))
