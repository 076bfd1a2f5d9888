"""ToolServer: groups of tools by name, and sessions in which they are called."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from runtime.formats.tools.types import Tool
from runtime.protocol.errors import ToolServerError

__all__ = ["ToolNamespace", "ToolResult", "ToolServer", "ToolServerError", "ToolSession"]


@dataclass(frozen=True)
class ToolNamespace:
    """A group of tools: those of one MCP server, or a built-in tool."""

    name: str
    description: str | None
    tools: tuple[Tool, ...]


@dataclass(frozen=True)
class ToolResult:
    """The result of a call, for the model. is_error: the call failed, and `text` says why. structured: the
    result as data, if the tool returned it."""

    text: str
    is_error: bool = False
    structured: Any = None


class ToolSession(ABC):
    """One connection to a tool. It keeps its own state between calls (a browser's page, variables)."""

    @abstractmethod
    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Run a tool. If it fails, times out or is unknown, or the connection breaks, the result says so."""


class ToolServer:
    """Names are names of namespaces. A subclass fills `_tools` with what has a `namespace` and a `session`,
    or has methods of its own. KIND: what an error calls one of them."""

    KIND = "tool"
    _tools: Mapping[str, Any]

    def names(self) -> list[str]:
        return list(self._tools)

    def has_tool(self, name: str) -> bool:
        return name in self.names()

    def get_tool_description(self, name: str) -> ToolNamespace | None:
        """None if there is no such namespace."""
        return self._tools[name].namespace if name in self._tools else None

    def get_tool_session(self, name: str) -> AbstractAsyncContextManager[ToolSession]:
        """A new session. Raises ToolServerError if that is not possible."""
        if name not in self._tools:
            known = ", ".join(self._tools) or "none"
            raise ToolServerError(f"there is no {self.KIND} {name!r}; known: {known}")
        session: AbstractAsyncContextManager[ToolSession] = self._tools[name].session()
        return session
