"""Schemas on the outlines path: nothing invalid is taken, what is not offered is told."""

from __future__ import annotations

import gzip
import json
import os
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.grammar.byte_matcher import BYTES
from runtime.grammar.json_schema.schema_language import ORDER
from runtime.grammar.outlines_backend import OutlinesGrammarBackend
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import BadConstraint, UnsupportedConstraint

jsonschema = pytest.importorskip("jsonschema")
DATA = Path(os.environ.get("SGLANG_DSL_DATA", "/nonexistent")) / "maskbench_sample.jsonl.gz"
COMPACT = OutlinesGrammarBackend(BYTES, whitespace="compact")
FLEXIBLE = OutlinesGrammarBackend(BYTES)


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


words = st.sampled_from(["a", "b", 'q"', "né", "x\ny"])
scalars = st.one_of(
    st.fixed_dictionaries(
        {"type": st.just("string")},
        optional={"minLength": st.integers(0, 3), "maxLength": st.integers(3, 50)},
    ),
    st.fixed_dictionaries(
        {
            "type": st.just("string"),
            "pattern": st.sampled_from(["^a", "b$", "[é-日]{2}", "^[a-z ]*$", "^(a|b$)", "^a{2,90}$"]),
        },
        optional={"maxLength": st.integers(2, 40), "minLength": st.integers(0, 2)},
    ),
    st.tuples(st.integers(-300, 300), st.integers(0, 1200), st.sampled_from(["integer", "number"])).map(
        lambda b: {"type": b[2], "minimum": b[0], "exclusiveMaximum": b[0] + b[1] + 1}
    ),
    st.sampled_from([{"type": "null"}, {"type": ["boolean", "integer"]}, {"enum": ["a", 1, None, [2, "x"]]}]),
    st.just({"type": "integer", "multipleOf": 3}),
)


