"""Tools that the server runs for a response: a real model, real MCP servers, the openai SDK.

Where a test needs certain calls, a structural tag makes the model write just these.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from examples.pocket.tasks.tools import TOOLS, call_text
from runtime.config.serving.server import ServerConfig
from runtime.processes.pipeline.launch import Pipeline
from runtime.protocol.errors import BadRequest
from runtime.server.app import build_app
from runtime.server.openai.responses.tools import parsed
from runtime.server.worker import open_tool_server
from runtime.tools import ToolServer, ToolServerError

PEER = Path(__file__).with_name("weather_peer.py")
PATIENCE_S = 300.0
ASKED = "What is the weather in Lisbon?"
ANSWER = "The weather in Lisbon is sun with 21 degrees."
RESULT = {"degrees": 21, "sky": "sun"}
WEATHER: Any = {"type": "mcp", "server_label": "weather", "require_approval": "never"}
TIMER: Any = {"type": "function", **TOOLS["set_timer"]["function"]}
GREEDY: Any = {"model": "pocket", "temperature": 0}
Ask = Callable[..., Any]


@contextlib.contextmanager
def peer(name: str) -> Iterator[str]:
    """The URL of an MCP server."""
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        port = made.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(PEER), name, "streamable-http", str(port)])
    try:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with socket.socket() as made:
                if made.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("documents")
    (folder / "rivers.md").write_text("# Rivers\nThe Sarn runs through Ostrel.\n")
    return str(folder)


@pytest.fixture(scope="module")
def client_of(pipeline: Pipeline, serving: Any) -> Iterator[Callable[..., Any]]:
    """A client of a server with these options."""

    with contextlib.ExitStack() as ends:

        def made(**options: Any) -> openai.OpenAI:
            config = ServerConfig.of({"served_model_name": "pocket", **options})
            tools = asyncio.run(asyncio.wait_for(open_tool_server(config), PATIENCE_S))
            app = build_app(pipeline.manager, config, tools=tools)
            at = ends.enter_context(serving(app, config))
            client = openai.OpenAI(base_url=f"{at.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)
            return ends.enter_context(client)

        yield made


@pytest.fixture(scope="module")
def addresses() -> Iterator[str]:
    with peer("weather") as one, peer("other") as two:
        yield f"{one}, {two}"


@pytest.fixture(scope="module")
def client(client_of: Callable[..., openai.OpenAI], addresses: str) -> openai.OpenAI:
    return client_of(tool_server=addresses, tool_timeout_s=10.0, max_tool_calls=3)


@pytest.fixture(scope="module")
def stdio(client_of: Callable[..., openai.OpenAI]) -> openai.OpenAI:
    """Its MCP server is started for each response."""
    command = f"stdio:{sys.executable} {PEER} weather stdio"
    return client_of(tool_server=command, tool_timeout_s=PATIENCE_S, max_tool_calls=3)


@pytest.fixture(scope="module")
def demo(client_of: Callable[..., openai.OpenAI], documents: str) -> openai.OpenAI:
    return client_of(tool_server="demo", tool_documents=documents, tool_timeout_s=20.0)


def writes(*calls: tuple[str, dict[str, Any]]) -> Any:
    """The format of a reply that is these calls."""
    text = "\n".join(call_text(name, arguments) for name, arguments in calls)
    return {"format": {"type": "structural_tag", "format": {"type": "const_string", "value": text}}}


def streamed(client: openai.OpenAI, **words: Any) -> tuple[list[Any], Any]:
    """All events, and the response of the last. Places and ids agree with those of the response."""
    events = list(client.responses.create(stream=True, **words))
    assert [one.sequence_number for one in events] == list(range(len(events)))
    last = events[-1].response
    done = {one.output_index: one.item for one in events if one.type == "response.output_item.done"}
    assert [done[place].to_dict() for place in sorted(done)] == [one.to_dict() for one in last.output]
    added = {one.output_index: one.item.id for one in events if one.type == "response.output_item.added"}
    assert added == {place: one.id for place, one in enumerate(last.output)}
    return events, last


def test_a_call_is_run_and_answered(client: openai.OpenAI) -> None:
    words = {**GREEDY, "input": ASKED, "tools": [WEATHER]}
    made = client.responses.create(**words)
    assert (made.status, made.output_text) == ("completed", ANSWER)
    call, message = made.output
    assert (call.type, message.type) == ("mcp_call", "message")
    assert (call.name, call.server_label, json.loads(call.arguments)) == (
        "get_weather",
        "weather",
        {"city": "Lisbon"},
    )
    assert (json.loads(call.output or ""), call.error, call.status) == (RESULT, None, "completed")
    events, last = streamed(client, **words)
    assert [one.type for one in last.output] == ["mcp_call", "message"]
    assert last.output[0].output == call.output
    assert (last.output_text, last.usage) == (ANSWER, made.usage)
    kinds = [one.type for one in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.mcp_call.in_progress",
    ]  # fmt: skip
    ran = kinds.index("response.mcp_call.completed")
    assert kinds[ran - 1 : ran + 3] == [
        "response.mcp_call_arguments.done", "response.mcp_call.completed", "response.output_item.done",
        "response.output_item.added",
    ]  # fmt: skip
    pieces = [one.delta for one in events if one.type == "response.mcp_call_arguments.delta"]
    assert "".join(pieces) == call.arguments
    assert kinds[-1] == "response.completed"
    with client.responses.stream(**words) as stream:
        assert stream.get_final_response().output_text == ANSWER
    # The conversation goes on with what was found, kept here or by the client.
    more = "What is the weather in Oslo?"
    kept = client.responses.create(**{**words, "input": more, "previous_response_id": made.id})
    items = [{"role": "user", "content": ASKED}, *(one.to_dict() for one in made.output)]
    sent = client.responses.create(**{**words, "input": [*items, {"role": "user", "content": more}]})
    assert kept.usage is not None
    assert sent.usage is not None
    assert kept.output_text == sent.output_text
    assert kept.usage.input_tokens == sent.usage.input_tokens
    background = client.responses.create(background=True, **words)
    while background.status in ("queued", "in_progress"):
        background = client.responses.retrieve(background.id)
    assert background.output_text == ANSWER


@pytest.mark.parametrize(
    ("city", "told"),
    [
        ("Failtown", "the station is out of order"),
        ("Slowtown", "did not answer within 10 s"),
        ("Deathtown", "the tool 'get_weather' failed"),
    ],
)
def test_what_goes_wrong_is_a_result(request: Any, city: str, told: str) -> None:
    client = request.getfixturevalue("stdio" if city == "Deathtown" else "client")
    words = {**GREEDY, "input": ASKED, "tools": [WEATHER], "max_tool_calls": 2}
    calls = ("get_weather", {"city": city}), ("get_weather", {"city": "Oslo"})
    events, made = streamed(client, **words, text=writes(*calls))
    failed, after = made.output[:2]
    assert (failed.status, failed.output) == ("failed", None)
    assert told in failed.error
    assert len(failed.error.splitlines()) == 1
    assert json.loads(after.output) == RESULT, "a session connects anew"
    kinds = [one.type for one in events]
    assert kinds.count("response.mcp_call.failed") == kinds.count("response.mcp_call.completed") == 1
    # The model would go on for ever.
    assert [one.status for one in made.output[2:]] == ["incomplete", "incomplete"]
    assert (made.status, made.incomplete_details.reason) == ("incomplete", "max_tool_calls")


def test_what_a_tool_keeps_is_the_response_s(stdio: openai.OpenAI) -> None:
    words = {**GREEDY, "input": ASKED, "tools": [WEATHER]}
    text = writes(("get_weather", {"city": "Oslo"}), ("get_weather", {"city": "Memory"}))
    for _ in range(2):
        made = stdio.responses.create(**words, text=text)
        assert made.output[1].output == "Oslo, Memory"
        # Of four calls the server allows three.
        assert [one.status for one in made.output] == ["completed"] * 3 + ["incomplete"]


def test_long_results_are_cut(client: openai.OpenAI) -> None:
    words = {**GREEDY, "input": ASKED, "tools": [WEATHER], "max_tool_calls": 1}
    made = client.responses.create(**words, text=writes(("get_weather", {"city": "Longtown"})))
    output = made.output[0].output
    assert output.endswith("[cut: 250000 characters]")
    assert len(output) < 5000
    assert made.status == "incomplete"


def test_arguments_that_are_none(client: openai.OpenAI) -> None:
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"town": 1}}\n</tool_call>'
    form = {"format": {"type": "structural_tag", "format": {"type": "const_string", "value": text}}}
    made = client.responses.create(**GREEDY, input=ASKED, tools=[WEATHER], max_tool_calls=1, text=form)
    assert made.output[0].status == "failed"
    assert "city" in made.output[0].error


def test_the_client_s_functions_beside_them(client: openai.OpenAI) -> None:
    words = {**GREEDY, "input": ASKED, "tools": [WEATHER, TIMER]}
    calls = ("get_weather", {"city": "Oslo"}), ("set_timer", {"minutes": 3})
    _, made = streamed(client, **words, text=writes(*calls))
    assert (made.status, [one.type for one in made.output]) == ("completed", ["mcp_call", "function_call"])
    assert made.output[0].status == "completed"
    result = {"type": "function_call_output", "call_id": made.output[1].call_id, "output": '{"status": "ok"}'}
    words |= {"input": [result], "max_output_tokens": 48}
    after = client.responses.create(**words, previous_response_id=made.id)
    assert after.output_text
    assert after.usage.input_tokens > made.usage.input_tokens


def test_choices(client: openai.OpenAI) -> None:
    words = {**GREEDY, "input": "Good morning!", "tools": [WEATHER, TIMER], "max_tool_calls": 1}
    named = {"type": "mcp", "server_label": "weather", "name": "get_weather"}
    for choice in (named, {"type": "mcp", "server_label": "weather"}):
        made = client.responses.create(**words, tool_choice=choice, parallel_tool_calls=False)
        assert made.output[0].type == "mcp_call"
        # The choice was for the first generation: the model may answer now.
        assert made.output[0].status == "completed"
    allowed = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "mcp", "server_label": "weather"}],
    }
    made = client.responses.create(**words, tool_choice=allowed, parallel_tool_calls=False)
    assert (made.output[0].type, made.output[0].status) == ("mcp_call", "completed")
    none = client.responses.create(**words, tool_choice="none")
    assert [one.type for one in none.output] == ["message"]
    limited = client.responses.create(**words, tool_choice=named, max_output_tokens=4)
    assert (limited.status, limited.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    whole = client.responses.create(**GREEDY, input=ASKED, tools=[WEATHER])
    exact = whole.usage.output_tokens
    again = client.responses.create(**GREEDY, input=ASKED, tools=[WEATHER], max_output_tokens=exact - 2)
    assert again.incomplete_details.reason == "max_output_tokens"
    assert again.usage.output_tokens == exact - 2, "the limit is that of all generations together"


@pytest.mark.parametrize(
    ("tools", "param", "told"),
    [
        ([{**WEATHER, "server_label": "x"}], "tools[0].server_label", "of tool servers: weather, other"),
        ([{"type": "mcp"}], "tools[0].server_label", "is missing"),
        ([{"type": "web_search"}], "tools[0]", "'web_search' is not available"),
        ([{"type": "file_search"}], "tools[0]", "'file_search' is not available"),
        ([{**WEATHER, "server_url": "http://x/mcp"}], "tools[0].server_url", "configured at startup"),
        ([{**WEATHER, "require_approval": "always"}], "tools[0].require_approval", "not supported"),
        ([{**WEATHER, "allowed_tools": ["f"]}], "tools[0].allowed_tools", "it has get_weather"),
        ([WEATHER, WEATHER], "tools[1]", "two tools are called 'get_weather'"),
        ([WEATHER, {**WEATHER, "server_label": "other"}], "tools[1]", "one of weather, one of other"),
        ([WEATHER, {**TIMER, "name": "get_weather"}], "tools[1]", "one of the request's functions"),
    ],
)
def test_what_is_wrong_is_told(client: openai.OpenAI, tools: Any, param: str, told: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**GREEDY, input=ASKED, tools=tools)
    assert caught.value.param == param
    assert told in caught.value.message


def test_wrong_choices_and_limits(client: openai.OpenAI) -> None:
    words = {**GREEDY, "input": ASKED, "tools": [WEATHER]}
    for more, param in (
        ({"tool_choice": {"type": "mcp", "server_label": "other"}}, "tool_choice"),
        ({"tool_choice": {"type": "code_interpreter"}}, "tool_choice"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(**words, **more)
        assert caught.value.param == param
    empty = {**WEATHER, "allowed_tools": ["get_weather"], "headers": None, "defer_loading": False}
    assert client.responses.create(**{**words, "tools": [empty]}).output_text == ANSWER


def test_python_and_a_browser(demo: openai.OpenAI) -> None:
    words = {**GREEDY, "input": "Good morning!", "max_tool_calls": 1}
    code = writes(("python", {"code": "print(6 * 7)"}))
    tool: Any = {"type": "code_interpreter", "container": {"type": "auto"}}
    events, made = streamed(demo, **words, tools=[tool], text=code)
    ran = made.output[0]
    assert (ran.type, ran.code, ran.status) == ("code_interpreter_call", "print(6 * 7)", "completed")
    [logs] = ran.outputs
    if "cannot lock code in" not in logs.logs:
        assert logs.logs == "42\n"
    kinds = [one.type.removeprefix("response.code_interpreter_call") for one in events]
    told = [kind for kind in kinds if kind.startswith(("_", "."))]
    assert told[:5] == [".in_progress", "_code.delta", "_code.done", ".interpreting", ".completed"]
    looked = writes(("search", {"query": "Ostrel"}), ("open", {"id": 0}), ("find", {"pattern": "Sarn"}))
    words["max_tool_calls"] = 3
    events, made = streamed(demo, **words, tools=[{"type": "web_search"}], text=looked)
    assert [one.action.type for one in made.output[:3]] == ["search", "open_page", "find_in_page"]
    assert {one.status for one in made.output[:3]} == {"completed"}
    kinds = [one.type for one in events]
    at = kinds.index("response.web_search_call.searching")
    assert kinds[at + 1 : at + 3] == ["response.web_search_call.completed", "response.output_item.done"]
    # The same tools, as those of a server: what they found is there to read.
    spaces: Any = [{"type": "mcp", "server_label": "browser"}, {"type": "mcp", "server_label": "python"}]
    made = demo.responses.create(**words, tools=spaces, text=looked)
    assert [one.type for one in made.output[:3]] == ["mcp_call"] * 3
    assert "L1: The Sarn runs through Ostrel." in made.output[2].output
    with pytest.raises(openai.BadRequestError, match="none is kept"):
        demo.responses.create(**GREEDY, input="x", tools=[{**tool, "container": "cntr_1"}])


def test_without_a_tool_server(client_of: Callable[..., openai.OpenAI]) -> None:
    with pytest.raises(openai.BadRequestError, match="--tool-server"):
        client_of().responses.create(**GREEDY, input=ASKED, tools=[WEATHER])


def test_arguments() -> None:
    assert parsed("") == parsed("{}") == {}
    assert parsed('{"a": "\\ud83d\\ude0b"}') == {"a": "\U0001f60b"}
    for text in ("[1]", "{", '{"a": "\\ud83d"}', "[" * 100_000, f'{{"a": {"1" * 5000}}}'):
        assert parsed(text) is None


def test_options() -> None:
    def opened(**options: Any) -> ToolServer | None:
        return asyncio.run(open_tool_server(ServerConfig.of(options)))

    assert opened() is None
    for options, told in (
        ({"tool_server": " , "}, "is empty"),
        ({"tool_documents": "."}, "needs --tool-server demo"),
        ({"tool_server": "demo", "tool_documents": "/no/such"}, "there is no folder"),
        ({"tool_server": "stdio:'"}, "is no command"),
        ({"tool_timeout_s": 0}, "positive"),
        ({"max_tool_calls": 0}, "at least 1"),
    ):
        with pytest.raises(BadRequest, match=told):
            opened(**options)
    with pytest.raises(ToolServerError, match=r"127\.0\.0\.1:1 did not answer"):
        opened(tool_server="127.0.0.1:1")
