"""Schemas on the outlines path: as a regular expression exactly, or refused by name."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.grammar.backends.outlines_backend import OutlinesGrammarBackend
from runtime.grammar.byte_matcher import BYTES
from runtime.grammar.json_schema.schema_regex import LEVELS, ORDER, UNNAMED
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import BadConstraint, UnsupportedConstraint
from tests.exploring import tries

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("outlines_core")
COMPACT = OutlinesGrammarBackend(BYTES, whitespace="compact")


def start(schema, backend=COMPACT):
    return backend.compile(Constraint("json_schema", json.dumps(schema)))


def takes(matcher, text):
    matcher = matcher.copy()
    return all(matcher.advance_bytes(bytes((byte,))) for byte in text.encode()) and matcher.may_stop()


def spoken(pick, matcher, most=120):
    """A document by random bytes under the mask, then by the closing."""
    matcher, data = matcher.copy(), b""
    for _ in range(pick.randrange(most)):
        ways = sorted(matcher.next_bytes())
        if not ways or (matcher.may_stop() and pick.random() < 0.2):
            break
        byte = pick.choice(ways)
        assert matcher.advance(byte)
        data += bytes((byte,))
    ids = matcher.closing(4096)
    assert ids is not None
    assert all(matcher.advance(token) for token in ids)
    assert matcher.may_stop()
    return json.loads(data + bytes(ids))


words = st.sampled_from(["a", "b", "c d", "né", "x.*"])
scalars = st.one_of(
    st.fixed_dictionaries(
        {"type": st.just("string")},
        optional={"minLength": st.integers(0, 3), "maxLength": st.integers(3, 50)},
    ),
    st.fixed_dictionaries(
        {
            "type": st.just("string"),
            "pattern": st.sampled_from(["^a$", "^[é-日]{2}$", r"^[a-z ]*\d?$", "^(a|b)+$", "^(ab|c){2,9}$"]),
        }
    ),
    st.sampled_from([{"type": "null"}, {"type": ["boolean", "integer"]}, {"enum": ["a\n", 1, None, [2, "x"]]},
                     {"const": 'q"\\'}, {"type": "string", "enum": ["a", "é"]}, {"type": "integer"},
                     {"type": "number"}, {"type": "object"}, {"type": "array"}]),
)  # fmt: skip


def nested(inner):
    return st.one_of(
        st.tuples(inner, st.integers(0, 2), st.integers(2, 30)).map(
            lambda p: {"type": "array", "items": p[0], "minItems": p[1], "maxItems": p[2]}
        ),
        st.tuples(st.dictionaries(words, inner, max_size=4), st.booleans()).map(
            lambda p: {
                "type": "object",
                "properties": p[0],
                "required": sorted(p[0])[: len(p[0]) // 2],
                "additionalProperties": p[1],
            }
        ),
        inner.map(lambda part: {"type": "object", "additionalProperties": part}),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: {"anyOf": parts}),
        inner.map(lambda part: {"$defs": {"d": part}, "$ref": "#/$defs/d"}),
    )


schemas = st.recursive(scalars, nested, max_leaves=4)


def without_definitions(schema):
    """Only the outermost $defs is a place that "#/$defs/d" leads to."""
    return json.dumps(schema).count('"$defs"') <= ("$defs" in schema)


@settings(max_examples=tries(60), deadline=None)
@given(schemas.filter(without_definitions), st.integers())
def test_what_is_generated_is_valid(schema, seed):
    try:
        matcher = start(schema)
    except UnsupportedConstraint as error:
        assert "characters; at most" in str(error)  # noqa: PT017 - it is an answer like others
        return
    checker, pick = jsonschema.Draft202012Validator(schema), random.Random(seed)
    assert matcher.origin.exact
    for _ in range(6):
        value = spoken(pick, matcher)
        assert checker.is_valid(value), value


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (
            {"type": "string", "maxLength": 400},
            ['"' + "é" * 400 + '"', '"\\n"'],
            ['"' + "a" * 401 + '"', '"\n"'],
        ),
        ({"type": "string", "pattern": r"^\d[a-z]+$"}, ['"1ab"'], ['"ab"', '"1"', '"1a1"', '"٣a"']),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "null"}, "b": {"type": "null"}, "c": {"type": "null"}},
                "required": ["b"],
                "additionalProperties": False,
            },
            ['{"b":null}', '{"a":null,"b":null}', '{"b":null,"c":null}'],
            ["{}", '{"a":null}', '{"b":null,"d":null}'],
        ),
        ({"enum": [1, "x", None]}, ["1", '"x"', "null"], ["2", "x"]),
        ({"anyOf": [{"type": "integer"}, {"type": "boolean"}]}, ["-7", "true"], ["1.5", '"a"']),
    ],
)
def test_instances(schema, good, bad):
    matcher = start(schema)
    assert [text for text in good if not takes(matcher, text)] == []
    assert [text for text in bad if takes(matcher, text)] == []


def test_what_is_not_offered_is_told():
    free = start({"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}})
    assert free.origin.narrowed == (ORDER, UNNAMED)
    assert start({"type": "array"}).origin.narrowed == (LEVELS,)
    assert start({"type": "string", "maxLength": 9}).origin.narrowed == ()


def test_whitespace_is_a_policy():
    schema = json.dumps({"type": "array", "items": {"type": "null"}})
    texts = ["[null,null]", "[null, null]", "[\n  null,\r\n  null\n]", "[null,  null]"]
    for policy, taken in {"compact": 1, "single": 2, "flexible": 3}.items():
        matcher = COMPACT.compile(Constraint("json_schema", schema, whitespace=policy))
        assert [takes(matcher, text) for text in texts] == [number < taken for number in range(4)]


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"}, "back"),
        ({"type": "array", "items": {"$ref": "#"}}, "#/items.*leads back"),
        ({"type": "integer", "minimum": 3}, "minimum"),
        ({"type": "array", "items": {"type": "null"}, "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "properties": {"a": {"type": "string", "format": "date"}}}, "/a: format"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"allOf": [{"type": "integer"}]}, "allOf"),
        ({"not": {"type": "null"}}, "not"),
        ({"type": "string", "pattern": "a|b"}, "anchored"),
        ({"type": "string", "pattern": "^a$|^b$"}, "anchored"),
        ({"type": "string", "pattern": "^.*$"}, "escapes"),
        ({"type": "string", "pattern": "^a*$", "maxLength": 3}, "maxLength, pattern"),
        ({"type": "object", "properties": {'q"': {"type": "null"}}}, "escapes"),
        ({"type": "object", "required": ["a"]}, "required"),
        ({"enum": [2**60]}, "beyond"),
        ({"enum": ["a"], "minLength": 2}, "enum beside minLength"),
        ({"enum": [True], "type": "integer"}, "enum beside type"),
        ({}, "without a type"),
        (True, "true or false"),
    ],
)  # fmt: skip
def test_refusals_are_by_name(schema, told):
    with pytest.raises(UnsupportedConstraint, match=told):
        start(schema)


def test_references_written_out_are_bounded():
    twice = {str(n): {"anyOf": [{"$ref": f"#/$defs/{n + 1}"}] * 2} for n in range(40)}
    with pytest.raises(BadConstraint, match="too large"):
        start({"$ref": "#/$defs/0", "$defs": {**twice, "40": {"type": "null"}}})
