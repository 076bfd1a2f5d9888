"""Keywords that have no effect are told, with what was probably meant."""

from __future__ import annotations

import json
from typing import Any

import pytest

from runtime.grammar.byte_matcher import byte_matcher
from runtime.grammar.json_schema.unheard import MAX_TOLD


def ignored(schema: Any) -> tuple[str, ...]:
    return byte_matcher("json_schema", json.dumps(schema)).matcher.origin.ignored


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"type": "object", "propertis": {}}, ("keyword 'propertis' at # (did you mean 'properties'?)",)),
        (
            {"properties": {"a": {"type": "string", "maxLenght": 3}}},
            ("keyword 'maxLenght' at #/properties/a (did you mean 'maxLength'?)",),
        ),
        ({"zzz": 1}, ("keyword 'zzz' at #",)),
        (
            {"$schema": "http://json-schema.org/draft-07/schema#", "prefixItems": [{}]},
            ("keyword 'prefixItems' at # (not of its draft)",),
        ),
        ({"title": "a", "x-own": 1, "const": 3, "$comment": "b", "examples": [3]}, ()),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"type": "null", "nullabel": True}}},
            ("keyword 'nullabel' at #/$defs/a",),
        ),
        ({"properties": {"propertis": {"type": "string"}}}, ()),
    ],
)
def test_what_is_told(schema: Any, told: tuple[str, ...]) -> None:
    assert ignored(schema) == told


def test_of_many_a_few_are_told() -> None:
    schema = {"properties": {f"a{number}": {"foo" * 50: 1} for number in range(300)}}
    told = ignored(schema)
    assert len(told) == MAX_TOLD
    assert all(len(line) < 200 for line in told)
