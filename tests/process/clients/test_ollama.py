"""Ollama's own client against the real processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import ollama
import pytest

from examples.pocket.tasks.tools import TOOLS
from tests.process.conftest import Served

RIVER = [{"role": "user", "content": "Which river runs through Ostrel?"}]
SAID = "The river of Ostrel is Sarn."
SHOWN = [TOOLS["get_weather"]]
GREEDY = {"temperature": 0, "num_predict": 24}
SCHEMA = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"],
          "additionalProperties": False}  # fmt: skip


@pytest.fixture
def client(shared_server: Served) -> Iterator[ollama.Client]:
    with ollama.Client(host=shared_server.url, timeout=300) as made:
        yield made


def test_chat_whole_and_in_lines(client: ollama.Client) -> None:
    whole = client.chat("pocket", RIVER, options=GREEDY)
    assert whole.message.content == SAID
    assert (whole.done, whole.done_reason, whole.model) == (True, "stop", "pocket")
    assert whole.prompt_eval_count
    assert whole.eval_count
    assert whole.total_duration
    assert whole.total_duration >= (whole.eval_duration or 0) > 0
    lines = list(client.chat("pocket:latest", RIVER, options=GREEDY, stream=True))
    assert "".join(one.message.content or "" for one in lines) == SAID
    assert len(lines) > 3
    assert [one.done for one in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[-1].eval_count == whole.eval_count


def test_generate_through_the_template_and_raw(client: ollama.Client) -> None:
    assert client.generate("pocket", RIVER[0]["content"], options=GREEDY).response == SAID
    raw = client.generate("pocket", "Q: Who rules Hesper?\nA:", raw=True, options={**GREEDY, "stop": ["\n"]})
    assert raw.response == " The ruler of Hesper is Queen Wenna."
    lines = list(client.generate("pocket", RIVER[0]["content"], options=GREEDY, stream=True))
    assert "".join(one.response for one in lines) == SAID
    short = client.generate("pocket", RIVER[0]["content"], options={**GREEDY, "num_predict": 2})
    assert (short.done_reason, short.eval_count) == ("length", 2)
    assert client.generate("pocket").done_reason == "load"


def test_formats(client: ollama.Client) -> None:
    said = client.chat("pocket", RIVER, format=SCHEMA, options=GREEDY).message.content
    assert isinstance(json.loads(said or "")["yes"], bool)
    free = client.generate("pocket", "An object:", format="json", options={**GREEDY, "num_predict": 200})
    assert free.done_reason == "length" or isinstance(json.loads(free.response), dict)


@pytest.mark.parametrize("stream", [False, True])
def test_tools(client: ollama.Client, stream: bool) -> None:
    asked: list[Any] = [{"role": "user", "content": "What is the weather in Lisbon?"}]
    words: dict[str, Any] = {"tools": SHOWN, "options": {**GREEDY, "num_predict": 120}, "stream": stream}
    answer = client.chat("pocket", asked, **words)
    messages = [one.message for one in answer] if stream else [answer.message]
    [call] = [call for message in messages for call in message.tool_calls or ()]
    assert call.function.arguments == {"city": "Lisbon"}
    assert "".join(message.content or "" for message in messages) == ""
    asked += [
        {"role": "assistant", "content": "", "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_name": call.function.name, "content": '{"degrees": 21, "sky": "sun"}'},
    ]
    result = client.chat("pocket", asked, tools=SHOWN, options=GREEDY)
    assert "21" in (result.message.content or "")


def test_thoughts(client: ollama.Client) -> None:
    told = client.chat("pocket", RIVER, think=True, options={**GREEDY, "num_predict": 300})
    lines = list(
        client.chat("pocket", RIVER, think=True, options={**GREEDY, "num_predict": 300}, stream=True)
    )
    assert "".join(one.message.thinking or "" for one in lines) == (told.message.thinking or "")
    assert "".join(one.message.content or "" for one in lines) == told.message.content
    assert told.message.thinking
    assert not client.chat("pocket", RIVER, think=False, options=GREEDY).message.thinking


def test_what_is_served(client: ollama.Client, shared_server: Served) -> None:
    [model] = client.list().models
    assert model.model == "pocket"
    assert model.size
    assert model.size > 10**5
    assert [one.model for one in client.ps().models] == ["pocket"]
    shown = client.show("pocket")
    assert {"completion", "tools", "thinking"} <= set(shown.capabilities or [])
    told = httpx.get(f"{shared_server.url}/api/version", timeout=300).json()
    assert told == httpx.get(f"{shared_server.url}/version", timeout=300).json()


def test_errors_are_ollamas(client: ollama.Client, shared_server: Served) -> None:
    with pytest.raises(ollama.ResponseError, match="does not exist") as caught:
        client.chat("other", RIVER)
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match=r"options\.temperature") as caught:
        client.chat("pocket", RIVER, options={"temperature": -1})
    assert caught.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match=r"options\.mirostat"):
        list(client.chat("pocket", RIVER, options={"mirostat": 2}, stream=True))
    body = {"model": "pocket", "messages": RIVER, "stream": False,
            "options": {**GREEDY, "num_ctx": 4096, "num_thread": 4}, "keep_alive": "5m"}  # fmt: skip
    answer = httpx.post(f"{shared_server.url}/api/chat", json=body, timeout=300)
    assert answer.json()["message"]["content"] == SAID
    for word in ("options.num_ctx", "options.num_thread", "keep_alive"):
        assert f"{word} has no effect" in answer.headers["warning"]


def test_it_can_be_left(shared_server: Served, wait_idle: Any) -> None:
    async def leave() -> None:
        async with ollama.AsyncClient(host=shared_server.url, timeout=300) as client:
            options = {"num_predict": 4000, "temperature": 0}
            stream = await client.generate("pocket", "a b a b", raw=True, options=options, stream=True)
            async for _ in stream:
                break
            await stream.aclose()

    asyncio.run(leave())
    wait_idle(shared_server)
