"""Tools through the openai and the anthropic SDK against the real processes: a call, its result, an answer;
whole and streamed; every choice."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import jsonschema
import openai
import pytest

from examples.pocket.tasks.tools import TOOLS
from tests.process.patience import PATIENCE_S

WEATHER, TIMER = TOOLS["get_weather"], TOOLS["set_timer"]
ASKED: Any = [{"role": "user", "content": "What is the weather in Lisbon?"}]
GREEDY: Any = {"model": "pocket", "temperature": 0, "max_tokens": 120}
CLAUDE: Any = {"model": "pocket", "max_tokens": 120, "extra_body": {"temperature": 0}}
RESULT = json.dumps({"degrees": 21, "sky": "sun"})
ANSWER = "The weather in Lisbon is sun with 21 degrees."
CALLED = ("get_weather", {"city": "Lisbon"})


@pytest.fixture(scope="module")
def client(shared_server: Any) -> Iterator[openai.OpenAI]:
    url = f"{shared_server.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_S) as made:
        yield made


@pytest.fixture(scope="module")
def claude(shared_server: Any) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=shared_server.url, api_key="none", max_retries=0, timeout=PATIENCE_S
    ) as made:
        yield made


def streamed(client: openai.OpenAI, **words: Any) -> tuple[str, list[dict[str, Any]], str | None]:
    """Content, calls and finish reason of a stream; a call's id and name come first, and once."""
    content, calls, reason = "", [], None
    with client.chat.completions.create(stream=True, **words) as chunks:
        for chunk in chunks:
            [choice] = chunk.choices
            content += choice.delta.content or ""
            for one in choice.delta.tool_calls or ():
                assert one.function is not None
                if one.id is not None:
                    assert one.index == len(calls)
                    calls.append({"id": one.id, "name": one.function.name, "arguments": ""})
                calls[one.index]["arguments"] += one.function.arguments or ""
            reason = choice.finish_reason or reason
    return content, calls, reason


def test_a_call_its_result_and_an_answer(client: openai.OpenAI) -> None:
    words = {**GREEDY, "messages": ASKED, "tools": [WEATHER, TIMER]}
    [choice] = client.chat.completions.create(**words).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    [call] = choice.message.tool_calls or []
    assert re.fullmatch("call_[0-9a-f]{24}", call.id)
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == CALLED
    content, calls, reason = streamed(client, **words)
    assert (content, reason) == ("", "tool_calls")
    assert [(one["name"], json.loads(one["arguments"])) for one in calls] == [CALLED]
    result = {"role": "tool", "tool_call_id": call.id, "content": RESULT}
    history = [*ASKED, choice.message.model_dump(exclude_none=True), result]
    [after] = client.chat.completions.create(**{**words, "messages": history}).choices
    assert after.finish_reason == "stop"
    assert not after.message.tool_calls
    assert after.message.content == ANSWER


@pytest.mark.parametrize("stream", [False, True])
def test_a_choice_is_kept(client: openai.OpenAI, stream: bool) -> None:
    """At a high temperature, whatever the question."""
    named = {"type": "function", "function": {"name": "set_timer"}}
    for seed, choice in enumerate(["required", named, "required", named]):
        words = {
            **GREEDY,
            "messages": [{"role": "user", "content": "Good morning!"}],
            "tools": [WEATHER, TIMER],
            "tool_choice": choice,
            "parallel_tool_calls": False,
            "temperature": 1.5,
            "seed": seed,
        }
        if stream:
            content, calls, reason = streamed(client, **words)
            found = [(one["name"], one["arguments"]) for one in calls]
        else:
            [one] = client.chat.completions.create(**words).choices
            content, reason = one.message.content or "", one.finish_reason
            found = [(call.function.name, call.function.arguments) for call in one.message.tool_calls or []]
        assert (content, reason) == ("", "tool_calls")
        [(name, arguments)] = found
        assert choice == "required" or name == "set_timer"
        schema = TOOLS[name]["function"]["parameters"]
        jsonschema.validate(json.loads(arguments), schema)


REPORT: Any = {"type": "json_schema", "json_schema": {"name": "report", "strict": True, "schema": {
    "type": "object", "properties": {"sky": {"type": "string"}}, "required": ["sky"],
    "additionalProperties": False,
}}}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_a_format_is_for_what_is_no_call(client: openai.OpenAI, shared_server: Any, stream: bool) -> None:
    """A typed answer and tools: the model may call before it answers. That pocket would rather call than
    answer, a bias against the mark that calls begin with undoes."""
    mark = {"prompt": "<tool_call>", "add_special_tokens": False}
    ids = httpx.post(f"{shared_server.url}/tokenize", json=mark, timeout=PATIENCE_S).json()["tokens"]

    def asked(messages: Any, **more: Any) -> tuple[str, list[Any]]:
        words = {**GREEDY, "messages": messages, "tools": [WEATHER], "response_format": REPORT, **more}
        if stream:
            content, calls, _ = streamed(client, **words)
            return content, [(one["name"], json.loads(one["arguments"])) for one in calls]
        [choice] = client.chat.completions.create(**words).choices
        found = choice.message.tool_calls or []
        return choice.message.content or "", [
            (one.function.name, json.loads(one.function.arguments)) for one in found
        ]

    assert asked(ASKED) == ("", [CALLED])
    assert asked(ASKED, tool_choice="required") == ("", [CALLED])
    content, calls = asked(ASKED, logit_bias={str(ids[0]): -100})
    assert calls == []
    assert set(json.loads(content)) == {"sky"}
    bad = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#/nowhere"}}}
    with pytest.raises(openai.BadRequestError, match="response_format"):
        asked(ASKED, response_format=bad)


