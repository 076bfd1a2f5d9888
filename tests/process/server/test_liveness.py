"""Constraints under small budgets, and ones that are checked as values close, through the whole engine."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import jsonschema
import pytest

from runtime.api import Engine
from runtime.protocol.io_struct import GenerateReqInput

SCHEMAS: dict[str, Any] = {
    "uniqueItems": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True, "minItems": 2},
    "not": {"type": "string", "not": {"enum": ["", "a"]}},
    "if": {"if": {"type": "integer"}, "then": {"multipleOf": 7}, "else": {"type": "boolean"}},
    "contains": {"type": "array", "items": {"type": "integer", "maximum": 9}, "contains": {"const": 5}},
    "plain": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "tags": {"type": "array", "items": {"type": "string"}}},
        "required": ["name", "tags"],
    },
}
ROOM = 40  # more than the shortest whole output of any of them


def body(name: str, **params: Any) -> dict[str, Any]:
    sampling = {"json_schema": json.dumps(SCHEMAS[name]), "temperature": 1.5, **params}
    return {"text": "Answer: ", "sampling_params": sampling}


def ask(engine: Engine, name: str, **params: Any) -> Any:
    return asyncio.run(engine.submit(GenerateReqInput(**body(name, **params))))


def streamed(engine: Engine, name: str, **params: Any) -> list[str]:
    async def told() -> list[str]:
        request = GenerateReqInput(**body(name, **params), stream=True)
        return [event.text async for event in engine.stream(request)]

    return asyncio.run(told())


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("seed", range(3))
def test_every_output_parses_and_validates(engine: Engine, name: str, seed: int) -> None:
    result = ask(engine, name, seed=seed, max_new_tokens=ROOM)
    jsonschema.validate(json.loads(result.text), SCHEMAS[name])
    meta = result.meta
    assert meta["completion_tokens"] <= ROOM
    if meta["grammar"]["closed_by_budget"] or meta["completion_tokens"] < ROOM:
        assert meta["finish_reason"]["type"] == ("length" if meta["grammar"]["closed_by_budget"] else "stop")


def test_a_tiny_budget_is_enough_where_a_whole_output_fits(engine: Engine) -> None:
    closed = 0
    for tokens in range(16, 26):
        result = ask(engine, "plain", seed=tokens, max_new_tokens=tokens)
        jsonschema.validate(json.loads(result.text), SCHEMAS["plain"])
        closed += result.meta["grammar"]["closed_by_budget"]
    assert closed


def test_a_stream_of_one_token_ends_as_the_whole_does(engine: Engine) -> None:
    """The text that is looked for first, `\u00e9`, takes two tokens."""
    for seed in range(12):
        sampling = {"regex": "(\u00e9|ab|abab)", "max_new_tokens": 1, "temperature": 1.0, "seed": seed}
        asked = {"text": "Once", "sampling_params": sampling}
        whole = asyncio.run(engine.submit(GenerateReqInput(**asked)))

        async def last(asked: dict[str, Any]) -> Any:
            return [event async for event in engine.stream(GenerateReqInput(**asked, stream=True))][-1]

        assert asyncio.run(last(asked)).text == whole.text == "ab"


def test_where_none_fits_it_ends_by_length_and_says_so(engine: Engine) -> None:
    meta = ask(engine, "plain", seed=1, max_new_tokens=2).meta
    assert meta["finish_reason"]["type"] == "length"
    assert meta["grammar"]["closed_by_budget"] is False


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_stream_is_the_beginning_of_the_same_text_at_every_time(engine: Engine, name: str) -> None:
    for seed in range(2):
        texts = streamed(engine, name, seed=seed, max_new_tokens=ROOM)
        for before, after in itertools.pairwise(texts):
            assert after.startswith(before)
        jsonschema.validate(json.loads(texts[-1]), SCHEMAS[name])
        assert texts[-1] == ask(engine, name, seed=seed, max_new_tokens=ROOM).text
