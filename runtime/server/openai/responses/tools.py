"""Tools of a request of /v1/responses: the client's functions, and those that this server runs, with their
calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Literal

from runtime.formats.tools.types import Tool
from runtime.protocol.errors import BadRequest, NotSupported, RuntimeFault
from runtime.tools import ToolNamespace, ToolResult, ToolServer, ToolSession

Kind = Literal["mcp_call", "code_interpreter_call", "web_search_call"]
_BUILT_IN: dict[str, tuple[str, Kind]] = {
    "code_interpreter": ("python", "code_interpreter_call"),
    "web_search": ("browser", "web_search_call"),
    "web_search_2025_08_26": ("browser", "web_search_call"),
    "web_search_preview": ("browser", "web_search_call"),
    "web_search_preview_2025_03_11": ("browser", "web_search_call"),
}
"""OpenAI's built-in tools -> the namespace of the same tool here, and the type of their calls' items."""
_DONE_ANYWAY: dict[str, tuple[Any, ...]] = {
    "require_approval": ("never",), "search_context_size": ("medium",), "defer_loading": (False,),
}  # fmt: skip
"""Values of fields that have no effect."""


@dataclass(frozen=True)
class ServerTool:
    """A tool that this server runs. kind: the type of its calls' items."""

    namespace: str
    tool: Tool
    kind: Kind


@dataclass(frozen=True)
class Offer:
    """functions: all tools as chat completions have them, None if the request has no tools; run: those that
    the server runs, by name."""

    functions: list[dict[str, Any]] | None
    run: Mapping[str, ServerTool]


def offer(server: ToolServer | None, tools: Sequence[Mapping[str, Any]] | None) -> Offer:
    """Raises BadRequest; NotSupported for tools that do not exist."""
    if tools is None:
        return Offer(None, {})
    functions: list[dict[str, Any]] = []
    owners: dict[Any, str] = {}
    run: dict[str, ServerTool] = {}
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        if tool.get("type") == "function":
            fields = ("name", "description", "parameters", "strict")
            function = {field: tool[field] for field in fields if tool.get(field) is not None}
            new: list[Any] = [(function.get("name"), "the request's functions", function, None)]
        else:
            new = []
            for one in _served(server, tool, path):
                function = {"name": one.tool.name, "parameters": dict(one.tool.parameters)}
                if one.tool.description is not None:
                    function["description"] = one.tool.description
                new.append((one.tool.name, one.namespace, function, one))
        for name, owner, function, run_here in new:
            if name in (run if run_here is None else owners):
                message = f"two tools are called {name!r}: one of {owners[name]}, one of {owner}"
                raise BadRequest(message, where=path, hint="leave one out with allowed_tools")
            owners[name] = owner
            if run_here is not None:
                run[name] = run_here
            functions.append({"type": "function", "function": function})
    return Offer(functions, run)


def chosen(choice: Any, run: Mapping[str, ServerTool]) -> Any:
    """`tool_choice` as chat completions have it. Raises BadRequest if it does not name exactly one tool."""
    names = _names(choice, run)
    if names is None:
        allowed = choice.get("tools") if isinstance(choice, Mapping) else None
        if not isinstance(allowed, list):
            return choice
        tools: list[Any] = []
        for one in allowed:
            named = _names(one, run)
            tools += [one] if named is None else [{"type": "function", "name": name} for name in named]
        return {**choice, "tools": tools}
    if len(names) != 1 and isinstance(choice, Mapping) and choice.get("type") in _BUILT_IN:
        names = [name for name in names if name == "search"]
    if len(names) != 1:
        several = f"names one of several tools: {', '.join(names)}"
        message = several if names else "names no tool of the request's"
        hint = '{"type": "mcp", "server_label": ..., "name": ...}'
        raise BadRequest(message, where="tool_choice", hint=hint)
    return {"type": "function", "function": {"name": names[0]}}


def afterwards(choice: Any) -> Any:
    """The choice for generations after the first: the same tools may be called, but none must be."""
    match choice:
        case {"type": "allowed_tools", "allowed_tools": {**allowed}}:
            return {**choice, "allowed_tools": {**allowed, "mode": "auto"}}
        case {"type": "allowed_tools"}:
            return {**choice, "mode": "auto"}
        case _:
            return "none" if choice == "none" else "auto"


def _names(choice: Any, run: Mapping[str, ServerTool]) -> list[str] | None:
    """The server's tools that `choice` means; None if it means no such tools."""
    if not isinstance(choice, Mapping):
        return None
    kind = choice.get("type")
    if kind == "mcp":
        names = [name for name, one in run.items() if one.namespace == choice.get("server_label")]
        return names if choice.get("name") is None else [name for name in names if name == choice["name"]]
    if isinstance(kind, str) and kind in _BUILT_IN:
        return [name for name, one in run.items() if one.kind == _BUILT_IN[kind][1]]
    return None


