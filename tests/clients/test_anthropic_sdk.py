"""The anthropic SDK against the real processes: messages whole and streamed, counting, refusals, keys."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, Literal

import anthropic
import pydantic
import pytest

from tests.process.patience import PATIENCE_S, in_pieces

ASKED: Any = [{"role": "user", "content": "Which river runs through Ostrel?"}]
GREEDY: Any = {"model": "pocket", "max_tokens": 24, "extra_body": {"temperature": 0}}
TOOL: Any = {
    "name": "weather",
    "description": "The weather of a town",
    "input_schema": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
}


class Weather(pydantic.BaseModel):
    town: Literal["Ostrel", "Thessen"]
    sunny: bool


@pytest.fixture(scope="module")
def client(shared_server: Any) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=shared_server.url, api_key="none", max_retries=0, timeout=PATIENCE_S
    ) as made:
        yield made


def text_of(message: anthropic.types.Message) -> str:
    [block] = message.content
    assert block.type == "text"
    return block.text


def test_messages_whole_and_streamed(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(messages=ASKED, **GREEDY)
    assert (whole.type, whole.role, whole.model) == ("message", "assistant", "pocket")
    assert whole.id.startswith("msg_")
    assert (whole.stop_reason, whole.stop_sequence) == ("end_turn", None)
    assert whole.usage.input_tokens > whole.usage.output_tokens > 2

    def ask() -> list[str]:
        with client.messages.stream(messages=ASKED, **GREEDY) as stream:
            pieces = list(stream.text_stream)
            final = stream.get_final_message()
        assert "".join(pieces) == text_of(whole) == text_of(final)
        assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", whole.usage.output_tokens)
        assert final.usage.input_tokens == whole.usage.input_tokens
        return pieces

    in_pieces(ask)
    events = list(client.messages.create(messages=ASKED, stream=True, **GREEDY))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}  # pings are the SDK's own business


def test_system_prompt_blocks_and_turns(client: anthropic.Anthropic) -> None:
    def size(**words: Any) -> int:
        return client.messages.create(**{"messages": ASKED, **GREEDY, **words}).usage.input_tokens

    bare = size()
    assert size(system="Be brief.") > bare
    blocks: Any = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    assert size(system=blocks) == size(system="Be brief.")
    assert (
        size(messages=[{"role": "user", "content": [{"type": "text", "text": ASKED[0]["content"]}]}]) == bare
    )
    turns = [*ASKED, {"role": "assistant", "content": "The Vell."}, {"role": "user", "content": "한국어 😀?"}]
    assert size(messages=turns) > bare


def test_stop_sequences(client: anthropic.Anthropic) -> None:
    text = text_of(client.messages.create(messages=ASKED, **GREEDY))
    stopped = client.messages.create(messages=ASKED, stop_sequences=["zzz", " "], **GREEDY)
    assert text_of(stopped) == text.partition(" ")[0]
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " ")
    with client.messages.stream(messages=ASKED, stop_sequences=[" "], **GREEDY) as stream:
        final = stream.get_final_message()
    assert (text_of(final), final.stop_reason, final.stop_sequence) == (
        text_of(stopped),
        "stop_sequence",
        " ",
    )
    cut = client.messages.create(messages=ASKED, **{**GREEDY, "max_tokens": 2})
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)
    assert text.startswith(text_of(cut))


def test_an_assistants_turn_that_was_begun_is_continued(client: anthropic.Anthropic) -> None:
    text = text_of(client.messages.create(messages=ASKED, **GREEDY))
    first, _, rest = text.partition(" ")
    begun: Any = [*ASKED, {"role": "assistant", "content": first}]
    assert text_of(client.messages.create(messages=begun, **GREEDY)) == f" {rest}"
    counted = client.messages.count_tokens(model="pocket", messages=begun).input_tokens
    assert counted == client.messages.create(messages=begun, **GREEDY).usage.input_tokens


def test_tools_are_taken(client: anthropic.Anthropic) -> None:
    def size(**words: Any) -> int:
        return client.messages.create(**{"messages": ASKED, **GREEDY, **words}).usage.input_tokens

    bare = size()
    assert size(tools=[TOOL]) == size(tools=[TOOL], tool_choice={"type": "auto"}) > bare
    assert size(tools=[TOOL], tool_choice={"type": "none"}) == bare
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        assert size(tools=[TOOL], tool_choice=choice) > bare
    with pytest.raises(anthropic.BadRequestError, match="not found"):
        size(tools=[TOOL], tool_choice={"type": "tool", "name": "other"})
    used: Any = [
        *ASKED,
        {"role": "assistant", "content": [
            {"type": "text", "text": "Let me look."},
            {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"town": "Ostrel"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "sunny"}]},
            {"type": "text", "text": "And now?"},
        ]},
    ]  # fmt: skip
    assert size(messages=used, tools=[TOOL]) > size(tools=[TOOL])
    counted = client.messages.count_tokens(model="pocket", messages=used, tools=[TOOL], system="Be brief.")
    assert counted.input_tokens == size(messages=used, tools=[TOOL], system="Be brief.")


def test_a_model_is_parsed(client: anthropic.Anthropic) -> None:
    asked: Any = [{"role": "user", "content": "What is the weather in Ostrel?"}]
    done = client.messages.parse(messages=asked, output_format=Weather, **{**GREEDY, "max_tokens": 100})
    assert isinstance(done.parsed_output, Weather)
    with pytest.raises(anthropic.BadRequestError, match="json_schema"):
        client.messages.create(messages=asked, output_config={"format": {"type": "xml"}}, **GREEDY)  # type: ignore[typeddict-item]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens: must be at least 1"),
    ({"max_tokens": 5000}, "max_tokens: .* the context length is 2048"),
    ({"messages": []}, "messages: is empty"),
    ({"messages": [{"role": "king", "content": "x"}]}, r"messages\[0\].role"),
    ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "'document' is not supported"),
    ({"messages": [{"role": "user", "content": "river " * 4000}]}, "the context length is 2048"),
    ({"stop_sequences": [""]}, "stop_sequences .*empty"),
    ({"extra_body": {"temperature": -1}}, "temperature must be"),
    ({"extra_body": {"top_kk": 1}}, "did you mean 'top_k'"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens: .*less than max_tok"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens: must be at least 1"),
    ({"thinking": {"type": "enabled"}}, 'thinking: must be {"type": "enabled", "budget_tokens": N}'),
    ({"thinking": {"type": "enabled", "budget_tokens": "4"}}, "thinking: must be"),
    ({"thinking": {"type": "disabled", "budget_tokens": 4}}, "thinking: must be"),
    ({"thinking": {"type": "much"}}, "thinking: must be"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search"),
]


def test_thoughts_are_a_block_of_their_own_and_keep_their_budget(client: anthropic.Anthropic) -> None:
    thinking: Any = {"type": "enabled", "budget_tokens": 6}
    words: Any = {"messages": ASKED, **GREEDY, "max_tokens": 40, "thinking": thinking}
    done = client.messages.create(**words)
    thought, said = done.content
    assert thought.type == "thinking"
    assert thought.thinking
    assert said.type == "text"
    assert said.text
    with client.messages.stream(**words) as stream:
        kinds = [one.type for one in stream if one.type.startswith("content_block_st")]
        whole = stream.get_final_message()
    assert kinds == ["content_block_start", "content_block_stop"] * 2
    assert [block.to_dict() for block in whole.content] == [block.to_dict() for block in done.content]
    form: Any = {"format": {"type": "json_schema", "schema": {"enum": ["yes", "no"]}}}
    shaped = client.messages.create(**{**words, "output_config": form})
    assert [block.type for block in shaped.content] == ["thinking", "text"]
    assert shaped.content[1].to_dict()["text"] in ('"yes"', '"no"')
    for kind in ("disabled", "adaptive"):
        plain = client.messages.create(**{**words, "thinking": {"type": kind}})
        assert [block.type for block in plain.content] == ["text"]


@pytest.mark.parametrize(("words", "message"), BAD)
def test_what_is_wrong_is_told(client: anthropic.Anthropic, words: Any, message: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=message) as caught:
        client.messages.create(**{"messages": ASKED, **GREEDY, **words})
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "invalid_request_error"


def test_errors_have_their_exceptions(client: anthropic.Anthropic) -> None:
    for call in (client.messages.create, client.messages.count_tokens):
        words: Any = {} if call == client.messages.count_tokens else {"max_tokens": 5}
        with pytest.raises(anthropic.NotFoundError, match="'claude' does not exist") as caught:
            call(messages=ASKED, model="claude", **words)
        assert caught.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.post("/v1/messages", body={"messages": ASKED, "model": "pocket"}, cast_to=dict[str, Any])


def test_either_header_may_hold_the_key(
    guarded_server: tuple[Any, str], wait_idle: Callable[..., None]
) -> None:
    server, key = guarded_server
    with anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0, timeout=PATIENCE_S) as client:
        assert client.messages.create(messages=ASKED, **GREEDY).content
        streams = [
            client.messages.create(
                messages=ASKED, model="pocket", max_tokens=1900, stream=True,
                extra_body={"stop_sequences": [f"never-{n}"], "temperature": 1.9, "top_k": 1000},
            )
            for n in range(2)
        ]  # fmt: skip
        for stream in streams:
            next(iter(stream))
        for stream in streams:
            stream.close()
        wait_idle(server, Authorization=f"Bearer {key}")
        again = client.messages.create(messages=ASKED, **GREEDY).usage
        assert again.cache_read_input_tokens
        assert again.input_tokens + again.cache_read_input_tokens > again.input_tokens
    with anthropic.Anthropic(
        base_url=server.url, auth_token=key, max_retries=0, timeout=PATIENCE_S
    ) as client:
        assert client.messages.create(messages=ASKED, **GREEDY).content
    with (
        anthropic.Anthropic(base_url=server.url, api_key=key + "x", max_retries=0) as client,
        pytest.raises(anthropic.AuthenticationError) as caught,
    ):
        client.messages.create(messages=ASKED, **GREEDY)
    assert caught.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
    assert key not in str(caught.value)


def test_the_asynchronous_client(shared_server: Any, wait_idle: Callable[..., None]) -> None:
    async def run() -> None:
        async with anthropic.AsyncAnthropic(
            base_url=shared_server.url, api_key="none", max_retries=0, timeout=PATIENCE_S
        ) as client:
            many = await asyncio.gather(*(client.messages.create(messages=ASKED, **GREEDY) for _ in range(8)))
            [text] = {text_of(one) for one in many}
            async with client.messages.stream(messages=ASKED, **GREEDY) as stream:
                assert "".join([piece async for piece in stream.text_stream]) == text
            endless: Any = {**GREEDY, "max_tokens": 1900}
            endless["extra_body"] = {"temperature": 1.9}
            async with client.messages.stream(messages=ASKED, **endless) as stream:
                async for _ in stream:
                    break
            with pytest.raises(anthropic.BadRequestError):
                async with client.messages.stream(messages=[], **GREEDY):
                    pass

    asyncio.run(run())
    wait_idle(shared_server)
