"""MCPToolServer against real servers of the SDK, over each transport."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from runtime.formats.tools.schema import trimmed
from runtime.protocol.errors import BadRequest
from runtime.tools import MCPToolServer, ToolResult, ToolServerError

PEER = Path(__file__).parents[3] / "process" / "runtime" / "tools" / "mcp_peer.py"
PATIENCE_S = 300.0
Start = Callable[[str, str], str]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a server of a name over a transport; its address."""
    with ExitStack() as ends:

        def started(name: str, transport: str) -> str:
            if transport == "stdio":
                return f"stdio:{sys.executable} {PEER} {name} stdio"
            with socket.socket() as made:
                made.bind(("127.0.0.1", 0))
                port = made.getsockname()[1]
            process = subprocess.Popen(
                [sys.executable, str(PEER), name, transport, str(port)], stderr=subprocess.DEVNULL
            )
            ends.callback(process.wait)
            ends.callback(process.kill)
            until = time.monotonic() + PATIENCE_S
            while time.monotonic() < until:
                with socket.socket() as made:
                    if made.connect_ex(("127.0.0.1", port)) == 0:
                        break
                assert process.poll() is None
                time.sleep(0.05)
            return f"127.0.0.1:{port}" if transport == "sse" else f"http://127.0.0.1:{port}/mcp"

        yield started


def server_of(address: str, call_timeout_s: float = PATIENCE_S) -> MCPToolServer:
    server = MCPToolServer(PATIENCE_S, call_timeout_s)
    asyncio.run(server.add_tool_server(address))
    return server


def called(server: MCPToolServer, *calls: tuple[str, dict[str, object]]) -> list[ToolResult]:
    """Results of calls in one session."""

    async def run() -> list[ToolResult]:
        [name] = server.names()
        async with server.get_tool_session(name) as session:
            return [await session.call(tool, arguments) for tool, arguments in calls]

    return asyncio.run(asyncio.wait_for(run(), 3 * PATIENCE_S))


@pytest.mark.parametrize("transport", ["sse", "streamable-http", "stdio"])
def test_tools_are_listed_and_called(start: Start, transport: str) -> None:
    server = server_of(start("sums", transport))
    assert server.has_tool("sums")
    assert not server.has_tool("other")
    found = server.get_tool_description("sums")
    assert found is not None
    assert (found.name, found.description) == ("sums", "Sums, and what goes wrong.")
    assert [tool.name for tool in found.tools] == ["add", "fail", "slow", "die", "count"]
    assert found.tools[0].description == "Adds two numbers"
    assert found.tools[0].parameters == {
        "type": "object",
        "properties": {
            "a": {"type": "integer"},
            "b": {"type": "integer", "default": 1},
            "note": {"type": "string"},
        },
        "required": ["a"],
    }
    three, failed, unknown, wrong, again = called(
        server,
        ("add", {"a": 2}),
        ("fail", {}),
        ("nothing", {}),
        ("add", {"a": "x"}),
        ("add", {"a": 1, "b": 1}),
    )
    assert (three.text, three.is_error, again.text) == ("3", False, "2")
    assert failed.is_error
    assert "the disk is full" in failed.text
    assert unknown.is_error
    assert wrong.is_error


@pytest.mark.parametrize("transport", ["sse", "streamable-http", "stdio"])
def test_one_that_is_slow_or_dies(start: Start, transport: str) -> None:
    server = server_of(start("sums", transport), call_timeout_s=3.0)
    late, after = called(server, ("slow", {"seconds": 600}), ("add", {"a": 1}))
    assert late == ToolResult("the tool 'slow' did not answer within 3 s", True)
    # Over stdio there is a new process; a server of its own may still be busy.
    assert after.text == "2" or after.is_error
    server = server_of(start("sums", transport), call_timeout_s=PATIENCE_S)
    dead, next_one = called(server, ("die", {}), ("add", {"a": 1}))
    assert dead.is_error
    assert len(dead.text.splitlines()) == 1
    if transport == "stdio":
        assert (next_one.text, next_one.is_error) == ("2", False), "a session connects anew"
    else:
        assert next_one.is_error
        with pytest.raises(ToolServerError):
            asyncio.run(server.add_tool_server(server.names()[0] + ":1"))


def test_sessions_are_apart(start: Start) -> None:
    server = server_of(start("sums", "stdio"))
    assert [one.text for one in called(server, ("count", {}), ("count", {}))] == ["1", "2"]
    assert [one.text for one in called(server, ("count", {}))] == ["1"]


def test_two_of_one_name(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    one, two, other = start("sums", "stdio"), start("sums", "stdio") + " again", start("more", "stdio")
    with caplog.at_level(logging.WARNING):
        server = server_of(f"{one},{two},{other}")
    assert server.names() == ["sums", "more"]
    assert "two tool servers are called 'sums'" in caplog.text


def test_who_does_not_answer_is_named() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        server = MCPToolServer(connect_timeout_s=1.0)
        for address in (f"127.0.0.1:{port}", f"http://127.0.0.1:{port}/mcp"):
            with pytest.raises(ToolServerError, match=f"127.0.0.1:{port}.* did not answer"):
                asyncio.run(server.add_tool_server(address))
    with pytest.raises(ToolServerError, match="did not answer"):
        asyncio.run(server.add_tool_server("stdio:/no/such/program"))
    with pytest.raises(BadRequest, match="no address"):
        asyncio.run(server.add_tool_server("stdio:"))
    with pytest.raises(ToolServerError, match="there is no tool server 'x'; known: none"):
        server.get_tool_session("x")


def test_schemas_are_trimmed() -> None:
    given = {
        "title": "addArguments",
        "type": "object",
        "properties": {
            "title": {"title": "Title", "type": "string"},
            "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None, "title": "Maybe"},
            "either": {"anyOf": [{"type": "integer"}, {"type": "string"}, {"type": "null"}]},
            "kind": {"enum": [{"title": "kept"}], "default": 0},
        },
    }
    assert trimmed(given) == {
        "type": "object",
        "properties": {
            "title": {"type": "string"},
            "maybe": {"type": "integer"},
            "either": {"anyOf": [{"type": "integer"}, {"type": "string"}, {"type": "null"}]},
            "kind": {"enum": [{"title": "kept"}], "default": 0},
        },
    }
