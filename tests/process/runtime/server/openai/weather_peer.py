"""A real MCP server for tests: python weather_peer.py NAME TRANSPORT [PORT]."""

from __future__ import annotations

import asyncio
import json
import os
import sys

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

name, transport, *port = sys.argv[1:]
server = MCPServer(name)
asked: list[str] = []


@server.tool(description="Weather of a city")
async def get_weather(city: str) -> str:
    asked.append(city)
    match city:
        case "Failtown":
            raise ToolError("the station is out of order")
        case "Slowtown":
            await asyncio.sleep(600)
        case "Deathtown":
            os._exit(3)
        case "Longtown":
            return "rain " * 50_000
        case "Memory":
            return ", ".join(asked)
    return json.dumps({"degrees": 21, "sky": "sun"})


if __name__ == "__main__":
    if transport == "stdio":
        server.run("stdio")
    else:
        server.run(transport, port=int(port[0]))
