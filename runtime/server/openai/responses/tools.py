"""Which tools a request of /v1/responses asks for: the client's functions, and those that this server runs.

It reads shapes and names; calls are in calls.py.
"""

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
"""OpenAI's built-in tools: the namespace that does the same here, and the type of their calls' items."""
_SAYS_NOTHING: dict[str, tuple[Any, ...]] = {
    "require_approval": ("never",), "search_context_size": ("medium",), "defer_loading": (False,),
}  # fmt: skip
"""Values that ask for nothing beyond what is done anyway."""


@dataclass(frozen=True)
class ServerTool:
    """A tool that this server runs. kind: the type of its calls' items."""

    namespace: str
    tool: Tool
    kind: Kind


@dataclass(frozen=True)
class Offer:
    """functions: all tools as chat completions have them, None where the request has no tools; run: those
    that the server runs, by name."""

    functions: list[dict[str, Any]] | None
    run: Mapping[str, ServerTool]


def offer(server: ToolServer | None, tools: Sequence[Mapping[str, Any]] | None) -> Offer:
    """Raises BadRequest; NotSupported for tools that are not there."""
    if tools is None:
        return Offer(None, {})
    functions: list[dict[str, Any]] = []
    owners: dict[Any, str] = {}
    run: dict[str, ServerTool] = {}
    for index, given in enumerate(tools):
        where = f"tools[{index}]"
        if given.get("type") == "function":
            words = ("name", "description", "parameters", "strict")
            function = {word: given[word] for word in words if given.get(word) is not None}
            name = function.get("name")
            _once(name, "the request's functions", owners if name in run else {}, where)
            owners[name] = "the request's functions"
            functions.append({"type": "function", "function": function})
            continue
        for found in _served(server, given, where):
            name = found.tool.name
            _once(name, found.namespace, owners, where)
            owners[name], run[name] = found.namespace, found
            functions.append({"type": "function", "function": _function(found.tool)})
    return Offer(functions, run)


def chosen(choice: Any, run: Mapping[str, ServerTool]) -> Any:
    """`tool_choice` as chat completions have it. Raises BadRequest for one of several tools that is not
    named."""
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
        told = several if names else "names no tool of the request's"
        raise BadRequest(told, where="tool_choice", hint='{"type": "mcp", "server_label": ..., "name": ...}')
    return {"type": "function", "function": {"name": names[0]}}


def afterwards(choice: Any) -> Any:
    """The choice for generations after the first, which it was made for: what may be called may still be, and
    nothing must."""
    match choice:
        case "none":
            return choice
        case {"type": "allowed_tools", "allowed_tools": {**allowed}}:
            return {**choice, "allowed_tools": {**allowed, "mode": "auto"}}
        case {"type": "allowed_tools"}:
            return {**choice, "mode": "auto"}
        case _:
            return "auto"


def _names(choice: Any, run: Mapping[str, ServerTool]) -> list[str] | None:
    """The tools that the server runs which this means; None: it is not about such."""
    if not isinstance(choice, Mapping):
        return None
    kind = choice.get("type")
    if kind == "mcp":
        asked = choice.get("name")
        owned = [name for name, one in run.items() if one.namespace == choice.get("server_label")]
        return owned if asked is None else [name for name in owned if name == asked]
    if isinstance(kind, str) and kind in _BUILT_IN:
        return [name for name, one in run.items() if one.kind == _BUILT_IN[kind][1]]
    return None


def _served(server: ToolServer | None, given: Mapping[str, Any], where: str) -> list[ServerTool]:
    """The tools of one namespace that are asked for."""
    kind = str(given.get("type"))[:80]
    if kind == "mcp":
        label = given.get("server_label")
        if not isinstance(label, str):
            raise BadRequest("is missing: the name of a tool server", where=f"{where}.server_label")
        _nothing_else(given, ("type", "server_label", "allowed_tools"), where)
        space = _namespace(server, label, f"{label!r:.80}", f"{where}.server_label")
        tools = _allowed(space, given.get("allowed_tools"), f"{where}.allowed_tools")
        return [ServerTool(label, tool, "mcp_call") for tool in tools]
    if kind in _BUILT_IN:
        name, item = _BUILT_IN[kind]
        _nothing_else(given, ("type", "container"), where)
        container = given.get("container")
        if isinstance(container, Mapping) and container.get("type") == "auto":
            _nothing_else(container, ("type",), f"{where}.container")
        elif container is not None:
            raise NotSupported('is {"type": "auto"}: none is kept', where=f"{where}.container")
        space = _namespace(server, name, repr(kind), where)
        return [ServerTool(name, tool, item) for tool in space.tools]
    raise NotSupported(f"the tool {kind!r} is not available; {_known(server)}", where=where)


def _namespace(server: ToolServer | None, name: str, told: str, where: str) -> ToolNamespace:
    found = None if server is None else server.get_tool_description(name)
    if found is None:
        hint = "tool servers are given with the server's option --tool-server"
        raise NotSupported(f"the tool {told} is not available; {_known(server)}", where=where, hint=hint)
    return found


def _known(server: ToolServer | None) -> str:
    names = [] if server is None else server.names()
    return f"functions are, and of tool servers: {', '.join(names)}" if names else "functions are"


def _nothing_else(given: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """Refuses fields that would be dropped, unless what they ask for is done anyway."""
    for name, value in given.items():
        if name in known or value in (None, [], {}) or value in _SAYS_NOTHING.get(name, ()):
            continue
        if name in ("server_url", "connector_id", "authorization", "headers", "tunnel_id"):
            raise NotSupported(
                "only tool servers configured at startup can be used, by server_label",
                where=f"{where}.{name}",
            )
        raise NotSupported("is not supported", where=f"{where}.{name}")


def _allowed(space: ToolNamespace, given: Any, where: str) -> list[Tool]:
    match given:
        case None:
            return list(space.tools)
        case {"tool_names": [*names]}:
            _nothing_else(given, ("tool_names",), where)
        case [*names]:
            pass
        case _:
            raise NotSupported("must be a list of names", where=where)
    known = {tool.name: tool for tool in space.tools}
    for name in names:
        if not isinstance(name, str) or name not in known:
            raise BadRequest(f"{space.name} has no tool {name!r:.80}; it has {', '.join(known)}", where=where)
    return [tool for name, tool in known.items() if name in names]


def _once(name: Any, owner: str, owners: Mapping[Any, str], where: str) -> None:
    if name in owners:
        told = f"two tools are called {name!r}: one of {owners[name]}, one of {owner}"
        raise BadRequest(told, where=where, hint="leave one out with allowed_tools")


def _function(tool: Tool) -> dict[str, Any]:
    made: dict[str, Any] = {"name": tool.name, "parameters": dict(tool.parameters)}
    return made if tool.description is None else {**made, "description": tool.description}


PATIENCE = 5
"""A call may take so many times its own time: to give up a connection that broke, and to connect."""


class Sessions:
    """`async with`: those of one response, one for each namespace, opened by the first call.

    server: None where nothing is run. most: characters of a result that are shown to the model.
    """

    def __init__(self, server: ToolServer | None, timeout_s: float, most: int) -> None:
        self._server, self._timeout_s, self._most = server, timeout_s, most
        self._open: dict[str, ToolSession] = {}
        self._ends = AsyncExitStack()

    async def __aenter__(self) -> Sessions:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._ends.aclose()

    async def call(self, called: ServerTool, arguments: str) -> ToolResult:
        """What the tool gave. Whatever goes wrong is a result that says so."""
        given = parsed(arguments)
        if given is None:
            return ToolResult("the arguments are no JSON object", True)
        limit = self._timeout_s * PATIENCE
        try:
            async with asyncio.timeout(limit):
                session = await self._session(called.namespace)
                result = await session.call(called.tool.name, given)
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
            made = self._server.get_tool_session(namespace)
            self._open[namespace] = await self._ends.enter_async_context(made)
        return self._open[namespace]


def parsed(arguments: str) -> Mapping[str, Any] | None:
    """A call's arguments; None: they are no JSON object, or one with halves of characters, which no tool
    could be sent. Nothing at all is no arguments."""
    try:
        given = json.loads(arguments or "{}")
        json.dumps(given, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return given if isinstance(given, dict) else None
