"""MCPToolServer: tools of servers that speak the Model Context Protocol, with its official SDK. Source:
https://modelcontextprotocol.io/specification"""

from __future__ import annotations

import asyncio
import logging
import shlex
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from runtime.formats.tools.schema import trimmed
from runtime.formats.tools.types import Tool
from runtime.protocol.errors import BadRequest
from runtime.protocol.registry import MissingExtra
from runtime.tools.tool_server import ToolNamespace, ToolResult, ToolServer, ToolServerError, ToolSession

log = logging.getLogger(__name__)

MOST_TOOLS = 1000
LONGEST_RESULT = 1 << 20
"""Characters kept of a tool's result."""


def _sdk() -> Any:
    """The SDK, which is an extra, and slow to import. Raises MissingExtra."""
    try:
        import mcp.client.sse
    except ModuleNotFoundError as error:
        message = f"part of MCP 'client' needs the package {error.name!r}: pip install 'sglang-dsl[mcp]'"
        raise MissingExtra(message) from error
    return mcp


def _transport(address: str, timeout_s: float) -> Any:
    """A transport for the SDK's client. Raises BadRequest."""
    if address.startswith("stdio:"):
        try:
            command = shlex.split(address[6:])
        except ValueError as error:
            raise BadRequest(f"{address!r} is no command: {error}", where="tool_server") from error
        if not command or not command[0]:
            raise BadRequest(f"{address!r} is no address of a tool server", where="tool_server")
        return _sdk().StdioServerParameters(command=command[0], args=command[1:])
    url = address if "://" in address else f"http://{address}/sse"
    if url.rstrip("/").endswith("/sse"):
        silence_s = max(timeout_s, 300.0)
        return _sdk().client.sse.sse_client(url, timeout=timeout_s, sse_read_timeout=silence_s)
    return url


class MCPToolServer(ToolServer):
    """Each server is a namespace with the server's own name. If two have the same name, the first is kept.
    connect_timeout_s: to connect and list the tools; call_timeout_s: for each call."""

    KIND = "tool server"

    def __init__(self, connect_timeout_s: float = 30.0, call_timeout_s: float = 60.0) -> None:
        self._connect_s, self._call_s = connect_timeout_s, call_timeout_s
        self._tools: dict[str, _McpTools] = {}

    async def add_tool_server(self, addresses: str) -> None:
        """Add servers, by addresses separated by commas, and list their tools: "host:port" and
        "http://.../sse" (SSE), any other URL (streamable HTTP), or "stdio:command arguments", which is
        started for each session. Raises ToolServerError if one does not answer, BadRequest for an invalid
        address."""
        for address in filter(None, (one.strip() for one in addresses.split(","))):
            async with (
                _connected(address, self._connect_s) as client,
                _in_time(address, self._connect_s, "list its tools"),
            ):
                namespace = await _described(address, client)
            new = _McpTools(namespace, address, self._connect_s, self._call_s)
            kept = self._tools.setdefault(namespace.name, new)
            if kept is not new:
                message = "two tool servers are called %r: %s is left out, %s is kept"
                log.warning(message, namespace.name, address, kept.address)


@dataclass(frozen=True)
class _McpTools:
    """The tools of one server. connect_s, call_s: see MCPToolServer."""

    namespace: ToolNamespace
    address: str
    connect_s: float
    call_s: float

    def session(self) -> AbstractAsyncContextManager[ToolSession]:
        return aclosing(_McpSession(self.address, self.connect_s, self.call_s))


