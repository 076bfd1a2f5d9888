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

from tests.e2e.patience import PROGRAM_S

SCRIPT = """
import asyncio, json, sys
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
    ("length", {"model": "openai/pocket", "messages": [{"role": "user", "content": "river " * 4000}]}),
):
    try:
        litellm.completion(**{**words, **there, **change})
    except Exception as error:
        told["errors"][name] = [type(error).__name__, str(error)]
print("told " + json.dumps(told))
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
        [sys.executable, "-c", SCRIPT, shared_server.url],
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


def test_vectors(told: dict[str, Any]) -> None:
    assert told["vectors"] == [192, 192]


def test_errors(told: dict[str, Any]) -> None:
    kinds = {name: kind for name, (kind, _) in told["errors"].items()}
    assert kinds == {
        "model": "NotFoundError",
        "value": "BadRequestError",
        "length": "ContextWindowExceededError",
    }
    assert "'nope' does not exist" in told["errors"]["model"][1]
    assert "temperature must be" in told["errors"]["value"][1]
    assert "the context length is 2048" in told["errors"]["length"][1]