def test_allowed_tools(client: openai.OpenAI) -> None:
    """All are shown, some may be called."""
    allowed: Any = {"mode": "required", "tools": [{"type": "function", "function": {"name": "set_timer"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    words = {**GREEDY, "messages": ASKED, "tools": [WEATHER, TIMER], "parallel_tool_calls": False}
    made = client.chat.completions.create(**words, tool_choice=choice)
    [call] = made.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "set_timer"
    both = client.chat.completions.create(**words)
    assert made.usage is not None
    assert both.usage is not None
    assert made.usage.prompt_tokens == both.usage.prompt_tokens


def test_none_is_text(client: openai.OpenAI) -> None:
    words = {**GREEDY, "messages": ASKED, "tools": [WEATHER], "tool_choice": "none", "max_tokens": 20}
    [choice] = client.chat.completions.create(**words).choices
    assert not choice.message.tool_calls


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"tool_choice": "required"}, "Tools cannot be empty if tool choice is set to required."),
        (
            {"tools": [WEATHER], "tool_choice": "required", "extra_body": {"regex": "a"}},
            "cannot be combined with",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 5}}}]},
            "is no JSON schema",
        ),
    ],
)
def test_refusals(client: openai.OpenAI, words: Any, told: str) -> None:
    with pytest.raises(openai.BadRequestError, match=told):
        client.chat.completions.create(**{**GREEDY, "messages": ASKED, **words})


def test_responses(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", **one["function"]} for one in (WEATHER, TIMER)]
    words: Any = {"model": "pocket", "temperature": 0, "input": ASKED[0]["content"], "tools": tools}
    made = client.responses.create(**words)
    [item] = made.output
    assert item.type == "function_call"
    assert (item.name, json.loads(item.arguments), item.status) == (*CALLED, "completed")
    with client.responses.stream(**words) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    [same] = final.output
    assert same.type == "function_call"
    assert (same.name, same.arguments) == (item.name, item.arguments)
    assert kinds[-3:] == [
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    result: Any = [{"type": "function_call_output", "call_id": item.call_id, "output": RESULT}]
    after = client.responses.create(**{**words, "input": result, "previous_response_id": made.id})
    assert after.output_text == ANSWER


def test_messages(claude: anthropic.Anthropic) -> None:
    tools: Any = [
        {
            "name": one["function"]["name"],
            "description": one["function"]["description"],
            "input_schema": one["function"]["parameters"],
        }
        for one in (WEATHER, TIMER)
    ]
    words: Any = {**CLAUDE, "messages": ASKED, "tools": tools}
    made = claude.messages.create(**words)
    [block] = made.content
    assert block.type == "tool_use"
    assert (block.name, block.input, made.stop_reason) == (*CALLED, "tool_use")
    with claude.messages.stream(**words) as stream:
        final = stream.get_final_message()
    [same] = final.content
    assert same.type == "tool_use"
    assert (same.name, same.input, final.stop_reason) == (*CALLED, "tool_use")
    result = {"type": "tool_result", "tool_use_id": block.id, "content": RESULT}
    history = [
        *ASKED,
        {"role": "assistant", "content": [block.model_dump()]},
        {"role": "user", "content": [result]},
    ]
    after = claude.messages.create(**{**words, "messages": history})
    assert after.content[0].type == "text"
    assert after.content[0].text == ANSWER
    forced = claude.messages.create(**{**words, "tool_choice": {"type": "tool", "name": "set_timer"}})
    assert [one.type for one in forced.content] == ["tool_use"]


def test_a_text_is_taken_apart(shared_server: Any) -> None:
    def asked(**body: Any) -> httpx.Response:
        return httpx.post(f"{shared_server.url}/parse_function_call", json=body, timeout=PATIENCE_S)

    text = 'Hi.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    found = {"tool_index": 0, "name": "get_weather", "parameters": '{"city": "Oslo"}'}
    assert asked(text=text, tools=[WEATHER]).json() == {"normal_text": "Hi.", "calls": [found]}
    other = asked(text='[get_weather(city="Oslo")]', tools=[WEATHER], tool_call_parser="pythonic")
    assert other.json() == {"normal_text": "", "calls": [found]}
    assert asked(text=text).json() == {"normal_text": text, "calls": []}
    wrong = asked(text=text, tools=[WEATHER], tool_call_parser="nobody's")
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "tool_call_parser")
    assert "qwen25" in wrong.json()["error"]["message"]
    assert asked(text=text, tools=[{"function": {}}]).status_code == 400
    model = httpx.get(f"{shared_server.url}/model_info", timeout=PATIENCE_S).json()
    assert model["tool_parser"] == "qwen25"


def test_reasoning_is_taken_apart(shared_server: Any) -> None:
    def asked(**body: Any) -> httpx.Response:
        return httpx.post(f"{shared_server.url}/separate_reasoning", json=body, timeout=PATIENCE_S)

    wanted = {"text": "Four.", "reasoning_text": "Two and two."}
    assert asked(text="<think>Two and two.</think>\n\nFour.").json() == wanted
    assert asked(text="Two and two.</think>Four.", reasoning_parser="deepseek-r1").json() == wanted
    assert asked(text="Four.").json() == {"text": "Four.", "reasoning_text": ""}
    wrong = asked(text="a", reasoning_parser="nobody's")
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "reasoning_parser")
