"""Examples of schemas match them, and are completions where a search alone finds none."""

from __future__ import annotations

import json

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.grammar.base import first_completion
from runtime.grammar.byte_matcher import BYTES
from runtime.grammar.completion import PAUSE, search
from runtime.grammar.json_schema.document import SchemaDocument
from runtime.grammar.json_schema.examples import examples, shortest
from runtime.grammar.table import make_backend
from runtime.protocol.constraint import Constraint
from tests.exploring import tries
from tests.unit.runtime.grammar.json_schema.wild import Unjudged, Wild, oracle

AUTO = make_backend("auto", BYTES)


def of(schema):
    made = examples(SchemaDocument(json.loads(json.dumps(schema))))
    return [value for value in made if value is not PAUSE]


@settings(deadline=None, max_examples=tries(80))
@given(data=st.data())
def test_they_match(small, data):
    schema = data.draw(small.schemas)
    for value in of(schema):
        assert small.is_valid(schema, value), value


@settings(deadline=None, max_examples=tries(30))
@given(st.randoms(use_true_random=False), st.sampled_from([4, 10]))
def test_they_match_in_every_draft(pick, size):
    wild = Wild(pick, size)
    validator = oracle(wild.schema)
    for value in of(wild.schema):
        try:
            assert validator.is_valid(value), (wild.schema, value)
        except (Unjudged, RecursionError, KeyError):
            continue  # the tables of the oracle do not know this text


LOOP = {
    "$ref": "#/$defs/t",
    "$defs": {
        "t": {
            "type": "object",
            "properties": {"l": {"anyOf": [{"$ref": "#/$defs/t"}, {"type": "null"}]}},
            "required": ["l"],
        }
    },
}
FONT = {"type": "object", "properties": {"a": {"pattern": "a_font"}, "f": {}}, "required": ["a", "f"]}
NAMES = {"type": ["string", "null"], "oneOf": [{"type": "string"}, {"minLength": 0}]}
KINDS = {
    "type": "object",
    "required": ["v"],
    "properties": {"v": {"type": "string"}},
    "oneOf": [{"properties": {"kind": {"const": "a"}}}, {"properties": {"kind": {"const": "b"}}}],
}
BITS = {"type": "array", "uniqueItems": True, "items": {"type": "boolean"}}
MADE = [
    (FONT, [{"a": "a_font", "f": 0}]),
    (NAMES, [None]),
    (
        {"type": "object", "required": ["k"], "dependentSchemas": {"k": {"required": ["s"]}}},
        [{"k": 0, "s": 0}],
    ),
    (
        {"type": "object", "required": ["a"], "dependentRequired": {"a": ["b"], "b": ["c"]}},
        [{"a": 0, "b": 0, "c": 0}],
    ),
    (BITS | {"minItems": 3}, []),
    (BITS | {"minItems": 2}, [[True, False]]),
    ({"type": "array", "contains": {"const": "x"}, "minContains": 2}, [["x", "x"]]),
    ({"type": "number", "not": {"type": "integer"}}, [0.5]),
    ({"type": "integer", "minimum": 10, "multipleOf": 7}, [14]),
    ({"type": "string", "minLength": 3, "pattern": "^x+$"}, ["xxx"]),
    (
        {"type": "object", "minProperties": 2, "additionalProperties": {"type": "null"}},
        [{"a0": None, "a1": None}],
    ),
    ({"if": {"type": "object"}, "then": {"required": ["z"]}, "type": "object"}, [{"z": 0}]),
    ({"not": {"propertyNames": False}}, [{"a0": 0}]),
    ({"anyOf": [{"type": "integer", "minimum": 9}, {"type": "null"}]}, [9]),
    (KINDS, [{"kind": "a", "v": ""}]),
    (LOOP, [{"l": None}]),
    ({"$ref": "#"}, []),
    (False, []),
]


@pytest.mark.parametrize(("schema", "first"), MADE, ids=str)
def test_the_least_that_may_do(schema, first):
    assert of(schema)[:1] == first


def test_texts_of_patterns():
    assert shortest("^.*\\.md$") == ".md"
    assert shortest("normal|italic") in {"normal", "italic"}
    assert shortest("^\\d{4}-[A-F]$")[4:] in {f"-{letter}" for letter in "ABCDEF"}
    assert shortest('^"\\n$') == '"\n'
    assert shortest("^(?=a)b") is None


TARS = [f"field_{number}" for number in range(60)]
HARD = [
    {"properties": {"p": {"type": "string", "pattern": "^[a-z]+@[a-z]+gov"}}, "required": ["p"]},
    {"properties": {"a": {"type": "string", "pattern": "rocket_font"}}, "required": ["a", "b"]},
    {"required": ["b"], "properties": {"b": {"type": "number", "not": {"type": "integer"}}}},
    {"required": ["k"], "dependentSchemas": {"k": {"required": ["source"]}}},
    {
        "properties": {name: {"type": "string", "pattern": "[.]tar$"} for name in TARS},
        "required": TARS,
        "additionalProperties": False,
    },
    {
        "properties": {"street": {"type": "string"}, "country": {"enum": ["A", "B"]}},
        "required": ["street", "country"],
        "oneOf": [{"properties": {"country": {"const": name}}} for name in "BC"],
    },
]


