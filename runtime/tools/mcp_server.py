"""MCPToolServer: tools of servers that speak the Model Context Protocol, with its official SDK. Source:
https://modelcontextprotocol.io/specification"""

from __future__ import annotations

import asyncio
import logging
import shlex
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from runtime.formats.tools.schema import trimmed
from runtime.formats.tools.types import Tool
from runtime.protocol.errors import BadRequest
from runtime.protocol.registry import Registry
from runtime.tools.tool_server import ToolNamespace, ToolResult, ToolServer, ToolServerError, ToolSession

log = logging.getLogger(__name__)

# The SDK is an extra, and slow to import.
_SDK: Registry[Any] = Registry(
    "part of MCP",
    {
        "client": "mcp:Client",
        "stdio": "mcp:StdioServerParameters",
        "sse": "mcp.client.sse:sse_client",
        "text": "mcp.types:TextContent",
        "error": "mcp:MCPError",
        "closed": "mcp.types:CONNECTION_CLOSED",
    },
    extras=dict.fromkeys(("client", "stdio", "sse", "text", "error", "closed"), "mcp"),
)
_Calls: TypeAlias = "asyncio.Queue[tuple[str, Mapping[str, Any], asyncio.Future[ToolResult]] | None]"
"""Name, arguments, and the future for the result; None: no more calls."""
MOST_TOOLS = 1000
LONGEST_RESULT = 1 << 20
"""Characters kept of a tool's result."""


@dataclass(frozen=True)
class McpAddress:
    """The address of an MCP server: "host:port" and "http://.../sse" (SSE), any other URL (streamable HTTP),
    or "stdio:command arguments", which is started for each session."""

    text: str

    def __post_init__(self) -> None:
        try:
            command = shlex.split(self.text[6:]) if self.text.startswith("stdio:") else [self.text]
        except ValueError as error:
            raise BadRequest(f"{self.text!r} is no command: {error}", where="tool_server") from error
        if not command or not command[0]:
            raise BadRequest(f"{self.text!r} is no address of a tool server", where="tool_server")

    def transport(self, timeout_s: float) -> Any:
        """A transport for the SDK's client."""
        if self.text.startswith("stdio:"):
            command, *arguments = shlex.split(self.text[6:])
            return _SDK.load("stdio")(command=command, args=arguments)
        url = self.text if "://" in self.text else f"http://{self.text}/sse"
        if url.rstrip("/").endswith("/sse"):
            return _SDK.load("sse")(url, timeout=timeout_s, sse_read_timeout=max(timeout_s, 300.0))
        return url


class MCPToolServer(ToolServer):
    """Each server is a namespace with the server's own name. If two have the same name, the first is kept.
    connect_timeout_s: to connect and list the tools; call_timeout_s: for each call."""

    def __init__(self, connect_timeout_s: float = 30.0, call_timeout_s: float = 60.0) -> None:
        self._connect_s, self._call_s = connect_timeout_s, call_timeout_s
        self._namespaces: dict[str, tuple[ToolNamespace, McpAddress]] = {}

    async def add_tool_server(self, addresses: str) -> None:
        """Add servers, by addresses separated by commas (see McpAddress), and list their tools. Raises
        ToolServerError if one does not answer, BadRequest for an invalid address."""
        for text in filter(None, (one.strip() for one in addresses.split(","))):
            await self._add(McpAddress(text))

    async def _add(self, address: McpAddress) -> None:
        async with (
            _connected(address, self._connect_s) as client,
            _in_time(address, self._connect_s, "list its tools"),
        ):
            namespace = await _described(address, client)
        if namespace.name in self._namespaces:
            known = self._namespaces[namespace.name][1].text
            log.warning(
                "two tool servers are called %r: %s is left out, %s is kept",
                namespace.name,
                address.text,
                known,
            )
            return
        self._namespaces[namespace.name] = namespace, address

    def names(self) -> list[str]:
        return list(self._namespaces)

    def has_tool(self, name: str) -> bool:
        return name in self._namespaces

    def get_tool_description(self, name: str) -> ToolNamespace | None:
        entry = self._namespaces.get(name)
        return None if entry is None else entry[0]

    def get_tool_session(self, name: str) -> AbstractAsyncContextManager[ToolSession]:
        entry = self._namespaces.get(name)
        if entry is None:
            known = ", ".join(self._namespaces) or "none"
            raise ToolServerError(f"there is no tool server {name!r}; known: {known}")
        return self._session(entry[1])

    @asynccontextmanager
    async def _session(self, address: McpAddress) -> AsyncGenerator[ToolSession, None]:
        session = _McpSession(address, self._connect_s, self._call_s)
        try:
            yield session
        finally:
            await session.close()


