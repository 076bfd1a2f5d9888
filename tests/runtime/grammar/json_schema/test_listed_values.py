"""Lists of strings beside alternatives: worked out early, the language and its masks stay the same."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from runtime.grammar import llguidance_backend
from runtime.grammar.json_schema.listed_values import settle_lists
from runtime.grammar.table import make_backend
from runtime.protocol.constraint import Constraint
from tests.runtime.grammar.conftest import Trained

LISTED: dict[str, Any] = {"type": "string", "enum": ["AB", "CD", "EFG", "東京"]}


def beside(*states: Any, **more: Any) -> dict[str, Any]:
    options = [{"properties": {"state": state, "code": {"type": "integer"}}} for state in states]
    own = {"name": {"type": "string"}, "state": LISTED, "code": {"minimum": 3}}
    return {"type": "object", "properties": own, "anyOf": options, **more}


@pytest.mark.parametrize(
    ("state", "left"),
    [
        (True, LISTED["enum"]),
        ({"enum": ["CD", "ZZ", "AB"]}, ["AB", "CD"]),
        ({"type": "string", "enum": ["ZZ"]}, []),
        ({"type": "string", "maxLength": 2}, ["AB", "CD", "東京"]),
        ({"type": "string", "minLength": 3}, ["EFG"]),
    ],
)
def test_what_is_left(state, left):
    settled = settle_lists({"items": beside(state, True)})["items"]
    assert list(settled["properties"]) == ["name", "state", "code"]
    assert settled["properties"]["state"] is True
    kept = settled["anyOf"][0]["properties"]
    assert list(kept) == ["state", "code"]
    assert kept["state"] == ({"type": "string", "enum": left} if left else False)
    assert settled["anyOf"][1]["properties"]["state"] == LISTED


@pytest.mark.parametrize(
    "schema",
    [
        beside({"type": "string", "pattern": "^A"}, True),
        beside({"enum": ["AB", 3]}, True),
        {**beside(True), "anyOf": [{"properties": {"state": True}}, {"properties": {"other": True}}]},
        {**beside(True), "anyOf": [{"properties": {"state": True}}, {"$ref": "#/$defs/d0"}]},
        {**beside(True), "anyOf": [{"type": "string", "properties": {"state": True}}]},
        {"properties": {"anyOf": {"enum": ["x"]}, "properties": {"enum": ["x"]}}},
        {"properties": {"state": {"type": "string"}}, "anyOf": [{"properties": {"state": LISTED}}]},
        {"enum": [{"properties": {"a": {"enum": ["x"]}}, "anyOf": [{"properties": {"a": {"enum": []}}}]}]},
        True,
    ],
)
def test_what_it_does_not_know_is_left_alone(schema):
    assert settle_lists(schema) is schema


@pytest.mark.parametrize(
    "schema",
    [
        beside({"enum": ["CD", "ZZ"]}, {"type": "string", "maxLength": 2}),
        beside({"enum": ["CD", "ZZ"]}, {"enum": ["ZZ"]}, required=["state"]),
        beside({"enum": ["ZZ"]}, additionalProperties=False),
        beside({"enum": ["EFG"]}, {"enum": ["AB", "EFG"]}, required=["name", "state", "code"]),
    ],
)
def test_masks_are_those_of_the_schema_as_it_was(schema, monkeypatch, trained):
    tokenizer: Trained = trained("gpt2")
    backend = make_backend("llguidance", tokenizer.vocabulary)
    constraint = Constraint("json_schema", json.dumps(schema))
    settled = backend.compile(constraint)
    monkeypatch.setattr(llguidance_backend, "settle_lists", lambda schema: schema)
    as_it_was = backend.compile(constraint)
    pick = random.Random(4)
    for _ in range(12):
        one, other = settled.copy(), as_it_was.copy()
        text = pick.choice([b"", b'{"name":"a","state":"', b'{"state":"', b'{"name":"","state":"EF'])
        assert one.advance_bytes(text) == other.advance_bytes(text)
        for _ in range(15):
            mask = one.mask()
            assert np.array_equal(mask.bits, other.mask().bits)
            ids = np.flatnonzero(np.unpackbits(mask.bits.view(np.uint8), bitorder="little")).tolist()
            ids = [token for token in ids if token not in tokenizer.vocabulary.eos]
            if not ids:
                break
            token = pick.choice(ids)
            assert one.advance(token)
            assert other.advance(token)
