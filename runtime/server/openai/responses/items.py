"""The items of a Responses output, as OpenAI's clients read them. Knows no requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from runtime.protocol.errors import BadRequest, NotSupported
from runtime.protocol.messages import Message, ToolCall
from runtime.protocol.request_base import new_rid
from runtime.server.http.body import json_type


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


_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

Calls: TypeAlias = dict[int, list[ToolCall]]
"""Place of a reply among the messages -> its calls."""
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def messages_of(given: str | Sequence[Any]) -> list[Message]:
    """The conversation. A text is one user's message; calls in a row belong to one reply. Raises BadRequest
    with the place of what is wrong, NotSupported for items of tools that are not there."""
    if isinstance(given, str):
        return [Message("user", given)]
    if not given:
        raise BadRequest("is empty", where="input")
    made: list[Message] = []
    calls: Calls = {}
    for index, item in enumerate(given):
        where = f"input[{index}]"
        if not isinstance(item, Mapping):
            raise BadRequest(f"an item must be an object, got {json_type(item)}", where=where)
        match item:
            case {"type": "function_call", "name": str(name), "arguments": str(arguments)}:
                call = ToolCall(name, arguments, item.get("call_id") or item.get("id"))
                _add_call(made, calls, call)
            case {"type": "function_call_output", "call_id": str(identity), "output": output}:
                made.append(Message("tool", _output(output, f"{where}.output"), tool_call_id=identity))
            case {"type": "mcp_call", "name": str(name), "arguments": str(arguments), "id": str(identity)}:
                _add_call(made, calls, ToolCall(name, arguments, identity))
                text = str(item.get("output") or item.get("error") or "")
                made.append(Message("tool", text, name=name, tool_call_id=identity))
            case {"type": "code_interpreter_call", "code": str(code), "id": str(identity)}:
                arguments = msgspec.json.encode({"code": code}).decode()
                _add_call(made, calls, ToolCall("python", arguments, identity))
                made.append(Message("tool", _logs(item), name="python", tool_call_id=identity))
            case {"type": "reasoning" | "web_search_call"}:
                continue  # thoughts are not shown to the model again; of a search, what it found is not here
            case {"role": role, "content": content} if item.get("type", "message") == "message":
                made.append(Message(_role(role, where), _content(content, f"{where}.content")))
            case _:
                kind = item.get("type")
                raise NotSupported(
                    f"an item of type {kind!r:.80} is not supported, or a field is missing", where=where
                )
    for place, own in calls.items():
        made[place] = msgspec.structs.replace(made[place], tool_calls=tuple(own))
    return made


def input_items(given: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The items as they are kept: a text as a message, and each with an id."""
    if isinstance(given, str):
        given = [{"role": "user", "content": [{"type": "input_text", "text": given}]}]
    made = []
    for item in given:
        kind = item.get("type") or "message"
        identity = item.get("id") or f"{_PREFIXES.get(kind, 'item')}_{new_rid()}"
        made.append({**item, "type": kind, "id": identity})
    return made


def _logs(item: Mapping[str, Any]) -> str:
    """What code that was run printed."""
    outputs = item.get("outputs")
    listed = outputs if isinstance(outputs, list) else []
    return "".join(str(one.get("logs", "")) for one in listed if isinstance(one, Mapping))


def _output(output: Any, where: str) -> str | list[dict[str, Any]]:
    """Of a call: a text or parts of a message; anything else is shown as JSON."""
    if isinstance(output, list) and all(isinstance(part, Mapping) and "type" in part for part in output):
        return _content(output, where)
    return output if isinstance(output, str) else msgspec.json.encode(output).decode()


def _add_call(made: list[Message], calls: Calls, call: ToolCall) -> None:
    """To the reply before, or as a reply of its own."""
    if not made or made[-1].role != "assistant":
        made.append(Message("assistant", ""))
    calls.setdefault(len(made) - 1, []).append(call)


def _role(role: Any, where: str) -> str:
    found = _ROLES.get(role) if isinstance(role, str) else None
    if found is None:
        raise BadRequest(f"must be one of {', '.join(_ROLES)}; got {role!r:.80}", where=f"{where}.role")
    return found


def _content(content: Any, where: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"must be a string or a list of parts, got {json_type(content)}", where=where)
    parts: list[dict[str, Any]] = []
    for index, part in enumerate(content):
        match part:
            case {"type": "input_text" | "output_text" | "text", "text": str(text)}:
                parts.append({"type": "text", "text": text})
            case {"type": "refusal", "refusal": str(text)}:
                parts.append({"type": "text", "text": text})
            case {"type": str()}:
                parts.append(dict(part))  # images and sound: what of them is taken, the frontend says
            case _:
                raise BadRequest("is not a part of a message", where=f"{where}[{index}]")
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts
