"""Chat requests of other libraries on the mock backend: what is sent, streams, errors, what is cancelled."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from sglang_dsl import BackendError, BadProgram, MockBackend, NoBackend, Timeout
from sglang_dsl.conversation.requests import Completion
from sglang_dsl.integrations.chat import Chat, choice_of, finish_of, message_of, schema_of
from sglang_dsl.settings import global_config

ASKED = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALLED = Completion(("",), {"tool_calls": [{"id": "1", "name": "f", "arguments": "{}"}]})


def chat(backend: Any = None, **words: Any) -> Chat:
    return Chat("it", backend or MockBackend(["one two three"] * 9, split=4), **words)


def test_what_a_backend_is_asked() -> None:
    mock = MockBackend(["3"])
    made = chat(mock, temperature=0, max_tokens=5, timeout=7)
    made.begin(made.call(ASKED, stop=["."], max_tokens=None, seed=3, json_schema={"type": "integer"})).whole()
    [call] = mock.calls
    assert [(one.role, one.content, one.open) for one in call.prompt.messages] == [
        ("user", "Hello", False), ("assistant", "", True),
    ]  # fmt: skip
    sampling = call.sampling
    assert (sampling.temperature, sampling.max_new_tokens, sampling.stop, sampling.seed) == (0, 5, (".",), 3)
    assert call.constraint is not None
    assert (call.constraint.kind, json.loads(call.constraint.spec)) == ("json_schema", {"type": "integer"})
    assert call.timeout == 7


def test_whole_and_in_pieces_for_threads_and_for_coroutines() -> None:
    made = chat()
    assert made.begin(made.call(ASKED)).whole().texts == ("one two three",)
    reply = made.begin(made.call(ASKED), stream=True)
    assert list(reply.pieces()) == ["one ", "two ", "thre", "e"]
    assert reply.whole().texts == ("one two three",)

    async def program() -> tuple[Any, Any]:
        pieces = [one async for one in made.begin(made.call(ASKED), stream=True).apieces()]
        return pieces, (await made.begin(made.call(ASKED)).awhole()).meta["completion_tokens"]

    assert asyncio.run(program()) == (["one ", "two ", "thre", "e"], 3)


def test_calls_of_tools() -> None:
    mock = MockBackend([CALLED, CALLED])
    made = chat(mock)
    done = made.begin(made.call(ASKED, [TOOL], "f", False)).whole()
    assert finish_of(done.meta) == "tool_calls"
    assert finish_of({**done.meta, "finish_reason": {"type": "length"}}) == "length"
    assert (mock.calls[0].tool_choice, mock.calls[0].parallel_tools) == ("=f", False)
    reply = made.begin(made.call(ASKED, [TOOL]), stream=True)
    assert list(reply.pieces()) == []
    assert reply.whole().meta["tool_calls"] == CALLED.meta["tool_calls"]
    with pytest.raises(BadProgram, match="cannot call tools"):
        made.call(ASKED, [TOOL], regex="a")
    assert made.call(ASKED, [TOOL], "none", regex="a").constraint is not None


def test_choices() -> None:
    said = [
        None,
        "auto",
        "any",
        True,
        "required",
        "none",
        "f",
        {"type": "function", "function": {"name": "f"}},
    ]
    made = [choice_of(one, [TOOL]) for one in said]
    assert made == ["auto", "auto", "required", "required", "required", "none", "=f", "=f"]
    with pytest.raises(BadProgram, match="one of auto, none, required, f"):
        choice_of("g", [TOOL])


def test_messages() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    made = message_of({"role": "assistant", "content": None, "tool_calls": [call]})
    assert (made.content, made.tool_calls[0].name, made.tool_calls[0].id) == ("", "f", "1")
    assert message_of({"role": "tool", "content": "x", "tool_call_id": "1"}).tool_call_id == "1"
    texts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert message_of({"role": "user", "content": texts}).content == "ab"
    picture = {"type": "image_url", "image_url": {"url": "data:,"}}
    assert message_of({"role": "user", "content": [*texts, picture]}).content == [*texts, picture]
    for wrong in ({"content": "x"}, {"role": "raw"}, {"role": "user", "content": 3},
                  {"role": "user", "content": [{"type": "document"}]}):  # fmt: skip
        with pytest.raises(BadProgram, match="a message"):
            message_of(wrong)


def test_response_formats() -> None:
    schema = {"type": "integer"}
    assert schema_of({"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}) == {
        "json_schema": schema
    }
    assert schema_of({"type": "json_schema", "schema": schema}) == {"json_schema": schema}
    assert schema_of({"type": "text"}) == schema_of(None) == {}
    with pytest.raises(BadProgram, match="response_format"):
        schema_of({"type": "xml"})


def test_errors_reach_the_reader() -> None:
    made = chat(MockBackend(errors={0: BackendError("no"), 1: BackendError("no")}, fail_after=1, split=1))
    with pytest.raises(BackendError, match="no"):
        made.begin(made.call(ASKED)).whole()
    pieces = made.begin(made.call(ASKED), stream=True).pieces()
    assert next(pieces)
    with pytest.raises(BackendError, match="no"):
        list(pieces)
    slow = chat(MockBackend(["x"], delay_s=60), timeout=0.05)
    with pytest.raises((Timeout, TimeoutError)):
        slow.begin(slow.call(ASKED)).whole()


def test_wrong_words_are_told_at_once() -> None:
    with pytest.raises(BadProgram, match="it has no parameter temprature; known: "):
        chat(temprature=0)
    with pytest.raises(BadProgram, match="has no parameter n"):
        chat().call(ASKED, n=2)
    with pytest.raises(BadProgram, match="regex and json_schema"):
        chat().call(ASKED, regex="a", json_schema={})
    with pytest.raises(BadProgram, match="no messages"):
        chat().call([])


def test_the_default_backend() -> None:
    made = Chat("it")
    with pytest.raises(NoBackend, match="it needs a backend"):
        made.begin(made.call(ASKED))
    global_config.default_backend = MockBackend(["hi"])
    assert made.begin(made.call(ASKED)).whole().texts == ("hi",)


def test_who_leaves_cancels(idle: Any) -> None:
    mock = MockBackend(delay_s=600)
    made = chat(mock)

    async def program() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(made.begin(made.call(ASKED)).awhole(), 0.05)

    asyncio.run(program())
    streamed = MockBackend(["a b c"], split=1, chunk_delay_s=600)
    left = chat(streamed)
    pieces = left.begin(left.call(ASKED), stream=True).pieces()
    assert next(pieces) == "a"
    pieces.close()
    assert idle() == 0
    assert (mock.in_flight, streamed.in_flight) == (0, 0)
