"""Pocket calls tools out of programs, gets what they give, and answers with it: the same program in this
process, on a server, and through the backends for OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import jsonschema
import pytest

import sglang_dsl as sgl
from examples.pocket.tasks.tools import TOOLS
from sglang_dsl.backends.anthropic import Anthropic
from sglang_dsl.backends.engine import EngineBackend
from sglang_dsl.backends.openai import OpenAI

GIVES: dict[str, dict[str, Any]] = {
    "Lisbon": {"degrees": 21, "sky": "sun"},
    "Oslo": {"degrees": 3, "sky": "snow"},
    "Madrid": {"degrees": 12, "sky": "fog"},
}
SAYS = {
    city: f"The weather in {city} is {one['sky']} with {one['degrees']} degrees."
    for city, one in GIVES.items()
}


def get_weather(city: str) -> dict[str, Any]:
    """Weather of a city"""
    return GIVES[city]


def set_timer(minutes: int) -> dict[str, str]:
    """Set a timer"""
    return {"status": "ok"}


def send_message(to: str, text: str) -> dict[str, str]:
    """Send a message to a person"""
    raise ConnectionError("the line is down")


@sgl.function(temperature=0, max_tokens=80)
def ask(s: Any, question: str, tools: Any = (get_weather, set_timer), **words: Any) -> Any:
    s += sgl.tools(tools)
    s += sgl.user(question)
    with s.tool_loop(**words) as loop:
        s += sgl.assistant(sgl.gen("answer"))
    return loop


NAMES = [
    "engine",
    "endpoint",
    "openai",
    "anthropic",
    pytest.param("litellm", marks=pytest.mark.skipif(find_spec("litellm") is None, reason="no litellm")),
]


@pytest.fixture(scope="module")
def backends(engine: Any, shared_server: Any) -> dict[str, Callable[[], Any]]:
    url = shared_server.url
    return {
        "engine": lambda: EngineBackend(engine),
        "endpoint": lambda: sgl.RuntimeEndpoint(url),
        "openai": lambda: OpenAI("pocket", base_url=f"{url}/v1", api_key="none"),
        "anthropic": lambda: Anthropic("pocket", base_url=url, api_key="none"),
        "litellm": lambda: sgl.LiteLLM("openai/pocket", base_url=f"{url}/v1", api_key="none"),
    }


def test_the_tools_are_those_that_pocket_was_taught() -> None:
    for tool, text in zip((get_weather, set_timer), sgl.tools([get_weather, set_timer]).tools, strict=True):
        assert json.loads(text) == TOOLS[tool.__name__]


@pytest.mark.parametrize("name", NAMES)
def test_a_call_its_result_and_an_answer(name: str, backends: dict[str, Callable[[], Any]]) -> None:
    backend = backends[name]()
    state = ask.run("What is the weather in Lisbon?", backend=backend)
    assert state["answer"] == SAYS["Lisbon"]
    [call] = state.tool_calls("answer")
    assert (call.name, call.arguments, json.loads(call.result or "")) == (
        "get_weather", {"city": "Lisbon"}, GIVES["Lisbon"],
    )  # fmt: skip
    assert [turn["role"] for turn in state.messages()] == ["user", "assistant", "tool", "assistant"]
    stream = ask.stream("What is the weather in Oslo?", backend=backend)
    assert "".join(stream.text_iter("answer")) == SAYS["Oslo"]
    stream.sync()
    assert json.loads(stream.tool_calls("answer")[0].result or "") == GIVES["Oslo"]


@pytest.mark.parametrize("name", NAMES)
def test_turns_go_on_behind_calls(name: str, backends: dict[str, Callable[[], Any]]) -> None:
    @sgl.function(temperature=0, max_tokens=80)
    def chat(s: Any) -> None:
        s += sgl.tools([get_weather, set_timer])
        with s.tool_loop():
            for at, city in enumerate(("Lisbon", "Oslo")):
                s += sgl.user(f"What is the weather in {city}?")
                s += sgl.assistant(sgl.gen(f"said_{at}"))
        s += sgl.user("Set a timer for 12 minutes.")
        s += sgl.assistant(sgl.gen("left"))
        s += sgl.tool('{"status": "ok"}')
        s += sgl.assistant(sgl.gen("end"))

    state = chat.run(backend=backends[name]())
    assert (state["said_0"], state["said_1"]) == (SAYS["Lisbon"], SAYS["Oslo"])
    [left] = state.tool_calls("left")
    assert (left.name, left.arguments, left.result) == ("set_timer", {"minutes": 12}, None)
    assert state["end"] == "The timer is set for 12 minutes."


@pytest.mark.parametrize("name", NAMES)
def test_a_named_tool_is_called_whatever_was_said(name: str, backends: dict[str, Callable[[], Any]]) -> None:
    state = ask.run(
        "Good morning!", tools=(get_weather, set_timer), tool_choice="set_timer", backend=backends[name]()
    )
    [call, *_] = state.tool_calls("answer")
    assert call.name == "set_timer"
    jsonschema.validate(dict(call.arguments), TOOLS["set_timer"]["function"]["parameters"])


@pytest.mark.parametrize("name", NAMES)
def test_a_tool_that_fails(name: str, backends: dict[str, Callable[[], Any]]) -> None:
    question = "Tell Anna that dinner is ready."
    state = ask.run(question, tools=(send_message,), max_steps=20, backend=backends[name]())
    state.error()  # whatever the model makes of it
    [step, *_] = state.ret_value.steps
    assert step.calls[0].result == "Error: ConnectionError: the line is down"
    with pytest.raises(sgl.ToolError, match="the line is down") as caught:
        ask.run(question, tools=(send_message,), on_error="raise", backend=backends[name]())["answer"]
    assert isinstance(caught.value.__cause__, ConnectionError)


@pytest.mark.parametrize("name", ["engine", "endpoint"])
def test_calls_are_kept_to_their_schemas_at_any_temperature(
    name: str, backends: dict[str, Callable[[], Any]]
) -> None:
    """With the tools alone, without a loop: what the model writes as calls is well formed."""

    @sgl.function(temperature=1.5, max_tokens=120)
    def call(s: Any, question: str, choice: str) -> None:
        s += sgl.tools([sgl.Tool(**_schema(one)) for one in TOOLS.values()])
        s += sgl.user(question)
        with s.tool_loop(tool_choice=choice):
            s += sgl.assistant(sgl.gen("answer"))

    asked = [
        {"question": q, "choice": c} for q in ("Good morning!", "Weather?") for c in ("required", *TOOLS)
    ]
    called = 0
    for given, state in zip(asked, call.run_batch(asked, backend=backends[name](), seed=3), strict=True):
        made = state.tool_calls("answer")
        cut = state.get_meta_info("answer")["finish_reason"]["type"] == "length"
        assert bool(made) is not cut
        called += len(made)
        for one in made:
            assert one.name == given["choice"] or given["choice"] == "required"
            if json.loads(one.text) is not None:
                jsonschema.validate(dict(one.arguments), TOOLS[one.name]["function"]["parameters"])
    assert called


@pytest.mark.parametrize("name", NAMES)
def test_a_call_that_the_budget_ends_is_not_run(name: str, backends: dict[str, Callable[[], Any]]) -> None:
    """Though the engine could complete it with values of its own."""
    ran: list[str] = []

    def send_message(to: str, text: str, greeting: str, end: str) -> str:
        """Send a message to a person"""
        ran.append(text)
        return "sent"

    question = "Tell Anna that dinner is ready."
    words = {"tools": (send_message,), "tool_choice": "send_message", "parallel": False, "max_tokens": 40}
    state = ask.run(question, backend=backends[name](), **words)
    assert state.get_meta_info("answer")["finish_reason"]["type"] == "length"
    assert "send_message" in state["answer"]
    assert (ran, state.tool_calls("answer"), state.ret_value.steps) == ([], [], [])


def _schema(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool["function"]
    return {key: function[key] for key in ("name", "description", "parameters")}


def test_branches_and_batches_call_side_by_side(backends: dict[str, Callable[[], Any]]) -> None:
    """The tools of three branches wait for each other."""
    met: set[str] = set()

    async def get_weather(city: str) -> dict[str, Any]:
        """Weather of a city"""
        met.add(city)
        while len(met) < 3:
            await asyncio.sleep(0.01)
        return GIVES[city]

    @sgl.function(temperature=0, max_tokens=80)
    async def compare(s: Any) -> Any:
        s += sgl.tools([get_weather])
        with s.tool_loop():
            async with s.fork(3) as forks:
                for fork, city in zip(forks, GIVES, strict=True):
                    fork += sgl.user(f"What is the weather in {city}?")
                    fork += sgl.assistant(sgl.gen("answer"))
        return await s["answer"]

    async def main() -> Any:
        return (await compare(backend=backends["engine"]())).ret_value

    assert asyncio.run(main()) == list(SAYS.values())
    states = ask.run_batch(
        [{"question": f"What is the weather in {city}?"} for city in GIVES], backend=backends["endpoint"]()
    )
    assert [state["answer"] for state in states] == list(SAYS.values())
