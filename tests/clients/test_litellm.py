"""litellm against the real processes. It runs in a process of its own: it leaves sockets and loops open, and
reads its settings from the environment when it is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from examples.pocket.tasks.tools import TOOLS
from tests.process.patience import PROGRAM_S
from tests.process.tools.weather import ANSWER, BAD_SCHEMA_TOLD

SCRIPT = """
import asyncio, faulthandler, json, os, sys
faulthandler.dump_traceback_later(120, exit=True)  # should it hang: where
import litellm

url = sys.argv[1]
asked = [{"role": "user", "content": "Which river runs through Ostrel?"}]
words = {"messages": asked, "temperature": 0, "max_tokens": 24}
there = {"api_base": url + "/v1", "api_key": "none", "num_retries": 0, "timeout": 300}
told = {}

done = litellm.completion("openai/pocket", **words, **there)
told["whole"] = done.choices[0].message.content
told["finish"] = done.choices[0].finish_reason
told["usage"] = [done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens]
options = {"stream": True, "stream_options": {"include_usage": True}}
chunks = list(litellm.completion("openai/pocket", **options, **words, **there))
told["pieces"] = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
usage = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
told["streamed_usage"] = [usage[-1].prompt_tokens, usage[-1].completion_tokens, usage[-1].total_tokens]
told["hosted_vllm"] = litellm.completion("hosted_vllm/pocket", **words, **there).choices[0].message.content
told["asynchronous"] = asyncio.run(
    litellm.acompletion("openai/pocket", **words, **there)
).choices[0].message.content
tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
shown = litellm.completion("openai/pocket", tools=[tool], tool_choice="auto", **words, **there)
told["with_tools"] = shown.usage.prompt_tokens
tools = json.loads(sys.argv[2])
question = [{"role": "user", "content": "What is the weather in Lisbon?"}]
greedy = {"temperature": 0, "max_tokens": 120, "tools": tools}
for name, model, where in (
    ("openai", "openai/pocket", there),
    ("hosted_vllm", "hosted_vllm/pocket", there),
    ("responses", "openai/responses/pocket", there),
    ("anthropic", "anthropic/pocket", {"api_base": url, "api_key": "none"}),
):
    # Over responses it asks models that it does not know for the whole, and makes up a stream of it, in which
    # the arguments come twice.
    for stream in (False, True)[: 1 if name == "responses" else 2]:
        def said(messages):
            reply = litellm.completion(model, messages=messages, stream=stream, **greedy, **where)
            return (litellm.stream_chunk_builder(list(reply)) if stream else reply).choices[0]
        asked_for = said(question)
        [call] = asked_for.message.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "content": '{"degrees": 21, "sky": "sun"}'}
        answer = said([*question, asked_for.message, result])
        told.setdefault("calls", {})[f"{name} {stream}"] = [
            asked_for.finish_reason, call.function.name, json.loads(call.function.arguments),
            answer.message.content,
        ]
vectors = litellm.embedding("openai/pocket", input=["a river", "b"], **there)
told["vectors"] = [len(one["embedding"]) for one in vectors.data]
completed = litellm.text_completion(
    model="text-completion-openai/pocket", prompt="The Queen", max_tokens=4, temperature=0, **there
)
told["completed"] = completed.choices[0].text
told["anthropic"] = litellm.completion(
    "anthropic/pocket", messages=asked, max_tokens=24, api_base=url, api_key="none"
).choices[0].message.content
told["errors"] = {}
for name, change in (
    ("model", {"model": "openai/nope"}),
    ("value", {"model": "openai/pocket", "temperature": -1}),
    ("tool", {"model": "openai/pocket", "tools": [
        {"type": "function", "function": {"name": "f", "parameters": {"type": "town"}}}]}),
    ("length", {"model": "openai/pocket", "messages": [{"role": "user", "content": "river " * 4000}]}),
):
    try:
        litellm.completion(**{**words, **there, **change})
    except Exception as error:
        told["errors"][name] = [type(error).__name__, str(error)]
print("told " + json.dumps(told), flush=True)
os._exit(0)  # what it leaves open may hold up the interpreter's end
"""


@pytest.fixture(scope="module")
def told(shared_server: Any) -> dict[str, Any]:
    environment = {
        **os.environ,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # the table that it brings along, instead of one it fetches
        "LITELLM_LOG": "ERROR",
        "NO_PROXY": "127.0.0.1",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, shared_server.url, json.dumps([TOOLS["get_weather"]])],
        capture_output=True, text=True, timeout=PROGRAM_S, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("told ")]
    found: dict[str, Any] = json.loads(line.removeprefix("told "))
    return found


def test_completions(told: dict[str, Any]) -> None:
    assert told["whole"]
    assert told["finish"] == "stop"
    assert "".join(told["pieces"]) == told["whole"]
    assert told["usage"] == told["streamed_usage"]
    assert told["hosted_vllm"] == told["asynchronous"] == told["anthropic"] == told["whole"]
    assert told["with_tools"] > told["usage"][0]
    assert told["completed"]


def test_a_call_its_result_and_an_answer(told: dict[str, Any]) -> None:
    assert len(told["calls"]) == 7
    for way, found in told["calls"].items():
        assert found == ["tool_calls", "get_weather", {"city": "Lisbon"}, ANSWER], way


def test_vectors(told: dict[str, Any]) -> None:
    assert told["vectors"] == [192, 192]


def test_errors(told: dict[str, Any]) -> None:
    kinds = {name: kind for name, (kind, _) in told["errors"].items()}
    assert kinds == {
        "model": "NotFoundError",
        "value": "BadRequestError",
        "tool": "BadRequestError",
        "length": "ContextWindowExceededError",
    }
    assert "'nope' does not exist" in told["errors"]["model"][1]
    assert "temperature must be" in told["errors"]["value"][1]
    assert BAD_SCHEMA_TOLD in told["errors"]["tool"][1]
    assert "the context length is 2048" in told["errors"]["length"][1]