def nested(inner):
    return st.one_of(
        st.tuples(inner, st.integers(0, 2), st.integers(2, 70)).map(
            lambda p: {"type": "array", "items": p[0], "minItems": p[1], "maxItems": p[2]}
        ),
        st.tuples(
            st.dictionaries(words, inner, max_size=4),
            st.data(),
            st.sampled_from([False, False, {"type": "null"}]),
        ).map(
            lambda p: {
                "type": "object",
                "properties": p[0],
                "required": sorted(p[0])[: len(p[0]) // 2],
                "additionalProperties": p[2],
            }
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: {"anyOf": parts}),
        st.tuples(inner, inner).map(lambda p: {"type": "array", "prefixItems": list(p), "items": False}),
        inner.map(lambda part: {"$defs": {"d": part}, "$ref": "#/$defs/d"}),
    )


schemas = st.recursive(scalars, nested, max_leaves=4)


def without_definitions(schema):
    """Only the outermost $defs is a place that "#/$defs/d" leads to."""
    return json.dumps(schema).count('"$defs"') <= ("$defs" in schema)


@settings(max_examples=60, deadline=None)
@given(schemas.filter(without_definitions), st.integers())
def test_what_is_generated_is_valid(schema, seed):
    try:
        matcher = start(schema)
    except BadConstraint as error:
        if "no text can match" not in error.message:
            raise
        return
    checker, pick = jsonschema.Draft202012Validator(schema), random.Random(seed)
    if matcher.origin.checked:
        return  # its closings are searched for: see the next test
    for _ in range(6):
        value = spoken(pick, matcher)
        assert checker.is_valid(value), value
        assert takes(matcher, json.dumps(value, ensure_ascii=False, separators=(",", ":")))


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (
            {"type": "integer", "minimum": -12, "maximum": 130},
            ["-12", "0", "-0", "99", "130"],
            ["-13", "131", "007", "1.5"],
        ),
        (
            {"type": "number", "exclusiveMinimum": 0, "maximum": 10},
            ["0.01", "10", "10.0", "9.99"],
            ["0", "0.0", "10.01", "-1"],
        ),
        (
            {"type": "string", "maxLength": 4096},
            ['"' + "é" * 4096 + '"', '"\\n"'],
            ['"' + "a" * 4097 + '"', '"\n"'],
        ),
        (
            {"type": "string", "pattern": "^[a-z]+$", "minLength": 2, "maxLength": 3},
            ['"ab"', '"abc"'],
            ['"a"', '"abcd"'],
        ),
        (
            {"type": "string", "pattern": "ab|cd$", "maxLength": 5},
            ['"xaby"', '"xcd"'],
            ['"xcdx"', '"xxxxab"'],
        ),
        ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2023-02-29"']),
        ({"type": "integer", "multipleOf": 7}, ["14", "-7"], ["15"]),
        ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 5}]}, ["3", "5.5"], ["7"]),
        ({"allOf": [{"multipleOf": 2}, {"multipleOf": 3}], "type": "integer"}, ["6"], ["2", "3"]),
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
        (
            {
                "type": "object",
                "properties": {"ab": {"type": "null"}},
                "additionalProperties": {"type": "integer"},
            },
            ["{}", '{"ab":null,"a":1,"abc":2}', '{"":1}'],
            ['{"ab":1}', '{"a":null}'],
        ),
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, ["[1,2]"], ["[1,1]"]),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "null"}},
                "required": ["a"],
                "minProperties": 2,
                "additionalProperties": {"type": "null"},
            },
            ['{"a":null,"z":null}'],
            ['{"a":null}'],
        ),
        # Values that are listed are held to what else is said of them.
        ({"enum": ["a", "b7"], "pattern": "[0-9]"}, ['"b7"'], ['"a"']),
        ({"enum": [1, 20, "x"], "minimum": 5}, ["20", '"x"'], ["1"]),
        ({"enum": [{"k": 1}, [1]], "additionalProperties": False}, ["[1]"], ['{"k":1}']),
        ({"allOf": [{"enum": ["ab", "a", "b"]}, {"minLength": 2}]}, ['"ab"'], ['"a"', '"b"']),
        ({"properties": {"x": {"const": "a", "maxLength": 0}}, "type": "object"}, ["{}"], ['{"x":"a"}']),
    ],
)
def test_instances(schema, good, bad):
    matcher = start(schema)
    assert [text for text in good if not takes(matcher, text)] == []
    assert [text for text in bad if takes(matcher, text)] == []


def test_what_is_not_offered_is_told():
    free = start({"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}})
    assert ORDER in free.origin.narrowed
    assert any("does not name" in told for told in free.origin.narrowed)
    assert any("levels" in told for told in start({"type": "array"}).origin.narrowed)
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
        (
            {"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"},
            "leads back",
        ),
        ({"type": "array", "items": {"$ref": "#"}}, "leads back"),
        ({"allOf": [{"anyOf": [{"minimum": n} for n in range(9)]}] * 3}, "alternatives"),
    ],
)
def test_refusals_are_by_name(schema, told):
    with pytest.raises(UnsupportedConstraint, match=told):
        start(schema)


@pytest.mark.skipif(not DATA.exists(), reason="needs SGLANG_DSL_DATA")
def test_schema_sample():
    wrong, unexplained, seen = [], [], 0
    with gzip.open(DATA, "rt") as lines:
        cases = [json.loads(line) for line in lines][2::60]
    for case in cases:
        try:
            matcher = start(case["schema"], FLEXIBLE)
        except BadConstraint:
            continue
        for test in case["tests"]:
            taken = takes(matcher, json.dumps(test["data"], ensure_ascii=False))
            seen += 1
            if taken and not test["valid"]:
                wrong.append(case["name"])
            if test["valid"] and not taken and not matcher.origin.narrowed:
                unexplained.append(case["name"])
    assert seen
    assert wrong == []
    assert unexplained == []
