"""The messages of OpenAI's and Anthropic's clients as the runtime's own: what they become, and which place is
named when they are wrong.
"""

from __future__ import annotations

from typing import Any

import pytest

from runtime.protocol.errors import BadRequest
from runtime.protocol.messages import Message, ToolCall
from runtime.server.anthropic import messages as anthropic_messages
from runtime.server.openai import messages as openai_messages
from runtime.server.openai.responses import items as responses_items

CALL = ToolCall("weather", '{"town":"Ostrel"}', "c1")


def test_openai_messages() -> None:
    made = openai_messages.messages_of(
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "Ann"},
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "c1", "type": "function",
                 "function": {"name": "weather", "arguments": '{"town":"Ostrel"}'}}
            ]},
            {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
            {"role": "function", "content": "sunny", "name": "weather"},
            {"role": "assistant", "refusal": "No."},
        ]
    )  # fmt: skip
    assert made == [
        Message("system", "Be brief."),
        Message("user", [{"type": "text", "text": "Hi"}], name="Ann"),
        Message("assistant", "", tool_calls=(CALL,)),
        Message("tool", "sunny", tool_call_id="c1"),
        Message("tool", "sunny", name="weather"),
        Message("assistant", "No."),
    ]


def test_responses_items() -> None:
    made = responses_items.messages_of(
        [
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "reasoning", "summary": []},
            {"type": "message", "role": "assistant", "content": [
                {"type": "output_text", "text": "Let me "}, {"type": "output_text", "text": "look."}
            ]},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"town":"Ostrel"}'},
            {"type": "function_call_output", "call_id": "c1", "output": {"sky": "blue"}},
        ]
    )  # fmt: skip
    assert made == [
        Message("user", "Hi"),
        Message("assistant", "Let me look.", tool_calls=(CALL,)),
        Message("tool", '{"sky":"blue"}', tool_call_id="c1"),
    ]
    assert responses_items.messages_of("Hi") == [Message("user", "Hi")]


def test_anthropic_messages() -> None:
    made = anthropic_messages.messages_of(
        [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}],
        [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "text", "text": "Let me look."},
                {"type": "tool_use", "id": "c1", "name": "weather", "input": {"town": "Ostrel"}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "sunny"}]},
                {"type": "text", "text": "And now?"},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}},
            ]},
            {"role": "system", "content": "Be quick."},
        ],
    )  # fmt: skip
    assert made == [
        Message("system", "Be\n\nbrief."),
        Message("user", "Hi"),
        Message("assistant", "Let me look.", tool_calls=(CALL,)),
        Message("tool", "sunny", tool_call_id="c1"),
        Message(
            "user",
            [
                {"type": "text", "text": "And now?"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
            ],
        ),
        Message("system", "Be quick."),
    ]


def test_what_clients_send_back_with_a_reply() -> None:
    """The fields that openai's parse() and litellm put beside a message's own, and the other name of
    reasoning_content."""
    told = {"name": "weather", "arguments": '{"town":"Ostrel"}', "parsed_arguments": {"town": "Ostrel"}}
    call = {"id": "c1", "type": "function", "index": 0, "function": told}
    more = {"parsed": {"town": "Ostrel"}, "provider_specific_fields": {"refusal": None}, "annotations": []}
    more["cache_control"] = {"type": "ephemeral"}
    assert openai_messages.messages_of(
        [{"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "Hm.", **more}]
    ) == [Message("assistant", "", tool_calls=(CALL,), reasoning_content="Hm.")]
    both = {"role": "assistant", "content": "a", "reasoning_content": "Hm.", "reasoning": "Other."}
    assert openai_messages.messages_of([both])[0].reasoning_content == "Hm."


def test_calls_that_a_server_ran() -> None:
    called: dict[str, Any] = {"type": "mcp_call", "id": "m1", "name": "weather", "arguments": "{}"}
    code: dict[str, Any] = {"type": "code_interpreter_call", "id": "c1", "code": "1"}
    logs = [{"type": "logs", "logs": "4"}, {"type": "image"}, {"type": "logs", "logs": "2"}]
    for item, text in (
        ({**called, "output": "sun"}, "sun"),
        ({**called, "output": None, "error": "no"}, "no"),
        ({**code, "outputs": logs}, "42"),
        ({**code, "outputs": None}, ""),
        ({**code, "outputs": 5}, ""),
    ):
        call, result = responses_items.messages_of([item])
        assert [one.id for one in call.tool_calls] == [result.tool_call_id] == [item["id"]]
        assert (call.role, result.role, result.content) == ("assistant", "tool", text)
    assert responses_items.messages_of([{"type": "web_search_call", "id": "w1"}]) == []


def test_a_calls_output_in_parts() -> None:
    def output(given: Any) -> Any:
        return responses_items.messages_of(
            [{"type": "function_call_output", "call_id": "c1", "output": given}]
        )[0].content  # fmt: skip

    parts = [{"type": "input_text", "text": "sun"}, {"type": "input_text", "text": "ny"}]
    assert output(parts) == "sunny"
    assert output([1, {"a": 2}]) == '[1,{"a":2}]'
    assert output([]) == ""
    assert output([{"type": "input_image", "image_url": "x"}]) == [{"type": "input_image", "image_url": "x"}]


def tool_named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


A, B = tool_named("a"), tool_named("b")
ONLY_B = {"mode": "required", "tools": [B]}


@pytest.mark.parametrize(
    ("choice", "names", "word"),
    [
        (None, "ab", "auto"),
        ("required", "ab", "required"),
        (B, "b", "=b"),
        ({"type": "function", "name": "b"}, "b", "=b"),
        ({"type": "allowed_tools", "allowed_tools": ONLY_B}, "b", "required"),
        ({"type": "allowed_tools", **ONLY_B}, "b", "required"),
        ({"type": "allowed_tools", "tools": [A, {"type": "function", "name": "b"}]}, "ab", "auto"),
    ],
)
def test_choices_of_tools(choice: Any, names: str, word: str) -> None:
    shown = openai_messages.tools_of([A, B], choice)
    assert shown == [A, B]
    tools, said = openai_messages.callable_tools(shown, choice)
    assert "".join(tool["function"]["name"] for tool in tools) == names
    assert said == word


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        ("never", "allowed_tools"),
        ({"type": "function"}, "allowed_tools"),
        (tool_named("c"), "Tool 'c' not found"),
        ({"type": "allowed_tools", "mode": "required", "tools": [tool_named("c")]}, "Tool 'c' not found"),
        ({"type": "allowed_tools", "mode": "maybe", "tools": [A]}, "mode must be"),
        ({"type": "allowed_tools", "mode": "auto", "tools": []}, "at least one"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}, "allowed_tools"),
        ({"type": "allowed_tools", "mode": "auto", "tools": ["a"]}, "with its name"),
    ],
)
def test_choices_of_tools_that_are_wrong(choice: Any, told: str) -> None:
    with pytest.raises(BadRequest, match=told) as caught:
        openai_messages.tools_of([A, B], choice)
    assert caught.value.where == "tool_choice"


OPENAI: list[tuple[Any, str]] = [
    ([], "messages"),
    ([5], "messages[0]"),
    ([{"role": "user"}], "messages[0].content"),
    ([{"role": "user", "content": "a"}, {"role": "user", "content": ["a"]}], "messages[1].content[0]"),
    ([{"role": "user", "content": "a", "colour": 1}], "messages[0].colour"),
    ([{"role": "user", "content": "a", "tool_calls": [{}]}], "messages[0].tool_calls[0]"),
    ([{"role": "assistant", "content": "a", "tool_calls": {}}], "messages[0].tool_calls"),
    ([{"role": "assistant", "function_call": {"name": "f"}}], "messages[0].function_call"),
]
ANTHROPIC: list[tuple[Any, str]] = [
    ([], "messages"),
    ([5], "messages[0]"),
    ([{"role": "tool", "content": "a"}], "messages[0].role"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    ([{"role": "user", "content": [5]}], "messages[0].content[0]"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]"),
    ([{"role": "user", "content": [{"type": "image", "source": {}}]}], "messages[0].content[0].source"),
    ([{"role": "system", "content": [{"type": "image"}]}], "messages[0].content[0]"),
]


@pytest.mark.parametrize(("given", "where"), OPENAI)
def test_what_is_wrong_in_openai_messages(given: Any, where: str) -> None:
    with pytest.raises(BadRequest) as caught:
        openai_messages.messages_of(given)
    assert caught.value.where == where


@pytest.mark.parametrize(("given", "where"), ANTHROPIC)
def test_what_is_wrong_in_anthropic_messages(given: Any, where: str) -> None:
    with pytest.raises(BadRequest) as caught:
        anthropic_messages.messages_of(None, given)
    assert caught.value.where == where