class _McpSession(ToolSession):
    """Connects at the first call, and reconnects after a connection broke.

    The SDK's connections must be opened and closed by one task, so each lives in a task of its own.
    """

    def __init__(self, address: McpAddress, connect_s: float, call_s: float) -> None:
        self._address, self._connect_s, self._call_s = address, connect_s, call_s
        self._calls: _Calls = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._broken = False

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        if self._broken:
            await self.close()
        if self._task is None or self._task.done():
            # A new queue: calls that an earlier connection left are not repeated.
            self._broken, self._calls = False, asyncio.Queue()
            self._task = asyncio.create_task(self._serve(self._calls), name="sglang-dsl-mcp")
        task = self._task
        answer: asyncio.Future[ToolResult] = asyncio.get_running_loop().create_future()
        self._calls.put_nowait((name, arguments, answer))
        # The task ends without an answer if it is cancelled, or the SDK failed.
        either: set[asyncio.Future[Any]] = {answer, task}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()  # no caller waits any more
            raise
        if answer.done():
            return answer.result()
        failed = None if task.cancelled() else task.exception()
        return ToolResult(
            f"the connection to the tool server {self._address.text} broke: {_one_line(failed)}", True
        )

    async def close(self) -> None:
        task = self._task
        if task is not None and not task.done():
            self._calls.put_nowait(None)
            await asyncio.wait({task}, timeout=self._connect_s)
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=self._connect_s)
        self._task = None

    async def _serve(self, calls: _Calls) -> None:
        """Answer calls until there are no more, or the connection breaks."""
        try:
            async with _connected(self._address, self._connect_s) as client:
                while (item := await calls.get()) is not None:
                    name, arguments, answer = item
                    result, broken = await self._answer(client, name, arguments)
                    self._broken = broken
                    if not answer.done():
                        answer.set_result(result)
                    if broken:
                        return
        except ToolServerError as error:
            while not calls.empty():
                item = calls.get_nowait()
                if item is not None and not item[2].done():
                    item[2].set_result(ToolResult(str(error), True))

    async def _answer(self, client: Any, name: str, arguments: Mapping[str, Any]) -> tuple[ToolResult, bool]:
        """The result, and whether the connection is broken."""
        try:
            async with asyncio.timeout(self._call_s):
                result = await client.call_tool(name, dict(arguments))
        except TimeoutError:
            return ToolResult(f"the tool {name!r} did not answer within {self._call_s:g} s", True), True
        except Exception as error:  # noqa: BLE001 - any error of the SDK is the call's result
            # An error response of the server does not break the connection.
            fault: Any = error
            broken = not isinstance(error, _SDK.load("error")) or fault.code == _SDK.load("closed")
            return ToolResult(f"the tool {name!r} failed: {_one_line(error)}", True), broken
        text = "\n".join(_shown(block) for block in result.content)
        if not text and result.structured_content is not None:
            text = str(result.structured_content)
        if len(text) > LONGEST_RESULT:
            text = f"{text[:LONGEST_RESULT]}\n[cut: {len(text)} characters]"
        return ToolResult(text, bool(result.is_error), result.structured_content), False


def _shown(block: Any) -> str:
    return str(block.text) if isinstance(block, _SDK.load("text")) else f"[{block.type}]"


def _one_line(error: BaseException | None) -> str:
    """The error in one line; for a group, its first error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}".splitlines()[0][:300] if error is not None else "it was closed"


@asynccontextmanager
async def _in_time(address: McpAddress, seconds: float, to: str) -> AsyncGenerator[None, None]:
    """Raises ToolServerError if it takes longer, or fails."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise ToolServerError(f"the tool server {address.text} did not {to} within {seconds:g} s") from error
    except ToolServerError:
        raise
    except Exception as error:
        raise ToolServerError(f"the tool server {address.text} did not {to}: {_one_line(error)}") from error


@asynccontextmanager
async def _connected(address: McpAddress, seconds: float) -> AsyncGenerator[Any, None]:
    """A client of the SDK. Raises ToolServerError."""
    client = _SDK.load("client")(address.transport(seconds))
    async with _in_time(address, seconds, "answer"):
        await client.__aenter__()
    try:
        yield client
    finally:
        try:
            await client.__aexit__(None, None, None)
        except Exception as error:  # noqa: BLE001 - the connection is closed; its answers are known
            log.info("closing the connection to %s: %s", address.text, _one_line(error))


async def _described(address: McpAddress, client: Any) -> ToolNamespace:
    tools: list[Tool] = []
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor) if cursor else await client.list_tools()
        for one in page.tools:
            metadata = {**(getattr(one.annotations, "model_extra", None) or {}), **(one.meta or {})}
            if metadata.get("include_in_prompt") is False:
                continue
            tools.append(Tool(one.name, trimmed(one.input_schema), one.description))
        cursor = page.next_cursor
        if not cursor or len(tools) > MOST_TOOLS:
            break
    info = client.server_info
    name = info.name if info is not None and info.name else address.text
    return ToolNamespace(name, client.instructions, tuple(tools[:MOST_TOOLS]))
