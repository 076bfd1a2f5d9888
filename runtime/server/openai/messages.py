"""OpenAI's messages and tools as the runtime's. Checks only their shape: template and frontend decide which
roles and parts a model accepts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from runtime.protocol.errors import BadRequest
from runtime.protocol.messages import Message, ToolCall
from runtime.protocol.model_info import ModelInfo
from runtime.server.http.body import expect, json_type, known_fields
from runtime.server.tool_use import ToolUse

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_SAME = {"developer": "system", "function": "tool"}
_FIELDS = frozenset(
    {
        "role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "refusal", "audio",
        "function_call", "annotations", "reasoning", "parsed", "provider_specific_fields", "cache_control",
    }
)  # fmt: skip
"""The last three have no effect: two that clients add to a reply that they send back, and a hint for the
caches of providers. reasoning: another name of reasoning_content."""


def messages_of(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The conversation, with "developer" as "system" and "function" as "tool". Raises BadRequest with the
    path of what is wrong."""
    if not messages:
        raise BadRequest("is empty; a conversation has at least one message", where="messages")
    return [_message(one, f"messages[{index}]") for index, one in enumerate(messages)]


def _message(one: Any, path: str) -> Message:
    one = known_fields(expect(one, dict, path, "a message must be an object"), _FIELDS, path)
    role = one.get("role")
    if role not in ROLES:
        raise BadRequest(f"must be one of {', '.join(ROLES)}; got {role!r:.80}", where=f"{path}.role")
    for name in ("audio", "function_call"):
        if one.get(name):
            instead = "; use tool_calls" if name == "function_call" else ""
            raise BadRequest(f"is not supported{instead}", where=f"{path}.{name}")
    calls = _calls(one.get("tool_calls"), f"{path}.tool_calls")
    if calls and role != "assistant":
        raise BadRequest("only an assistant's message has tool calls", where=f"{path}.tool_calls")
    named = "reasoning_content" if one.get("reasoning_content") is not None else "reasoning"
    thought = optional_text(one, named, path)
    if thought and role != "assistant":
        raise BadRequest("only an assistant's message has reasoning", where=f"{path}.{named}")
    content = _content(one, bool(calls) or role == "assistant", path)
    return Message(
        role=_SAME.get(str(role), str(role)),
        content=content,
        name=optional_text(one, "name", path),
        tool_calls=calls,
        tool_call_id=optional_text(one, "tool_call_id", path),
        reasoning_content=thought,
    )


def _content(one: Mapping[str, Any], may_be_missing: bool, path: str) -> str | list[dict[str, Any]]:
    content = one.get("content")
    match content:
        case None:
            refusal = one.get("refusal")
            if may_be_missing:
                return refusal if isinstance(refusal, str) else ""
            raise BadRequest("is missing", where=f"{path}.content")
        case list():
            parts: list[dict[str, Any]] = []
            for index, part in enumerate(content):
                if not isinstance(part, dict):
                    raise BadRequest(
                        f"a part must be an object, got {json_type(part)}",
                        where=f"{path}.content[{index}]",
                        hint='such as {"type": "text", "text": "..."}',
                    )
                refusal = part.get("refusal") if part.get("type") == "refusal" else None
                parts.append({"type": "text", "text": refusal} if isinstance(refusal, str) else part)
            return parts
        case _:
            return expect(content, str, f"{path}.content", "must be a string or a list of parts")


def _calls(value: Any, path: str) -> tuple[ToolCall, ...]:
    if value is None:
        return ()
    calls: list[ToolCall] = []
    for index, call in enumerate(expect(value, list, path, "must be a list")):
        match call:
            case {"function": {"name": str(name), **rest}, **outer}:
                arguments = rest.get("arguments", "{}")
                if not isinstance(arguments, str):
                    raise BadRequest("must be a string of JSON", where=f"{path}[{index}].function.arguments")
                identity = outer.get("id")
                calls.append(ToolCall(name, arguments, identity if isinstance(identity, str) else None))
            case _:
                raise BadRequest(
                    'must be {"id", "type": "function", "function": {"name", "arguments"}}',
                    where=f"{path}[{index}]",
                )
    return tuple(calls)


