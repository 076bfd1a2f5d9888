"""Keywords that have no effect are told, with what was probably meant."""

from __future__ import annotations

import json
from typing import Any

import pytest

from runtime.grammar.byte_matcher import byte_matcher
from runtime.grammar.json_schema.shapes import MAX_IGNORED
from runtime.protocol.errors import UnsupportedConstraint


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
        (
            {"type": "string", "contentEncoding": "base64", "contentMediaType": "text/plain"},
            (
                "contentEncoding 'base64' at # (an annotation)",
                "contentMediaType 'text/plain' at # (an annotation)",
            ),
        ),
    ],
)
def test_what_is_told(schema: Any, told: tuple[str, ...]) -> None:
    assert ignored(schema) == told


def test_of_many_a_few_are_told() -> None:
    schema = {"properties": {f"a{number}": {"foo" * 50: 1} for number in range(300)}}
    told = ignored(schema)
    assert len(told) == MAX_IGNORED
    assert all(len(line) < 200 for line in told)


@pytest.mark.parametrize("backend", ["auto", "llguidance", "xgrammar"])
@pytest.mark.parametrize("draft", [None, "http://json-schema.org/draft-03/schema#"])
@pytest.mark.parametrize(
    ("word", "value", "instead"),
    [
        ("disallow", "string", "not"),
        ("extends", {"type": "object"}, "allOf"),
        ("divisibleBy", 2, "multipleOf"),
    ],
)
def test_keywords_of_draft_3_are_refused(
    small: Any, backend: str, draft: str | None, word: str, value: object, instead: str
) -> None:
    """They said what is valid, and no later draft reads them. As names of properties they are names."""
    part: dict[str, Any] = {"type": "integer", word: value}
    whole: dict[str, Any] = {} if draft is None else {"$schema": draft}
    places: list[dict[str, Any]] = [{"type": "object", "properties": {"a": part}}]
    if backend != "xgrammar":  # it has neither of these
        places += [{"type": "object", "not": part}, {"type": "array", "items": {"anyOf": [part]}}]
    for inner in places:
        with pytest.raises(UnsupportedConstraint, match=f"{word} is a keyword of draft 3") as caught:
            small.matcher({**whole, **inner}, backend)
        assert str(caught.value.where).startswith("json_schema #")
        assert instead in str(caught.value)
    named = {**whole, "type": "object", "properties": {word: {"type": "integer"}}, "required": [word],
             "additionalProperties": False}  # fmt: skip
    assert small.accepts(small.matcher(named, backend), f'{{"{word}": 3}}')
