"""OpenAI's messages and tools as the runtime's own. Checks their shape and nothing of their meaning: which
roles and parts a model takes, its template and the frontend say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from runtime.protocol.errors import BadRequest
from runtime.protocol.messages import Message, ToolCall
from runtime.server.http.body import json_type, known_fields

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_SAME = {"developer": "system", "function": "tool"}
_FIELDS = (
    "role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "refusal", "audio",
    "function_call", "annotations",
)  # fmt: skip


def messages_of(given: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The conversation. "developer" becomes "system", "function" becomes "tool": the older and newer names of
    one thing. Raises BadRequest with the place of what is wrong."""
    if not given:
        raise BadRequest("is empty; a conversation has at least one message", where="messages")
    return [_message(one, f"messages[{index}]") for index, one in enumerate(given)]


def _message(one: Any, where: str) -> Message:
    if not isinstance(one, Mapping):
        raise BadRequest(f"a message is an object, got {json_type(one)}", where=where)
    one = known_fields(one, _FIELDS, where)
    role = one.get("role")
    if role not in ROLES:
        raise BadRequest(f"must be one of {', '.join(ROLES)}; got {role!r:.80}", where=f"{where}.role")
    for name in ("audio", "function_call"):
        if one.get(name):
            raise BadRequest("is not taken; use tool_calls" if name == "function_call" else "is not taken",
                             where=f"{where}.{name}")  # fmt: skip
    calls = _calls(one.get("tool_calls"), f"{where}.tool_calls")
    if calls and role != "assistant":
        raise BadRequest("only an assistant's message has tool calls", where=f"{where}.tool_calls")
    thought = _optional_text(one, "reasoning_content", where)
    if thought and role != "assistant":
        raise BadRequest("only an assistant's message has reasoning", where=f"{where}.reasoning_content")
    content = _content(one, bool(calls) or role == "assistant", where)
    return Message(
        role=_SAME.get(str(role), str(role)),
        content=content,
        name=_optional_text(one, "name", where),
        tool_calls=calls,
        tool_call_id=_optional_text(one, "tool_call_id", where),
        reasoning_content=thought,
    )


def _content(one: Mapping[str, Any], may_be_missing: bool, where: str) -> str | list[dict[str, Any]]:
    content = one.get("content")
    match content:
        case str():
            return content
        case None:
            refusal = one.get("refusal")
            if may_be_missing:
                return refusal if isinstance(refusal, str) else ""
            raise BadRequest("is missing", where=f"{where}.content")
        case list():
            for index, part in enumerate(content):
                if not isinstance(part, dict):
                    raise BadRequest(
                        f"a part is an object, got {json_type(part)}",
                        where=f"{where}.content[{index}]",
                        hint='such as {"type": "text", "text": "..."}',
                    )
            return [_refusal_as_text(part) for part in content]
        case _:
            raise BadRequest(
                f"is a text or a list of parts, got {json_type(content)}", where=f"{where}.content"
            )


def _refusal_as_text(part: dict[str, Any]) -> dict[str, Any]:
    if part.get("type") == "refusal" and isinstance(part.get("refusal"), str):
        return {"type": "text", "text": part["refusal"]}
    return part


def _calls(given: Any, where: str) -> tuple[ToolCall, ...]:
    if given is None:
        return ()
    if not isinstance(given, list):
        raise BadRequest(f"is a list, got {json_type(given)}", where=where)
    made: list[ToolCall] = []
    for index, call in enumerate(given):
        match call:
            case {"function": {"name": str(name), **rest}, **outer}:
                arguments = rest.get("arguments", "{}")
                if not isinstance(arguments, str):
                    raise BadRequest("is JSON as a text", where=f"{where}[{index}].function.arguments")
                identity = outer.get("id")
                made.append(ToolCall(name, arguments, identity if isinstance(identity, str) else None))
            case _:
                raise BadRequest(
                    'is {"id", "type": "function", "function": {"name", "arguments"}}',
                    where=f"{where}[{index}]",
                )
    return tuple(made)


def tools_of(
    tools: Sequence[Mapping[str, Any]] | None, choice: str | Mapping[str, Any] | None
) -> list[dict[str, Any]] | None:
    """The tools to be shown to the model: all, or none where the choice says so. Raises BadRequest."""
    kind, name = _choice(choice)
    if not tools:
        if kind == "required":
            raise BadRequest("Tools cannot be empty if tool choice is set to required.", where="tools")
        if kind == "named":
            raise BadRequest("Tools cannot be empty if tool choice is set to a specific tool.", where="tools")
        return None
    made = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    if kind == "named" and name not in (tool["function"]["name"] for tool in made):
        raise BadRequest(f"Tool '{name}' not found in tools list.", where="tool_choice")
    return None if kind == "none" else made


def _choice(choice: str | Mapping[str, Any] | None) -> tuple[str, str | None]:
    match choice:
        case None:
            return "auto", None
        case "auto" | "none" | "required":
            return str(choice), None
        case {"type": "function", "function": {"name": str(name)}}:
            return "named", name
        case _:
            raise BadRequest(
                'is "auto", "none", "required" or {"type": "function", "function": {"name": ...}}',
                where="tool_choice",
            )


def choice_kind(choice: str | Mapping[str, Any] | None) -> tuple[str, str | None]:
    """("auto" | "none" | "required" | "named", the name)."""
    return _choice(choice)


def _tool(tool: Any, where: str) -> dict[str, Any]:
    match tool:
        case {"function": {"name": str(name)}} if name:
            if tool.get("type", "function") != "function":
                raise BadRequest(f'is "function", got {tool["type"]!r:.80}', where=f"{where}.type")
            parameters = tool["function"].get("parameters")
            if parameters is not None and not isinstance(parameters, dict):
                raise BadRequest(
                    f"is a JSON schema, got {json_type(parameters)}", where=f"{where}.function.parameters"
                )
            return {**tool, "type": "function"}
        case _:
            raise BadRequest(
                'is {"type": "function", "function": {"name", "description", "parameters"}}', where=where
            )


def _optional_text(one: Mapping[str, Any], name: str, where: str) -> str | None:
    value = one.get(name)
    if value is not None and not isinstance(value, str):
        raise BadRequest(f"is a text, got {json_type(value)}", where=f"{where}.{name}")
    return value
