"""Tool servers of real processes: named on the command line, called for the openai SDK, gone in the end."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import psutil

from examples.pocket.tasks.tools import call_text
from tests.process.patience import PATIENCE_S, until

PEER = Path(__file__).parents[2] / "process" / "runtime" / "server" / "openai" / "weather_peer.py"
TOOL: Any = {"type": "mcp", "server_label": "weather"}
WORDS: Any = {"model": "pocket", "temperature": 0, "input": "What is the weather in Lisbon?", "tools": [TOOL]}


def test_a_server_that_is_started_for_each_response(start_server: Callable[..., Any]) -> None:
    command = f"stdio:{sys.executable} {PEER} weather stdio"
    server = start_server("--tool-server", command, "--tool-timeout-s", str(PATIENCE_S)).wait_ready()
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
    ) as client:
        made = client.responses.create(**WORDS)
        assert [one.type for one in made.output] == ["mcp_call", "message"]
        assert json.loads(made.output[0].output) == {"degrees": 21, "sky": "sun"}  # type: ignore[union-attr, arg-type]
        assert made.output_text == "The weather in Lisbon is sun with 21 degrees."
        assert running(server) == []

        # A client that leaves in the middle of a call takes the call with it.
        tag = {"type": "const_string", "value": call_text("get_weather", {"city": "Slowtown"})}
        form: Any = {"format": {"type": "structural_tag", "format": tag}}
        with client.responses.create(stream=True, text=form, **WORDS) as events:
            for one in events:
                if one.type == "response.mcp_call_arguments.done":
                    break
            until(lambda: running(server), lambda: server.log)
        until(lambda: not running(server), lambda: server.log)
    server.children()
    assert server.end() == 0


def running(server: Any) -> list[psutil.Process]:
    """The MCP servers that it started."""
    found = []
    for one in psutil.Process(server.process.pid).children(recursive=True):
        try:
            if str(PEER) in one.cmdline() and one.status() != psutil.STATUS_ZOMBIE:
                found.append(one)
        except psutil.Error:
            continue
    return found


def test_one_that_does_not_answer_ends_the_start(start_server: Callable[..., Any]) -> None:
    server = start_server("--tool-server", "127.0.0.1:1")
    assert server.process.wait(PATIENCE_S) != 0
    assert "the tool server 127.0.0.1:1 did not answer" in server.log
    assert "Traceback" not in server.log
