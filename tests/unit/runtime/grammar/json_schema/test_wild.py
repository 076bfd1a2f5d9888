"""Schemas as people write them, against a validator: nothing invalid is taken, nothing valid refused."""

from __future__ import annotations

import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.grammar.byte_matcher import BYTES, ByteMatcher
from runtime.grammar.table import make_backend
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import BadConstraint
from tests.exploring import tries
from tests.unit.runtime.grammar.json_schema.spelled import is_offered, shortest, takes_value
from tests.unit.runtime.grammar.json_schema.wild import FORMATS, Unjudged, Wild, oracle

BACKEND = make_backend("auto", BYTES)


def text_of(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isprintable() else json.dumps(value)


def takes(face: ByteMatcher, text: str) -> bool:
    return all(face.advance(byte) for byte in text.encode()) and face.may_stop()


def judged(wild: Wild, count: int) -> list[tuple[object, bool]]:
    """Values near to the schema's, with the verdict of the reference where it has one. A lone -0.0 is left
    out: as long as it is all there is, it may go on to a number that the language spells."""
    validator, found = oracle(wild.schema), []
    for _ in range(count):
        value = wild.value()
        for one in (shortest(value), shortest(wild.near(value))):
            if isinstance(one, float) and (math.isinf(one) or one == 0):
                continue
            try:
                found.append((one, validator.is_valid(json.loads(json.dumps(one)))))
            except (Unjudged, RecursionError):
                continue
    return found


@settings(deadline=None, max_examples=tries(100))
@given(st.integers(0, 10**6), st.sampled_from([4, 10, 20]))
def test_wild_schemas_are_kept_as_the_reference_has_them(seed, size):
    wild = Wild(random.Random(seed), size)
    cases = judged(wild, 4)
    try:
        matcher = BACKEND.compile(Constraint("json_schema", json.dumps(wild.schema)))
    except BadConstraint as error:
        refused = str(error)
    else:
        refused = ""
    if refused:
        assert "nothing matches" in refused or "enum is empty" in refused
        assert not any(valid for _, valid in cases), wild.schema
        return
    for value, valid in cases:
        taken = takes_value(matcher, value, wild.schema)
        assert taken == valid or (valid and not is_offered(value)), (wild.schema, text_of(value))


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_formats(small, name):
    good, bad = FORMATS[name]
    matcher = BACKEND.compile(Constraint("json_schema", json.dumps({"type": "string", "format": name})))
    for text in good:
        taken = takes(ByteMatcher(matcher.copy()), json.dumps(text, ensure_ascii=False))
        assert taken or not is_offered(text), text
    for text in bad:
        assert not takes(ByteMatcher(matcher.copy()), text_of(text)), text


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "object", "properties": {"é": {"enum": ["ü"]}}, "additionalProperties": False},
         ['{"é": "ü"}'],
         ['{"é": "u"}', r'{"\u00e8": "\u00fc"}']),
        ({"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 2000}}},
         ['{"n": 1000}', '{"n": 0}', '{"n": 2000}'],
         ['{"n": 1e4}', '{"n": 0.5}', '{"n": -1.0}']),
        ({"type": "array", "items": {"const": 9007199254740993}}, ["[9007199254740993]"],
         ["[9007199254740992]"]),
        ({"type": "array", "items": {"minimum": 9007199254740993}}, ["[9007199254740993]"],
         ["[9007199254740992]"]),
        ({"type": "object", "required": ["a\x00b"], "properties": {"a\x00b": {"const": "\x01"}}},
         [r'{"a\u0000b": "\u0001"}'], [r'{"a\u0000b": "a"}', "{}"]),
        ({"type": "array", "items": {"pattern": r"^(?<q>['-])a\k<q>$"}}, ['["-a-"]'], ["[\"'a-\"]"]),
        ({"type": "array", "items": {"pattern": r"(?<=a+)b"}}, ['["aab"]'], ['["b"]']),
        ({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"],
          "additionalProperties": False, "propertyNames": {"maxLength": 3}}, ['{"a": ""}'], ['{"b": ""}']),
        ({"properties": {"a": {"$ref": "#/$defs/none"}}, "$defs": {"none": {"enum": ["x"], "type": "null"}}},
         ["{}", '{"b": 1}'], ['{"a": null}', '{"a": "x"}']),
        ({"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/m"}}},
          "m": {"type": "object", "properties": {"m": {"$ref": "#/$defs/m"}}, "required": ["m"]}}},
         ["{}"], ['{"n": {}}']),
    ],
)  # fmt: skip
def test_spellings_and_corners(small, schema, good, bad):
    for text in good:
        assert small.accepts(small.matcher(schema), text), text
    for text in bad:
        assert not small.accepts(small.matcher(schema), text), text


def test_objects_have_no_limit_of_properties(small):
    named = {f"p{n}": {"type": "integer", "minimum": n} for n in range(200)}
    schema = {"type": "object", "properties": named,
              "required": ["p0"], "additionalProperties": False}  # fmt: skip
    whole = {f"p{n}": n for n in range(200)}
    assert small.accepts(small.matcher(schema), json.dumps(whole))
    assert not small.accepts(small.matcher(schema), json.dumps(whole | {"p7": 6}))
    assert not small.accepts(small.matcher(schema), json.dumps(whole | {"q": 6}))


def test_references_that_depend_on_the_way(small):
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "https://a.invalid/strings",
        "$ref": "list", "$defs": {
            "items": {"$dynamicAnchor": "items", "type": "string"},
            "list": {"$id": "list", "type": "array", "items": {"$dynamicRef": "#items"},
                     "$defs": {"any": {"$dynamicAnchor": "items"}}},
        },
    }  # fmt: skip
    assert small.accepts(small.matcher(schema), '["a", "b"]')
    assert not small.accepts(small.matcher(schema), '["a", 1]')


def test_a_pattern_that_explodes_is_stopped(small):
    face = small.matcher({"type": "array", "items": {"type": "string", "pattern": "^(?=((a|aa)+)+$)"}})
    assert not small.accepts(face, json.dumps(["a" * 200 + "b"]))


def test_a_reference_without_end_is_a_fault_and_no_crash(small):
    schema = {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"not": {"$ref": "#/$defs/b"}}, "b": {"not": {"$ref": "#/$defs/a"}}},
    }
    try:
        face = small.matcher(schema)
    except BadConstraint:
        return
    assert not small.accepts(face, "[1]")