def tools_of(
    tools: Sequence[Mapping[str, Any]] | None, choice: str | Mapping[str, Any] | None
) -> list[dict[str, Any]] | None:
    """The tools that the prompt lists: all, or none if the choice is "none". Raises BadRequest."""
    kind, names = _choice(choice)
    if not tools:
        if kind == "required":
            raise BadRequest("Tools cannot be empty if tool choice is set to required.", where="tools")
        if kind == "named":
            raise BadRequest("Tools cannot be empty if tool choice is set to a specific tool.", where="tools")
        return None
    shown = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    known = {tool["function"]["name"] for tool in shown}
    for name in names or ():
        if name not in known:
            raise BadRequest(f"Tool '{name}' not found in tools list.", where="tool_choice")
    return None if kind == "none" else shown


def callable_tools(
    shown: Sequence[Mapping[str, Any]] | None, choice: str | Mapping[str, Any] | None
) -> tuple[list[Mapping[str, Any]], str]:
    """Those of the listed tools that may be called, and the choice for ToolUse. Raises BadRequest."""
    kind, names = _choice(choice)
    allowed = None if names is None else set(names)
    tools = [tool for tool in shown or () if allowed is None or tool["function"]["name"] in allowed]
    return tools, f"={names[0]}" if kind == "named" and names else kind


def tool_use(
    model: ModelInfo,
    tools: Sequence[Mapping[str, Any]] | None,
    choice: str | Mapping[str, Any] | None,
    parallel: bool | None,
    history: Sequence[Message],
    sampling: Mapping[str, Any],
) -> tuple[dict[str, Any], ToolUse]:
    """The request's fields for the tools, and their use. Raises BadRequest."""
    shown = tools_of(tools, choice)
    called, mode = callable_tools(shown, choice)
    use = ToolUse.of(model, called, mode, parallel, history, sampling)
    return {"tools": shown} if shown else {}, use


def template_fields(variables: Mapping[str, Any] | None, effort: str | None) -> dict[str, Any]:
    """The request's fields for the template's variables; reasoning_effort is one of them."""
    values = {**({} if effort is None else {"reasoning_effort": effort}), **(variables or {})}
    return {"template_kwargs": values} if values else {}


class _Choice(NamedTuple):
    """kind: "auto", "none", "required" or "named". names: the tools that may be called; None: all."""

    kind: str
    names: tuple[str, ...] | None = None


def _choice(choice: Any) -> _Choice:
    """Nested as in chat completions or flat as in responses: clients send either to both."""
    match choice:
        case None:
            return _Choice("auto")
        case "auto" | "none" | "required":
            return _Choice(choice)
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return _Choice("named", (name,))
        case {"type": "allowed_tools", "allowed_tools": {**allowed}} | {"type": "allowed_tools", **allowed}:
            return _allowed(allowed)
        case _:
            raise BadRequest(
                'is "auto", "none", "required", {"type": "function", "function": {"name": ...}} or '
                '{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}',
                where="tool_choice",
            )


def _allowed(allowed: Mapping[Any, Any]) -> _Choice:
    mode, tools = allowed.get("mode", "auto"), allowed.get("tools")
    if mode not in ("auto", "required"):
        raise BadRequest(f'mode must be "auto" or "required", got {mode!r:.80}', where="tool_choice")
    if not isinstance(tools, list) or not tools:
        raise BadRequest("tools must be a list of at least one allowed tool", where="tool_choice")
    named = [_choice(tool) if isinstance(tool, Mapping) else _Choice("") for tool in tools]
    if any(one.kind != "named" for one in named):
        raise BadRequest("an allowed tool must be a function with its name", where="tool_choice")
    return _Choice(mode, tuple(name for one in named for name in one.names or ()))


def _tool(tool: Any, path: str) -> dict[str, Any]:
    match tool:
        case {"function": {"name": str(name)}} if name:
            if tool.get("type", "function") != "function":
                raise BadRequest(f'is "function", got {tool["type"]!r:.80}', where=f"{path}.type")
            parameters = tool["function"].get("parameters")
            if parameters is not None:
                expect(parameters, dict, f"{path}.function.parameters", "must be a JSON schema")
            return {**tool, "type": "function"}
        case _:
            raise BadRequest(
                'must be {"type": "function", "function": {"name", "description", "parameters"}}', where=path
            )


def optional_text(one: Mapping[str, Any], name: str, path: str) -> str | None:
    value = one.get(name)
    return None if value is None else expect(value, str, f"{path}.{name}", "must be a string")
