"""Tools in OpenAI's wire format: how they are offered, and the calls in a reply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sglang_dsl.backends.common.remote import is_strict


def offered(
    tools: Sequence[Mapping[str, Any]], choice: str = "none", parallel: bool = True
) -> dict[str, Any]:
    """Fields of a request; none without tools. A tool whose schema strict mode takes is asked for so."""
    if not tools:
        return {}
    said: list[dict[str, Any]] = []
    for tool in tools:
        function = dict(tool["function"])
        if is_strict(function.get("parameters") or {}):
            function.setdefault("strict", True)
        said.append({"type": "function", "function": function})
    named = {"type": "function", "function": {"name": choice[1:]}}
    body: dict[str, Any] = {"tools": said, "tool_choice": named if choice.startswith("=") else choice}
    return body if parallel or choice == "none" else {**body, "parallel_tool_calls": False}


def called(message: Mapping[str, Any]) -> dict[str, Any]:
    """What a completion's meta tells of a message's calls; nothing without any."""
    found = [
        {"id": call.get("id"), "name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        for call in message.get("tool_calls") or ()
        if isinstance(call.get("function"), Mapping)
    ]
    return {"tool_calls": found} if found else {}
