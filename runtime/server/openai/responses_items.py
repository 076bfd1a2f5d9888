"""The items of a Responses output, as OpenAI's clients read them. Knows no requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from runtime.protocol.messages import ToolCall


def text_part(text: str, logprobs: Sequence[Any]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def message_item(identity: str, text: str, status: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    return {
        "type": "message",
        "id": identity,
        "status": status,
        "role": "assistant",
        "content": [text_part(text, logprobs)],
    }


def reasoning_item(identity: str, text: str, status: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {"type": "reasoning", "id": identity, "status": status, "summary": [], "content": content}


def call_item(identity: str, call_id: str, name: str, arguments: str, status: str) -> dict[str, Any]:
    return {
        "type": "function_call",
        "id": identity,
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
        "status": status,
    }


def calls_of(output: Sequence[Mapping[str, Any]]) -> tuple[ToolCall, ...]:
    """The calls among the items."""
    items = [item for item in output if item["type"] == "function_call"]
    return tuple(ToolCall(item["name"], item["arguments"], item["call_id"]) for item in items)


def text_of(output: Sequence[Mapping[str, Any]]) -> str:
    """What the messages among the items say."""
    messages = [item for item in output if item["type"] == "message"]
    return "".join(part["text"] for item in messages for part in item["content"])
