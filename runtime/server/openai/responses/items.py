"""The items of a Responses output, as OpenAI's clients read them. Knows no requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


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


def server_call_item(kind: str, identity: str, name: str, namespace: str, container: str) -> dict[str, Any]:
    """The item of a call that this server runs, when it begins.

    A call of a tool that was asked for as one of OpenAI's own is what their clients know it by: code that is
    run, a search. Calls of all others are "mcp_call", which names server and tool and holds arguments and
    result, whatever protocol the server speaks. "function_call" is left for calls that the client runs.
    """
    head = {"type": kind, "id": identity, "status": "in_progress"}
    match kind:
        case "code_interpreter_call":
            return {**head, "code": "", "container_id": container, "outputs": None}
        case "web_search_call":
            return {**head, "action": {"type": "search", "query": ""}}
        case _:
            facts = {"name": name, "server_label": namespace, "arguments": ""}
            return {**head, **facts, "output": None, "error": None, "approval_request_id": None}


def tell_arguments(item: dict[str, Any], name: str, arguments: str, given: Mapping[str, Any]) -> None:
    """Put a call's arguments (as JSON, and read) into its item."""
    match item["type"]:
        case "code_interpreter_call":
            item["code"] = str(given.get("code", arguments))
        case "web_search_call":
            item["action"] = _action(name, given)
        case _:
            item["arguments"] = arguments


def tell_result(item: dict[str, Any], text: str, failed: bool) -> None:
    """Put what a call gave into its item."""
    item["status"] = "failed" if failed else "completed"
    match item["type"]:
        case "code_interpreter_call":
            item["outputs"] = [{"type": "logs", "logs": text}]
        case "mcp_call":
            item["error" if failed else "output"] = text


def _action(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    place = str(given.get("id", ""))
    if name == "open":
        return {"type": "open_page", "url": place}
    if name == "find":
        return {"type": "find_in_page", "pattern": str(given.get("pattern", "")), "url": place}
    return {"type": "search", "query": str(given.get("query", ""))}
