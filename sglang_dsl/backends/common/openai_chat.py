"""Messages, tools and schemas in the wire format of OpenAI's chat completions. Knows no requests."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from runtime.protocol.messages import Message
from sglang_dsl.backends.base import Call, Prompt
from sglang_dsl.backends.common.prompts import turns
from sglang_dsl.backends.common.remote import JsonForm, is_strict
from sglang_dsl.errors import Unsupported

STREAMED: Mapping[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
"""Fields of a request whose reply is streamed."""


def chat_messages(
    prompt: Prompt, backend: str, *, prefill: bool = False, hint: str | None = None
) -> dict[str, Any]:
    """Fields of a request that hold the prompt. Raises Unsupported.

    prefill  whether the server can continue an assistant turn that has text already
    hint     what else to do if it cannot
    """
    done, begun = turns(prompt, backend)
    messages = [wire(message) for message in done]
    if begun is None:
        return {"messages": messages}
    if not prefill:
        start = "start assistant(...) with gen"
        raise Unsupported(
            f"{backend} cannot continue a reply that has begun ({str(begun.content)[:60]!r})",
            backend=backend,
            hint=start if hint is None else f"{start}, {hint}",
        )
    messages.append(wire(begun))
    return {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}


def chat_fields(call: Call, form: JsonForm | None, limit_field: str) -> dict[str, Any]:
    """Fields of a request beside its model, messages and sampling parameters. limit_field: the name of
    max_new_tokens."""
    body: dict[str, Any] = {
        limit_field: call.sampling.max_new_tokens,
        **offered(call.prompt.tools, call.tool_choice, call.parallel_tools),
    }
    if call.n > 1:
        body["n"] = call.n
    if call.wants_logprobs:
        body |= {"logprobs": True, "top_logprobs": call.top_logprobs}
    if form is not None:
        schema = {"name": form.name, "schema": form.schema, "strict": form.strict}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return body


def offered(
    tools: Sequence[Mapping[str, Any]], choice: str = "none", parallel: bool = True
) -> dict[str, Any]:
    """Fields of a request; none without tools. A tool whose schema fits strict mode is sent as strict."""
    if not tools:
        return {}
    functions: list[dict[str, Any]] = []
    for tool in tools:
        function = dict(tool["function"])
        if is_strict(function.get("parameters") or {}):
            function.setdefault("strict", True)
        functions.append({"type": "function", "function": function})
    named = {"type": "function", "function": {"name": choice[1:]}}
    body: dict[str, Any] = {"tools": functions, "tool_choice": named if choice.startswith("=") else choice}
    return body if parallel or choice == "none" else {**body, "parallel_tool_calls": False}


def called(message: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of a message's tool calls; empty without any."""
    calls = [
        {"id": call.get("id"), "name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        for call in message.get("tool_calls") or ()
        if isinstance(call.get("function"), Mapping)
    ]
    return {"tool_calls": calls} if calls else {}


def wire(message: Message) -> dict[str, Any]:
    """A turn as the chat API takes it."""
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if not isinstance(message.content, str):
        turn["content"] = [_part(part) for part in message.content]
    if message.name is not None:
        turn["name"] = message.name
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        turn["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return turn


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    """A part of a turn; embedded sounds as the API takes them, {"data", "format"}."""
    match part:
        case {"type": "audio_url", "audio_url": {"url": str(url)}}:
            match = re.match(r"data:audio/([\w.+-]+);base64,(.*)\Z", url, re.DOTALL)
            if match is None:
                return dict(part)
            name = {"mpeg": "mp3"}.get(match[1], match[1])
            return {"type": "input_audio", "input_audio": {"data": match[2], "format": name}}
        case _:
            return dict(part)