def _served(server: ToolServer | None, tool: Mapping[str, Any], path: str) -> list[ServerTool]:
    """The server's tools that an entry of the request's tools asks for."""
    kind = str(tool.get("type"))[:80]
    if kind == "mcp":
        label = tool.get("server_label")
        if not isinstance(label, str):
            raise BadRequest("is missing: the name of a tool server", where=f"{path}.server_label")
        _nothing_else(tool, ("type", "server_label", "allowed_tools"), path)
        space = _namespace(server, label, f"{label!r:.80}", f"{path}.server_label")
        tools = _allowed(space, tool.get("allowed_tools"), f"{path}.allowed_tools")
        return [ServerTool(label, one, "mcp_call") for one in tools]
    if kind in _BUILT_IN:
        name, item = _BUILT_IN[kind]
        _nothing_else(tool, ("type", "container"), path)
        container = tool.get("container")
        if isinstance(container, Mapping) and container.get("type") == "auto":
            _nothing_else(container, ("type",), f"{path}.container")
        elif container is not None:
            raise NotSupported('is {"type": "auto"}: none is kept', where=f"{path}.container")
        space = _namespace(server, name, repr(kind), path)
        return [ServerTool(name, one, item) for one in space.tools]
    raise NotSupported(f"the tool {kind!r} is not available; {_known(server)}", where=path)


def _namespace(server: ToolServer | None, name: str, shown: str, path: str) -> ToolNamespace:
    space = None if server is None else server.get_tool_description(name)
    if space is None:
        hint = "tool servers are given with the server's option --tool-server"
        raise NotSupported(f"the tool {shown} is not available; {_known(server)}", where=path, hint=hint)
    return space


def _known(server: ToolServer | None) -> str:
    names = [] if server is None else server.names()
    return f"functions are, and of tool servers: {', '.join(names)}" if names else "functions are"


def _nothing_else(entry: Mapping[str, Any], known: Sequence[str], path: str) -> None:
    """Refuse fields that would be ignored, unless they ask for nothing."""
    for name, value in entry.items():
        if name in known or value in (None, [], {}) or value in _DONE_ANYWAY.get(name, ()):
            continue
        if name in ("server_url", "connector_id", "authorization", "headers", "tunnel_id"):
            raise NotSupported(
                "only tool servers configured at startup can be used, by server_label", where=f"{path}.{name}"
            )
        raise NotSupported("is not supported", where=f"{path}.{name}")


def _allowed(space: ToolNamespace, allowed: Any, path: str) -> list[Tool]:
    match allowed:
        case None:
            return list(space.tools)
        case {"tool_names": [*names]}:
            _nothing_else(allowed, ("tool_names",), path)
        case [*names]:
            pass
        case _:
            raise NotSupported("must be a list of names", where=path)
    known = {tool.name: tool for tool in space.tools}
    for name in names:
        if not isinstance(name, str) or name not in known:
            raise BadRequest(f"{space.name} has no tool {name!r:.80}; it has {', '.join(known)}", where=path)
    return [tool for name, tool in known.items() if name in names]


# -- calls ---------------------------------------------------------------------------------------------------


PATIENCE = 5
"""A call may take this many times its own limit: to notice that a connection broke, and to connect again."""


class Sessions(AsyncExitStack):
    """`async with`: the tool sessions of one response, one for each namespace, opened by its first call. Each
    call has a deadline. server: None if nothing is run; most: characters of a result that the model reads."""

    def __init__(self, server: ToolServer | None, timeout_s: float, most: int) -> None:
        super().__init__()
        self._server, self._timeout_s, self._most = server, timeout_s, most
        self._open: dict[str, ToolSession] = {}

    async def call(self, called: ServerTool, arguments: str) -> ToolResult:
        """The tool's result; a failure is a result that describes it."""
        values = parsed(arguments)
        if values is None:
            return ToolResult("the arguments are no JSON object", True)
        limit = self._timeout_s * PATIENCE
        try:
            async with asyncio.timeout(limit):
                session = await self._session(called.namespace)
                result = await session.call(called.tool.name, values)
        except TimeoutError:
            return ToolResult(f"the tool {called.tool.name!r} did not answer within {limit:g} s", True)
        except (RuntimeFault, OSError) as error:
            return ToolResult(f"the tool {called.tool.name!r} failed: {error}", True)
        if len(result.text) > self._most:
            text = f"{result.text[: self._most]}\n[cut: {len(result.text)} characters]"
            return ToolResult(text, result.is_error)
        return result

    async def _session(self, namespace: str) -> ToolSession:
        assert self._server is not None
        if namespace not in self._open:
            session = self._server.get_tool_session(namespace)
            self._open[namespace] = await self.enter_async_context(session)
        return self._open[namespace]


def parsed(arguments: str) -> Mapping[str, Any] | None:
    """A call's arguments, {} for an empty text; None unless they are a JSON object in valid Unicode."""
    try:
        values = json.loads(arguments or "{}")
        json.dumps(values, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None
