"""process/programs/test_integrations.py, at length."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.process.programs.test_integrations import RIVER, _run
from tests.process.tools.weather import ANSWER

DSPY = """
import asyncio, json, sys
import dspy
from dspy import lm15
from dspy.streaming import StreamListener
from sglang_dsl import Engine
from sglang_dsl.integrations import dspy_lm

class Read(dspy.Signature):
    "Extract city as JSON."
    text: str = dspy.InputField()
    city: str = dspy.OutputField()
    floor: int = dspy.OutputField()

told = {}
with Engine("pocket", dtype="float32", max_total_tokens=8192) as engine:
    lm = dspy_lm(engine, temperature=0.0, max_tokens=60)
    dspy.configure(lm=lm, adapter=dspy.JSONAdapter())
    told["text"] = lm("Which river runs through Ostrel?")[0]
    read = dspy.Predict(Read)
    told["read"] = dict(read(text="Anna lives in Lisbon."))
    told["async"] = dict(asyncio.run(read.acall(text="Anna lives in Lisbon.")))
    tool = lm15.FunctionTool("get_weather", "Weather of a city", {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]})
    asked = lm15.Request(
        model=lm.model, messages=(lm15.Message.user("What is the weather in Lisbon?"),), tools=(tool,))
    called = lm(asked)
    [call] = called.message.parts
    told["call"] = [call.name, call.input, called.finish_reason, called.usage.input_tokens > 100]
    result = lm15.Message(role="tool", parts=(
        lm15.ToolResultPart(call.id, (lm15.TextPart('{"degrees": 21, "sky": "sun"}'),)),))
    told["answer"] = lm(lm15.Request(
        model=lm.model, messages=(*asked.messages, called.message, result), tools=(tool,))).text
    async def stream():
        made = dspy.streamify(read, stream_listeners=[StreamListener(signature_field_name="city")])
        return [one.chunk async for one in made(text="Anna lives in Lisbon.") if hasattr(one, "chunk")]
    told["pieces"] = asyncio.run(stream())
    try:
        form = lm15.Config(response_format={"type": "json_object"})
        lm(lm15.Request(model=lm.model, messages=asked.messages, tools=(tool,), config=form))
    except Exception as error:
        told["error"] = [type(error).__name__, str(error)]
print(json.dumps(told))
"""


def test_dspy(tmp_path: Path) -> None:
    """In a process of its own: it takes seconds to import, and keeps a cache on disk open."""
    pytest.importorskip("dspy", reason="dspy is not installed (the extra `dspy`)")
    told = json.loads(_run(DSPY, DSPY_CACHEDIR=str(tmp_path)))
    assert told["text"] == RIVER
    assert type(told["read"]["floor"]) is int
    assert told["read"] == told["async"]
    assert told["call"] == ["get_weather", {"city": "Lisbon"}, "tool_call", True]
    assert told["answer"] == ANSWER
    assert told["read"]["city"] in "".join(told["pieces"])
    assert told["error"][0] == "LMInvalidRequestError"
    assert "cannot call tools" in told["error"][1]