class _McpSession(ToolSession):
    """Connects at the first call, and reconnects after a connection broke. Calls may run at the same time.

    The SDK's connections must be opened and closed by one task, so each has a task of its own.
    """

    def __init__(self, address: str, connect_s: float, call_s: float) -> None:
        self._address, self._connect_s, self._call_s = address, connect_s, call_s
        self._connection: asyncio.Task[None] | None = None
        self._broken = False

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        if self._broken:
            await self.aclose()
        if self._connection is None:
            self._broken, self._end = False, asyncio.Event()
            self._client: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            connecting = self._connect(self._client, self._end)
            self._connection = asyncio.create_task(connecting, name="sglang-dsl-mcp")
        connection = self._connection
        work = asyncio.create_task(self._result(name, arguments), name="sglang-dsl-mcp-call")
        try:
            await asyncio.wait({work, connection}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
        finally:
            work.cancel()
        self._broken = True
        error = None if connection.cancelled() else connection.exception()
        if isinstance(error, ToolServerError):
            return ToolResult(str(error), True)
        message = f"the connection to the tool server {self._address} broke: {_one_line(error)}"
        return ToolResult(message, True)

    async def aclose(self) -> None:
        task, self._connection = self._connection, None
        if task is None:
            return
        self._end.set()
        if self._client.done():
            await asyncio.wait({task}, timeout=self._connect_s)
        task.cancel()
        await asyncio.wait({task}, timeout=self._connect_s)

    async def _connect(self, connected: asyncio.Future[Any], end: asyncio.Event) -> None:
        """Keep a connection open until its end. Raises ToolServerError."""
        async with _connected(self._address, self._connect_s) as client:
            connected.set_result(client)
            await end.wait()

    async def _result(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """The result of one call, which may find the connection broken."""
        client = await asyncio.shield(self._client)
        try:
            async with asyncio.timeout(self._call_s):
                result = await client.call_tool(name, dict(arguments))
        except TimeoutError:
            self._broken = True
            return ToolResult(f"the tool {name!r} did not answer within {self._call_s:g} s", True)
        except Exception as error:  # noqa: BLE001 - any error of the SDK is the call's result
            # An error response of the server does not break the connection.
            mcp = _sdk()
            self._broken |= not isinstance(error, mcp.MCPError) or error.code == mcp.types.CONNECTION_CLOSED
            return ToolResult(f"the tool {name!r} failed: {_one_line(error)}", True)
        text = "\n".join(_shown(block) for block in result.content)
        if not text and result.structured_content is not None:
            text = str(result.structured_content)
        if len(text) > LONGEST_RESULT:
            text = f"{text[:LONGEST_RESULT]}\n[cut: {len(text)} characters]"
        return ToolResult(text, bool(result.is_error), result.structured_content)


def _shown(block: Any) -> str:
    return str(block.text) if isinstance(block, _sdk().types.TextContent) else f"[{block.type}]"


def _one_line(error: BaseException | None) -> str:
    """The error in one line; for a group, its first error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}".splitlines()[0][:300] if error is not None else "it was closed"


@asynccontextmanager
async def _in_time(address: str, seconds: float, to: str) -> AsyncGenerator[None, None]:
    """Raises ToolServerError if it takes longer, or fails."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise ToolServerError(f"the tool server {address} did not {to} within {seconds:g} s") from error
    except ToolServerError:
        raise
    except Exception as error:
        raise ToolServerError(f"the tool server {address} did not {to}: {_one_line(error)}") from error


@asynccontextmanager
async def _connected(address: str, seconds: float) -> AsyncGenerator[Any, None]:
    """A client of the SDK. Raises ToolServerError."""
    transport = _transport(address, seconds)
    client = _sdk().Client(transport)
    async with _in_time(address, seconds, "answer"):
        await client.__aenter__()
    try:
        yield client
    finally:
        try:
            await client.__aexit__(None, None, None)
        except Exception as error:  # noqa: BLE001 - the connection is closed; its answers are known
            log.info("closing the connection to %s: %s", address, _one_line(error))


async def _described(address: str, client: Any) -> ToolNamespace:
    tools: list[Tool] = []
    cursor: str | None = None
    while len(tools) <= MOST_TOOLS:
        page = await client.list_tools(cursor=cursor) if cursor else await client.list_tools()
        for one in page.tools:
            metadata = {**(getattr(one.annotations, "model_extra", None) or {}), **(one.meta or {})}
            if metadata.get("include_in_prompt") is not False:
                tools.append(Tool(one.name, trimmed(one.input_schema), one.description))
        if not (cursor := page.next_cursor):
            break
    info = client.server_info
    name = info.name if info is not None and info.name else address
    return ToolNamespace(name, client.instructions, tuple(tools[:MOST_TOOLS]))
