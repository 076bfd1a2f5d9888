"""Programs whose tools are those of a real MCP server."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import sglang_dsl as sgl
from runtime.tools import MCPToolServer, ToolServerError
from sglang_dsl.conversation.requests import Completion
from tests.process.patience import PATIENCE_S

PEER = Path(__file__).parents[2] / "process" / "runtime" / "tools" / "mcp_peer.py"
ADDRESS = f"stdio:{sys.executable} {PEER} sums stdio"


def calls(*made: tuple[str, Any]) -> Completion:
    told = [
        {"id": f"id{at}", "name": name, "arguments": json.dumps(said)} for at, (name, said) in enumerate(made)
    ]
    return Completion(("",), {"tool_calls": told})


@sgl.function
def ask(s: Any, tools: Any) -> None:
    s += sgl.tools(tools)
    s += sgl.user("Add")
    with s.tool_loop(timeout=PATIENCE_S):
        s += sgl.assistant(sgl.gen("answer"))


@pytest.mark.parametrize("by_address", [True, False])
def test_tools_of_a_server_are_called(by_address: bool) -> None:
    server = MCPToolServer(PATIENCE_S, PATIENCE_S)
    if not by_address:
        asyncio.run(server.add_tool_server(ADDRESS))
    replies = [
        calls(("count", {}), ("add", {"a": 2, "b": 3})),
        calls(("count", {}), ("fail", {}), ("add", {"a": "x"})),
        "ok",
    ]
    backend = sgl.MockBackend(replies)
    state = ask.run([ADDRESS if by_address else server], backend=backend)
    told = [turn["content"] for turn in state.messages() if turn["role"] == "tool"]
    assert told[:3] == ["1", "5", "2"]  # one session for the whole generation
    assert told[3].startswith("Error: ")
    assert "the disk is full" in told[3]
    assert "'x' is not of type 'integer'" in told[4]
    names = [tool["function"]["name"] for tool in backend.calls[0].prompt.tools]
    assert names == ["add", "fail", "slow", "die", "count"]


def test_a_server_that_is_not_there_is_told_at_once() -> None:
    with pytest.raises(ToolServerError):
        sgl.tools("stdio:/nowhere/at/all")


def test_pocket_calls_a_tool_of_a_server(backend: Any, tmp_path: Path) -> None:
    peer = tmp_path / "peer.py"
    peer.write_text(
        "from mcp.server import MCPServer\n"
        "server = MCPServer('weather')\n"
        "@server.tool(description='Weather of a city')\n"
        "def get_weather(city: str) -> dict[str, str | int]:\n"
        "    return {'degrees': 21, 'sky': 'sun'}\n"
        "server.run('stdio')\n"
    )

    @sgl.function(temperature=0, max_tokens=80)
    def program(s: Any) -> None:
        s += sgl.tools([f"stdio:{sys.executable} {peer}"])
        s += sgl.user("What is the weather in Lisbon?")
        with s.tool_loop(timeout=PATIENCE_S):
            s += sgl.assistant(sgl.gen("answer"))

    state = program.run(backend=backend)
    assert state["answer"] == "The weather in Lisbon is sun with 21 degrees."
