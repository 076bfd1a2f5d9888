"""Anthropic's messages, blocks and tools as the runtime's. Checks only their shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from runtime.protocol.errors import BadRequest, NotSupported
from runtime.protocol.messages import Message, ToolCall
from runtime.server.http.body import expect

_SILENT = frozenset({"thinking", "redacted_thinking"})
"""Reasoning blocks of earlier replies, which templates drop."""


def messages_of(
    system: str | list[dict[str, Any]] | None, turns: Sequence[Mapping[str, Any]]
) -> list[Message]:
    """The conversation, the system prompt first. A user's tool_result blocks become messages before the
    user's text. Raises BadRequest with the path of what is wrong."""
    if not turns:
        raise BadRequest("is empty; a conversation has at least one message", where="messages")
    messages: list[Message] = []
    if system:
        text = system if isinstance(system, str) else _joined(system, "system")
        messages.append(Message("system", text))
    for index, one in enumerate(turns):
        path = f"messages[{index}]"
        match expect(one, dict, path, "a message must be an object").get("role"):
            case "user":
                messages += _user(one.get("content"), path)
            case "assistant":
                messages.append(_assistant(one.get("content"), path))
            case "system":
                messages.append(Message("system", _text(one.get("content"), path)))
            case other:
                raise BadRequest(
                    f'must be "user", "assistant" or "system", got {other!r:.80}', where=f"{path}.role"
                )
    return messages


def _user(content: Any, path: str) -> list[Message]:
    if isinstance(content, str):
        return [Message("user", content)]
    results: list[Message] = []
    parts: list[dict[str, Any]] = []
    for block, at in _blocks(content, path):
        match block:
            case {"type": "text", "text": str(text)}:
                parts.append({"type": "text", "text": text})
            case {"type": "image", "source": source}:
                parts.append({"type": "image_url", "image_url": {"url": _url(source, at)}})
            case {"type": "tool_result", "tool_use_id": str(identity)}:
                result = block.get("content")
                text = "" if result is None else _text(result, at)
                results.append(Message("tool", text, tool_call_id=identity))
            case _:
                raise _unknown(block, at)
    if all(part["type"] == "text" for part in parts):
        text = "\n\n".join(part["text"] for part in parts)
        return [*results, Message("user", text)] if parts or not results else results
    return [*results, Message("user", parts)]


def _assistant(content: Any, path: str) -> Message:
    if isinstance(content, str):
        return Message("assistant", content)
    texts: list[str] = []
    calls: list[ToolCall] = []
    for block, at in _blocks(content, path):
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "tool_use", "name": str(name), "id": str(identity)}:
                arguments = msgspec.json.encode(block.get("input") or {}).decode()
                calls.append(ToolCall(name, arguments, identity))
            case {"type": kind} if kind in _SILENT:
                continue
            case _:
                raise _unknown(block, at)
    return Message("assistant", "\n\n".join(texts), tool_calls=tuple(calls))


def _listed(content: Any, path: str) -> list[Any]:
    return expect(content, list, f"{path}.content", "must be a string or a list of blocks")


def _blocks(content: Any, path: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Each with its path."""
    for index, block in enumerate(_listed(content, path)):
        at = f"{path}.content[{index}]"
        yield expect(block, dict, at, "a block must be an object"), at


def _text(content: Any, path: str) -> str:
    return content if isinstance(content, str) else _joined(_listed(content, path), f"{path}.content")


def _joined(blocks: Sequence[Any], path: str) -> str:
    texts: list[str] = []
    for index, block in enumerate(blocks):
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case _:
                raise BadRequest("only text blocks are supported here", where=f"{path}[{index}]")
    return "\n\n".join(texts)


def _url(source: Any, path: str) -> str:
    match source:
        case {"type": "url", "url": str(url)}:
            return url
        case {"type": "base64", "media_type": str(media), "data": str(data)}:
            return f"data:{media};base64,{data}"
        case _:
            raise BadRequest("must be a url or base64 data with its media_type", where=f"{path}.source")


def _unknown(block: Mapping[str, Any], path: str) -> BadRequest:
    return BadRequest(
        f"a block of type {block.get('type')!r:.80} is not supported here, or a field is missing", where=path
    )


def tools_of(
    tools: Sequence[Mapping[str, Any]] | None, choice: Mapping[str, Any] | None
) -> tuple[list[dict[str, Any]] | None, str, bool]:
    """The tools that the prompt lists, as templates expect them; the choice for ToolUse; and whether calls
    may be parallel. Raises BadRequest, NotSupported."""
    choice = {"type": "auto"} if choice is None else choice
    kind = choice.get("type")
    if kind not in ("auto", "any", "tool", "none"):
        raise BadRequest(
            f'type must be "auto", "any", "tool" or "none", got {kind!r:.80}', where="tool_choice"
        )
    if not tools:
        if kind in ("any", "tool"):
            raise BadRequest("tools are needed for this tool_choice", where="tools")
        return None, "none", True
    shown = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    name = choice.get("name")
    if kind == "tool" and name not in (tool["function"]["name"] for tool in shown):
        raise BadRequest(f"Tool {name!r:.80} not found in tools list.", where="tool_choice.name")
    mode = {"any": "required", "tool": f"={name}"}.get(kind, kind)
    return (None if kind == "none" else shown), mode, choice.get("disable_parallel_tool_use") is not True


def _tool(tool: Any, path: str) -> dict[str, Any]:
    match tool:
        case {"name": str(name), "input_schema": {**schema}} if name:
            function = {"name": name, "description": tool.get("description") or "", "parameters": schema}
            return {"type": "function", "function": function}
        case {"type": str(kind)} if kind != "custom":
            raise NotSupported(f"the built-in tool {kind!r:.80} is not available", where=path)
        case _:
            raise BadRequest('must be {"name", "description", "input_schema"}', where=path)
