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
from runtime.server.openai import responses_input

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
    made = responses_input.messages_of(
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
    assert responses_input.messages_of("Hi") == [Message("user", "Hi")]


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