@pytest.mark.parametrize("number", range(len(HARD)))
def test_a_completion_is_found_where_only_some_words_lead_to_the_end(small, number):
    schema = {"type": "object", **HARD[number]}
    matcher = AUTO.compile(Constraint("json_schema", json.dumps(schema)))
    found = first_completion(matcher.copy()).ids
    assert found is not None
    assert small.is_valid(schema, json.loads(bytes(found)))
    assert all(matcher.advance(token) for token in found)
    assert matcher.may_stop()


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"p": {"not": {"type": "string"}}}, "required": ["p"]},
        {"oneOf": [{"type": "string"}, {"patternProperties": {"^.{1,3}$": False}}]},
    ],
)
def test_a_search_gives_up_a_place_that_leads_back_to_itself(small, schema):
    """A string that no value allows to end is gone on with for ever; numbers are tried all the same."""
    matcher = AUTO.compile(Constraint("json_schema", json.dumps(schema)))
    found = search(matcher, BYTES, 1000).ids
    assert found is not None
    assert small.is_valid(schema, json.loads(bytes(found)))


def test_work_is_bounded(small):
    wide = {"type": "object", "properties": {}, "required": [f"n{n}" for n in range(1000)]}
    assert len(of(wide)[0]) == 1000
    deep: dict = {"type": "integer"}
    for _ in range(60):
        deep = {"type": "array", "items": deep, "minItems": 1}
    assert of(deep) == []
    choices = {"allOf": [{"oneOf": [{"minimum": n}, {"maximum": n}, {"type": "string"}]} for n in range(30)]}
    assert all(small.is_valid(choices, value) for value in of(choices))


@pytest.mark.parametrize(
    "text",
    [
        '{"type": "number", "minimum": 1e400}',
        '{"type": "number", "minimum": 1, "multipleOf": 1e-320}',
        '{"type": "integer", "minimum": %s, "multipleOf": 0.1}' % ("9" * 400),
        '{"type": "array", "minItems": 1e400}',
        '{"type": "string", "minLength": 1e300}',
        '{"type": "string", "format": ["x"]}',
        '{"required": "a", "properties": [], "dependencies": 3}',
    ],
)
def test_a_guess_never_fails(text):
    for _ in examples(SchemaDocument(json.loads(text))):
        pass


COMPLETED = [
    {"type": "string", "format": "json-pointer", "minLength": 1},
    {"type": "string", "format": "email", "pattern": "a{2}"},
    {"type": "string", "format": "uri", "pattern": "\\.(png|jpg)$"},
    {"type": "string", "pattern": "^(?=.*[A-Z])(?=.*[0-9])(?=.*[a-z]).{8,}$"},
    {"type": "string", "pattern": "^(?!.*--)[a-z][a-z-]{5,}[a-z]$"},
    {"type": "string", "allOf": [{"pattern": "[A-Z]"}, {"pattern": "[!@#$]"}, {"minLength": 8}]},
    {"type": "string", "pattern": "[0-9]$", "minLength": 30, "maxLength": 30},
    {"type": "integer", "not": {"minimum": -100, "maximum": 100}},
    {"type": "number", "not": {"enum": list(range(-1, 20))}},
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 30}, "uniqueItems": True,
     "minItems": 25},
    {"type": "array", "items": {"type": "string", "pattern": "^[a-c]{2}$"}, "uniqueItems": True,
     "minItems": 6},
    {"type": "object", "minProperties": 1, "propertyNames": {"format": "uuid"}},
    {"type": "object", "minProperties": 3, "propertyNames": {"pattern": "^x-[a-z]+$"}},
    {"type": "object", "minProperties": 2, "propertyNames": {"enum": ["a", "b", "c"]},
     "additionalProperties": {"type": "integer", "minimum": 5}},
    {"type": "object", "minProperties": 3, "additionalProperties": False,
     "patternProperties": {"^S_": {"type": "string"}, "^I_": {"type": "integer"}}},
    {"type": "object", "unevaluatedProperties": False, "minProperties": 2, "allOf": [
        {"properties": {"a": {"type": "integer"}}},
        {"properties": {"b": {"type": "string", "minLength": 1}}}]},
    {"type": "object", "properties": {"kind": {"enum": ["a", "b"]}}, "required": ["kind"],
     "if": {"properties": {"kind": {"const": "a"}}}, "then": {"required": ["x"]}, "else": {"required": ["y"]},
     "not": {"required": ["x"]}},
    {"$schema": "http://json-schema.org/draft-04/schema#", "type": "object", "required": ["v"],
     "properties": {"v": {"type": "string", "if": {"maxLength": 5}, "then": {"type": "null"},
                          "else": {"type": "number"}}}},
    {"type": "object", "required": ["x"], "properties": {
        "x": {"type": "number"}, "o": {"type": "object", "properties": {"p": {"enum": ["\u007f"]}}}}},
]  # fmt: skip


@pytest.mark.parametrize("schema", COMPLETED, ids=lambda schema: json.dumps(schema)[:60])
def test_an_example_completes_what_parts_say_together(schema):
    """Conditions on one text, on names, between members: each alone is met by what the others refuse."""
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)
    assert any(validator.is_valid(value) for value in of(schema)), "of its examples"
    ids = first_completion(AUTO.compile(Constraint("json_schema", json.dumps(schema)))).ids
    assert ids is not None
    assert len(ids) <= 200
