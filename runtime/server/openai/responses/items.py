"""The items of OpenAI's Responses interface: of an input, as messages; of an output, as clients read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from runtime.protocol.errors import BadRequest, NotSupported
from runtime.protocol.messages import Message, ToolCall
from runtime.protocol.request_base import new_rid
from runtime.server.http.body import expect


def text_part(text: str, logprobs: Sequence[Any]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def server_call_item(kind: str, identity: str, name: str, namespace: str, container: str) -> dict[str, Any]:
    """The item of a call that this server runs, when it begins: of OpenAI's built-in tools their own type, of
    all others "mcp_call", whatever the protocol. "function_call" is for calls that the client runs."""
    head = {"type": kind, "id": identity, "status": "in_progress"}
    match kind:
        case "code_interpreter_call":
            return {**head, "code": "", "container_id": container, "outputs": None}
        case "web_search_call":
            return {**head, "action": {"type": "search", "query": ""}}
        case _:
            facts = {"name": name, "server_label": namespace, "arguments": ""}
            return {**head, **facts, "output": None, "error": None, "approval_request_id": None}


def set_arguments(item: dict[str, Any], name: str, arguments: str, values: Mapping[str, Any]) -> None:
    """Put a call's arguments, as JSON and decoded, into its item."""
    match item["type"]:
        case "code_interpreter_call":
            item["code"] = str(values.get("code", arguments))
        case "web_search_call":
            item["action"] = _action(name, values)
        case _:
            item["arguments"] = arguments


def set_result(item: dict[str, Any], text: str, failed: bool) -> None:
    """Put the result of a call into its item."""
    item["status"] = "failed" if failed else "completed"
    match item["type"]:
        case "code_interpreter_call":
            item["outputs"] = [{"type": "logs", "logs": text}]
        case "mcp_call":
            item["error" if failed else "output"] = text


def _action(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    page = str(values.get("id", ""))
    if name == "open":
        return {"type": "open_page", "url": page}
    if name == "find":
        return {"type": "find_in_page", "pattern": str(values.get("pattern", "")), "url": page}
    return {"type": "search", "query": str(values.get("query", ""))}


_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def messages_of(items: str | Sequence[Any]) -> list[Message]:
    """The conversation. A text is one user's message; calls in a row belong to one reply. Raises BadRequest
    with the path of what is wrong, NotSupported for items of tools that do not exist here."""
    if isinstance(items, str):
        return [Message("user", items)]
    if not items:
        raise BadRequest("is empty", where="input")
    messages: list[Message] = []
    calls: dict[int, list[ToolCall]] = {}  # index of a reply among the messages -> its calls

    def add_call(call: ToolCall) -> None:
        """To the reply before, or as a reply of its own."""
        if not messages or messages[-1].role != "assistant":
            messages.append(Message("assistant", ""))
        calls.setdefault(len(messages) - 1, []).append(call)

    for index, item in enumerate(items):
        path = f"input[{index}]"
        match expect(item, dict, path, "an item must be an object"):
            case {"type": "function_call", "name": str(name), "arguments": str(arguments)}:
                add_call(ToolCall(name, arguments, item.get("call_id") or item.get("id")))
            case {"type": "function_call_output", "call_id": str(identity), "output": output}:
                messages.append(Message("tool", _output(output, f"{path}.output"), tool_call_id=identity))
            case {"type": "mcp_call", "name": str(name), "arguments": str(arguments), "id": str(identity)}:
                add_call(ToolCall(name, arguments, identity))
                text = str(item.get("output") or item.get("error") or "")
                messages.append(Message("tool", text, name=name, tool_call_id=identity))
            case {"type": "code_interpreter_call", "code": str(code), "id": str(identity)}:
                arguments = msgspec.json.encode({"code": code}).decode()
                add_call(ToolCall("python", arguments, identity))
                messages.append(Message("tool", _logs(item), name="python", tool_call_id=identity))
            case {"type": "reasoning" | "web_search_call"}:
                continue  # reasoning is not shown to the model again; a search's results are not in its item
            case {"role": role, "content": content} if item.get("type", "message") == "message":
                if not isinstance(role, str) or role not in _ROLES:
                    known = ", ".join(_ROLES)
                    raise BadRequest(f"must be one of {known}; got {role!r:.80}", where=f"{path}.role")
                messages.append(Message(_ROLES[role], _content(content, f"{path}.content")))
            case _:
                kind = item.get("type")
                raise NotSupported(
                    f"an item of type {kind!r:.80} is not supported, or a field is missing", where=path
                )
    for index, of_reply in calls.items():
        messages[index] = msgspec.structs.replace(messages[index], tool_calls=tuple(of_reply))
    return messages


def input_items(items: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The items as they are stored: a text as a message, and each with an id."""
    if isinstance(items, str):
        items = [{"role": "user", "content": [{"type": "input_text", "text": items}]}]
    stored = []
    for item in items:
        kind = item.get("type") or "message"
        identity = item.get("id") or f"{_PREFIXES.get(kind, 'item')}_{new_rid()}"
        stored.append({**item, "type": kind, "id": identity})
    return stored


def _logs(item: Mapping[str, Any]) -> str:
    """The output of code that was run."""
    outputs = item.get("outputs")
    known = [one for one in outputs if isinstance(one, Mapping)] if isinstance(outputs, list) else []
    return "".join(str(one.get("logs", "")) for one in known)


def _output(output: Any, path: str) -> str | list[dict[str, Any]]:
    """Of a call: a text or parts of a message; anything else is shown as JSON."""
    if isinstance(output, list) and all(isinstance(part, Mapping) and "type" in part for part in output):
        return _content(output, path)
    return output if isinstance(output, str) else msgspec.json.encode(output).decode()


def _content(content: Any, path: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = []
    for index, part in enumerate(expect(content, list, path, "must be a string or a list of parts")):
        match part:
            case {"type": "input_text" | "output_text" | "text", "text": str(text)} | {
                "type": "refusal",
                "refusal": str(text),
            }:
                parts.append({"type": "text", "text": text})
            case {"type": str()}:
                parts.append(dict(part))  # the frontend checks images and sound
            case _:
                raise BadRequest("is not a part of a message", where=f"{path}[{index}]")
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts
