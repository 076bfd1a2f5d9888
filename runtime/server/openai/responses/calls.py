"""Calls that this server runs for a response: each within a deadline, in sessions that end with it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from runtime.protocol.errors import RuntimeFault
from runtime.server.openai.responses.offer import ServerTool
from runtime.tools import ToolResult, ToolServer, ToolSession

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
