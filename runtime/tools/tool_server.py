"""ToolServer: groups of tools by name, and sessions in which they are called."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

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
    """What a call gave, for the model to read. is_error: it failed, and `text` says why. structured: the same
    as data, where the tool gave that."""

    text: str
    is_error: bool = False
    structured: Any = None


class ToolSession(Protocol):
    """One connection to a tool. What it keeps between calls (a browser's page, variables) is its own."""

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Run a tool. One that fails, is slow or unknown, or a connection that breaks, is a result that says
        so."""
        ...


class ToolServer(ABC):
    """Names are those of namespaces."""

    @abstractmethod
    def has_tool(self, name: str) -> bool: ...

    @abstractmethod
    def get_tool_description(self, name: str) -> ToolNamespace | None:
        """None where there is no such namespace."""

    @abstractmethod
    def get_tool_session(self, name: str) -> AbstractAsyncContextManager[ToolSession]:
        """A session of its own. Raises ToolServerError where it cannot be had."""

    @abstractmethod
    def names(self) -> list[str]: ...
