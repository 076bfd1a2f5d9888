"""Outputs sampled at a high temperature under the constraint of a format: all are calls of allowed tools."""

from __future__ import annotations

import json
import os

import jsonschema
import pytest

from examples.pocket.tasks.tools import TOOLS
from runtime.api import Engine
from runtime.formats.tools import FunctionCallParser
from runtime.formats.tools.constraints import structure_constraint
from runtime.formats.tools.parser import detector_of
from runtime.formats.tools.types import tools_of

OFFERED = tools_of(TOOLS.values())
NAMED = OFFERED[0].name
KEYS = ["qwen25", "qwen3_coder", "deepseekv32", "pythonic", "gemma4"]
"""One of each shape; the first is the bundled checkpoint's own."""
COUNT = int(os.environ.get("SAMPLED_CALLS", "20"))
PROMPT = "<|im_start|>user\nGood morning!<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("count", [COUNT])
def test_they_are_calls_of_allowed_tools(engine: Engine, count: int) -> None:
    batch = count // (2 * len(KEYS))
    for number, key in enumerate(KEYS):
        for choice in ("required", f"={NAMED}"):
            parallel = choice == "required"
            made = structure_constraint(detector_of(key), OFFERED, choice, parallel)
            assert made is not None
            params = [
                {"temperature": 1.5, "max_new_tokens": 160, made.kind: json.dumps(made.spec), "seed": seed}
                for seed in range(number * 10_000, number * 10_000 + batch)
            ]
            for output in engine.generate([PROMPT] * batch, params):
                content, calls = FunctionCallParser(OFFERED, made.key or key).parse_non_stream(output.text)
                assert not content.strip(), (key, output.text)
                assert calls, (key, output.text)
                assert parallel or [call.name for call in calls] == [NAMED], (key, output.text)
                for call in calls:
                    tool = next(one for one in OFFERED if one.name == call.name)
                    jsonschema.validate(json.loads(call.parameters), dict(tool.parameters))
