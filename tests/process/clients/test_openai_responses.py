"""The openai SDK's Responses against the real processes: created, streamed, kept, gone on with, in the
background, cancelled and deleted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.process.patience import ASKINGS, PATIENCE_S, held, in_pieces

ASKED = "Which river runs through Ostrel?"
GREEDY: Any = {"model": "pocket", "temperature": 0, "max_output_tokens": 24}
ENDLESS: Any = {
    "model": "pocket", "temperature": 1.9, "max_output_tokens": 1900, "extra_body": {"top_k": 1000},
    "input": "Tell me everything.",
}  # fmt: skip
TOOL: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a town",
    "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    "strict": None,
}


class Weather(pydantic.BaseModel):
    town: Literal["Ostrel", "Thessen"]
    sunny: bool


@pytest.fixture(scope="module")
def client(shared_server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{shared_server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
    ) as made:
        yield made


def wait_for(client: openai.OpenAI, response: Any, *statuses: str) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while (found := client.responses.retrieve(response.id)).status not in statuses:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found


def size(client: openai.OpenAI, given: Any = ASKED, **words: Any) -> int:
    """Tokens of the prompt that this becomes."""
    usage = client.responses.create(input=given, **GREEDY, **words).usage
    assert usage is not None
    return usage.input_tokens


def test_a_response_is_the_reply_of_a_chat(client: openai.OpenAI) -> None:
    made = client.responses.create(input=ASKED, **GREEDY)
    chat = client.chat.completions.create(
        model="pocket", temperature=0, max_tokens=24, messages=[{"role": "user", "content": ASKED}]
    )
    assert made.output_text == chat.choices[0].message.content
    assert (made.status, made.object, made.error, made.incomplete_details) == (
        "completed",
        "response",
        None,
        None,
    )
    [item] = made.output
    assert item.type == "message"
    assert (item.role, item.status) == ("assistant", "completed")
    assert made.usage is not None
    assert chat.usage is not None
    assert (made.usage.input_tokens, made.usage.output_tokens) == (
        chat.usage.prompt_tokens,
        chat.usage.completion_tokens,
    )
    assert made.usage.total_tokens == chat.usage.total_tokens
    unlimited = client.responses.create(model="pocket", input=ASKED, temperature=0)
    assert unlimited.output_text == made.output_text
    cut = client.responses.create(input=ASKED, **{**GREEDY, "max_output_tokens": 2})
    assert cut.status == "incomplete"
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"


def test_a_stream_is_told_in_events(client: openai.OpenAI) -> None:
    whole = client.responses.create(input=ASKED, **GREEDY)
    events = in_pieces(
        lambda: list(client.responses.create(input=ASKED, stream=True, **GREEDY)), least=8 + 2
    )  # besides what there always is, two pieces of text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done",
        "response.completed",
    ]  # fmt: skip
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    assert len(deltas) > 1
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == whole.output_text
    assert last.response.usage == whole.usage
    with client.responses.stream(input=ASKED, model="pocket", temperature=0) as stream:
        assert stream.get_final_response().output_text == whole.output_text
    kept = client.responses.retrieve(last.response.id)
    assert kept.output_text == whole.output_text
    cut = list(client.responses.create(input=ASKED, stream=True, **{**GREEDY, "max_output_tokens": 2}))
    assert cut[-1].type == "response.incomplete"


def test_a_conversation_goes_on(client: openai.OpenAI) -> None:
    first = client.responses.create(input=ASKED, instructions="Be brief.", **GREEDY)
    second = client.responses.create(input="And who rules there?", previous_response_id=first.id, **GREEDY)
    assert second.previous_response_id == first.id
    turns: Any = [
        {"role": "user", "content": ASKED},
        {"role": "assistant", "content": [{"type": "output_text", "text": first.output_text}]},
        {"role": "user", "content": [{"type": "input_text", "text": "And who rules there?"}]},
    ]
    by_hand = client.responses.create(input=turns, **GREEDY)
    assert second.output_text == by_hand.output_text
    assert second.usage is not None
    assert by_hand.usage is not None
    assert second.usage.input_tokens == by_hand.usage.input_tokens
    instructed = client.responses.create(
        input="And who rules there?", previous_response_id=first.id, instructions="Be brief.", **GREEDY
    )
    assert instructed.usage is not None
    assert instructed.usage.input_tokens > second.usage.input_tokens
    third = client.responses.create(input="Why?", previous_response_id=second.id, **GREEDY)
    assert third.usage is not None
    assert third.usage.input_tokens > second.usage.input_tokens
    unkept = client.responses.create(input=ASKED, store=False, **GREEDY)
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(input="And?", previous_response_id=unkept.id, **GREEDY)
    assert caught.value.param == "previous_response_id"


def test_what_is_kept_can_be_read_and_deleted(client: openai.OpenAI) -> None:
    made = client.responses.create(input=ASKED, metadata={"for": "a test"}, **GREEDY)
    kept = client.responses.retrieve(made.id)
    assert kept == made
    assert kept.metadata == {"for": "a test"}
    with pytest.raises(openai.BadRequestError, match="background response"):
        client.responses.cancel(made.id)
    client.responses.delete(made.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="no response"):
            call(made.id)


def test_in_the_background(
    client: openai.OpenAI,
    shared_server: Any,
    wait_idle: Callable[..., None],
    wait_live: Callable[..., None],
) -> None:
    begun = client.responses.create(input=ASKED, background=True, **GREEDY)
    assert begun.status == "queued"
    done = wait_for(client, begun, "completed")
    assert done.output_text == client.responses.create(input=ASKED, **GREEDY).output_text
    assert client.responses.cancel(begun.id).status == "completed"  # too late

    with held(shared_server.url):  # nothing can end by itself
        long = client.responses.create(background=True, **ENDLESS)
        wait_for(client, long, "in_progress")
        with pytest.raises(openai.BadRequestError, match="in_progress"):
            client.responses.create(input="And?", previous_response_id=long.id, **GREEDY)
        assert client.responses.cancel(long.id).status == "cancelled"
        assert client.responses.retrieve(long.id).status == "cancelled"

        for _ in range(3):  # at once, maybe before it has begun
            at_once = client.responses.create(background=True, **ENDLESS)
            assert client.responses.cancel(at_once.id).status == "cancelled"
        dropped = client.responses.create(background=True, **ENDLESS)
        client.responses.delete(dropped.id)
        wait_idle(shared_server)

    def left_under_way() -> str:
        with held(shared_server.url):
            begun = client.responses.create(background=True, **ENDLESS)
            wait_live(shared_server, 1)
        return str(client.responses.cancel(begun.id).status)

    statuses = [left_under_way()]
    while statuses[-1] != "cancelled":  # it was quicker: an end may come with any of its tokens
        assert set(statuses) == {"completed"}
        assert len(statuses) < ASKINGS
        statuses.append(left_under_way())
    wait_idle(shared_server)

    failed = client.responses.create(input="river " * 4000, background=True, **GREEDY)
    found = wait_for(client, failed, "failed")
    assert found.error is not None
    assert "2048" in found.error.message


def test_text_formats_and_logprobs(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(
        input="What is the weather in Ostrel?", text_format=Weather,
        **{**GREEDY, "max_output_tokens": 100},
    )  # fmt: skip
    assert isinstance(parsed.output_parsed, Weather)
    told = client.responses.create(
        input=ASKED, include=["message.output_text.logprobs"], top_logprobs=2, **GREEDY
    )
    part = told.output[0].content[0]  # type: ignore[union-attr]
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert "".join(one.token for one in part.logprobs[:-1]) == told.output_text
    assert {len(one.top_logprobs) for one in part.logprobs} == {2}


def test_tools_and_items_of_tools(client: openai.OpenAI) -> None:
    bare = size(client)
    assert size(client, tools=[TOOL]) == size(client, tools=[TOOL], tool_choice="auto") > bare
    assert size(client, tools=[TOOL], tool_choice="none") == bare
    for choice in ("required", {"type": "function", "name": "weather"}):
        assert size(client, tools=[TOOL], tool_choice=choice) > bare
    with pytest.raises(openai.BadRequestError, match="'web_search'"):
        size(client, tools=[{"type": "web_search"}])
    items: Any = [
        {"role": "user", "content": ASKED},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"town": "Ostrel"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
    ]
    assert size(client, items, tools=[TOOL]) > size(client, tools=[TOOL])


@pytest.mark.parametrize(
    ("words", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "king", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "computer_call"}]}, "input[0]"),
        ({"temperature": -1}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 5000}, "max_output_tokens"),
        ({"top_logprobs": 30}, "top_logprobs"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"background": True, "stream": True}, "background"),
        ({"background": True, "store": False}, "store"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"extra_body": {"temprature": 1}}, "temprature"),
    ],
)
def test_what_is_wrong_is_told(client: openai.OpenAI, words: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{"input": ASKED, **GREEDY, **words})
    assert caught.value.param == param
    assert "sampling_params" not in caught.value.message


def test_other_refusals(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'gpt' does not exist"):
        client.responses.create(model="gpt", input=ASKED)
    with pytest.raises(openai.BadRequestError, match="maximum context length is 2048") as caught:
        client.responses.create(input="river " * 4000, stream=True, **GREEDY)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_none")


def test_a_stream_that_is_left_is_over(
    client: openai.OpenAI, shared_server: Any, wait_idle: Callable[..., None]
) -> None:
    async def leave() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{shared_server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
        ) as made:
            one, stream = await asyncio.gather(
                made.responses.create(input=ASKED, **GREEDY), made.responses.create(stream=True, **ENDLESS)
            )
            assert one.output_text
            async for event in stream:
                if event.type == "response.output_text.delta":
                    break
            await stream.close()

    asyncio.run(leave())
    wait_idle(shared_server)
