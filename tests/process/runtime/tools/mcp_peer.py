"""A real MCP server for tests: python mcp_peer.py NAME TRANSPORT [PORT]."""

from __future__ import annotations

import os
import sys
import time

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

name, transport, *port = sys.argv[1:]
server = MCPServer(name, instructions="Sums, and what goes wrong.")
calls = 0


@server.tool(description="Adds two numbers")
def add(a: int, b: int = 1, note: str | None = None) -> str:
    return f"{a + b}"


@server.tool()
def fail() -> str:
    raise ToolError("the disk is full")


@server.tool()
def slow(seconds: float) -> str:
    time.sleep(seconds)
    return "at last"


@server.tool()
def die() -> str:
    os._exit(3)


@server.tool()
def count() -> str:
    global calls
    calls += 1
    return str(calls)


@server.tool(meta={"include_in_prompt": False})
def hidden() -> str:
    return "seen"


if __name__ == "__main__":
    if transport == "stdio":
        server.run("stdio")
    else:
        server.run(transport, port=int(port[0]))
