"""`unevaluatedProperties`, `unevaluatedItems` and references, wherever in a document they stand."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.protocol.errors import BadConstraint
from tests.unit.runtime.grammar.json_schema.spelled import takes_value

INT, TEXT = {"type": "integer"}, {"type": "string"}
CLOSED: dict[str, Any] = {"type": "object", "unevaluatedProperties": False}
FULL: dict[str, Any] = {"type": "array", "unevaluatedItems": False}


def named(**schemas: Any) -> dict[str, Any]:
    return {"properties": schemas}


def ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{name}"}


class Case(NamedTuple):
    schema: dict[str, Any]
    defs: dict[str, Any]
    good: list[Any]
    bad: list[Any]


CASES = {
    "a reference in allOf": Case(
        {**CLOSED, "allOf": [ref("c")]}, {"c": named(a=INT)}, [{"a": 1}, {}], [{"b": 1}, {"a": "x"}]),
    "a reference beside": Case(
        {**CLOSED, **ref("c"), **named(b=INT)}, {"c": named(a=INT)}, [{"a": 1, "b": 2}], [{"c": 1}]),
    "a chain of references": Case(
        {**CLOSED, **ref("a")}, {"a": ref("b"), "b": {"allOf": [ref("c")]}, "c": named(a=INT)},
        [{"a": 1}], [{"b": 1}]),
    "in anyOf": Case(
        {**CLOSED, "anyOf": [ref("a"), ref("b")]},
        {"a": {**named(a=INT), "required": ["a"]}, "b": {**named(b=TEXT), "required": ["b"]}},
        [{"a": 1}, {"b": "x"}, {"a": 1, "b": "x"}], [{"a": 1, "c": 1}, {"a": "x", "b": "x"}]),
    "in oneOf": Case(
        {**CLOSED, "oneOf": [ref("a"), ref("b")]},
        {"a": {**named(k={"const": 1}, a=True), "required": ["k"]},
         "b": {**named(k={"const": 2}, b=True), "required": ["k"]}},
        [{"k": 1, "a": 1}, {"k": 2, "b": 1}], [{"k": 1, "b": 1}, {"a": 1}]),
    "in if, then and else": Case(
        {**CLOSED, "if": ref("k"), "then": ref("a"), "else": ref("b")},
        {"k": {**named(k={"const": 1}), "required": ["k"]}, "a": named(a=True), "b": named(b=True)},
        [{"k": 1, "a": 1}, {"b": 1}, {}], [{"k": 1, "b": 1}, {"k": 2}, {"a": 1}]),
    "in dependentSchemas": Case(
        {**CLOSED, **named(a=INT), "dependentSchemas": {"a": ref("b")}}, {"b": named(b=True)},
        [{"a": 1, "b": 1}, {"a": 1}], [{"b": 1}]),
    "what not evaluates does not count": Case(
        {**CLOSED, **named(a=INT), "not": {"not": ref("b")}}, {"b": named(b=True)}, [{"a": 1}], [{"b": 1}]),
    "a schema for the rest": Case(
        {"type": "object", "allOf": [ref("c")], "unevaluatedProperties": ref("n")},
        {"c": named(a=TEXT), "n": INT}, [{"a": "x", "b": 1}], [{"b": "x"}]),
    "a rest inside": Case(
        {**CLOSED, "allOf": [ref("c")]}, {"c": {**named(a=TEXT), "additionalProperties": INT}},
        [{"a": "x", "b": 1}], [{"b": "x"}]),
    "an unevaluated rest inside": Case(
        {**CLOSED, "allOf": [ref("c")]}, {"c": {**named(a=TEXT), "unevaluatedProperties": INT}},
        [{"a": "x", "b": 1}], [{"b": "x"}]),
    "patterns": Case(
        {**CLOSED, "allOf": [ref("c")]}, {"c": {"patternProperties": {"^\\p{L}1$": INT}}},
        [{"é1": 1}, {"b1": 2}], [{"11": 1}, {"b": 2}]),
    "by anchor": Case(
        {**CLOSED, "$ref": "#here"}, {"c": {"$anchor": "here", **named(a=INT)}}, [{"a": 1}], [{"b": 1}]),
    "by dynamic anchor": Case(
        {**CLOSED, "$dynamicRef": "#here"}, {"c": {"$dynamicAnchor": "here", **named(a=INT)}},
        [{"a": 1}], [{"b": 1}]),
    "an odd name": Case(
        {**CLOSED, "$ref": "#/$defs/a~1b%25"}, {"a/b%": named(a=INT)}, [{"a": 1}], [{"b": 1}]),
    "a tree": Case(
        {**CLOSED, "$ref": "#/$defs/tree"},
        {"tree": {**named(v=INT, kids={"type": "array", "items": {**CLOSED, **ref("tree")}})}},
        [{"v": 1, "kids": [{"v": 2}, {"kids": []}]}], [{"kids": [{"x": 1}]}, {"x": 1}]),
    "items by a reference": Case(
        {**FULL, "allOf": [ref("c")]}, {"c": {"prefixItems": [INT, TEXT]}}, [[1, "x"], [1], []],
        [[1, "x", 2], ["x"]]),
    "items of several branches": Case(
        {**FULL, "prefixItems": [INT], "anyOf": [ref("two"), ref("three")]},
        {"two": {"prefixItems": [True, TEXT]}, "three": {"prefixItems": [True, True, INT]}},
        [[1, "x"], [1, "x", 3], [1]], [[1, "x", "y"], [1, 2, 3, 4]]),
    "contained items": Case(
        {**FULL, "allOf": [ref("c")]}, {"c": {"contains": TEXT}}, [["x", "y"]], [["x", 1], []]),
    "items for the rest": Case(
        {"type": "array", **ref("c"), "unevaluatedItems": ref("n")}, {"c": {"prefixItems": [TEXT]}, "n": INT},
        [["x", 1, 2], []], [["x", "y"]]),
    "conditions on items": Case(
        {**FULL, "if": ref("a"), "then": {"prefixItems": [True, INT]}, "else": ref("b")},
        {"a": {"prefixItems": [{"const": 1}]}, "b": {"prefixItems": [INT]}},
        [[1, 2], [3], []], [[3, 4], [1, 2, 3]]),
}  # fmt: skip

WRAPS = {
    "nothing": (lambda schema: schema, lambda value: value),
    "properties": (lambda schema: {"type": "object", **named(x=schema)}, lambda value: {"x": value}),
    "items": (lambda schema: {"type": "array", "items": schema}, lambda value: [value, value]),
    "prefixItems": (lambda schema: {"type": "array", "prefixItems": [INT, schema]}, lambda value: [1, value]),
    "additionalProperties": (
        lambda schema: {"type": "object", "additionalProperties": schema}, lambda value: {"y": value}),
    "patternProperties": (
        lambda schema: {"type": "object", "patternProperties": {"^z": schema}}, lambda value: {"z1": value}),
    "allOf": (lambda schema: {"allOf": [{}, schema]}, lambda value: value),
    "anyOf": (lambda schema: {"anyOf": [{"const": "none of it"}, schema]}, lambda value: value),
    "a reference": (
        lambda schema: {"type": "array", "items": ref("wrapped"), "$defs": {"wrapped": schema}},
        lambda value: [value]),
    "unevaluatedProperties": (
        lambda schema: {"type": "object", **ref("other"), "unevaluatedProperties": schema,
                        "$defs": {"other": named(o=INT)}},
        lambda value: {"o": 1, "u": value}),
}  # fmt: skip


def text_of(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def merged(schema: dict[str, Any], defs: dict[str, Any]) -> dict[str, Any]:
    return {**schema, "$defs": {**schema.get("$defs", {}), **defs}}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("own", [False, True], ids=["of the whole", "a document inside"])
def test_it_means_the_same_wherever_it_stands(small, name, wrap, own):
    """Its definitions under the root, and as an embedded document with an identifier of its own."""
    case, (around, value_in) = CASES[name], WRAPS[wrap]
    if own:
        schema = around({"$id": "http://case.invalid/", **merged(case.schema, case.defs)})
    else:
        schema = merged(around(case.schema), case.defs)
    start = small.matcher(schema)
    for value in case.good:
        assert small.accepts(start.copy(), text_of(value_in(value))), value
    for value in case.bad:
        assert not small.accepts(start.copy(), text_of(value_in(value))), value


@pytest.mark.parametrize("wrap", WRAPS)
def test_older_drafts_count_items_by_their_own_words(small, wrap):
    around, value_in = WRAPS[wrap]
    if wrap == "prefixItems":
        pytest.skip("no keyword of the draft")
    schema = merged(
        around({**FULL, "$ref": "#/$defs/c"}),
        {"c": {"items": [INT], "contains": TEXT, "dependentSchemas": {}}},
    )
    start = small.matcher({"$schema": "https://json-schema.org/draft/2019-09/schema", **schema})
    # What `contains` matches is evaluated since 2020-12 only.
    assert not small.accepts(start.copy(), text_of(value_in([1, "x"])))
    assert not small.accepts(start.copy(), text_of(value_in([1])))
    loose = json.loads(text_of(schema).replace('"contains": {"type": "string"}, ', ""))
    start = small.matcher({"$schema": "https://json-schema.org/draft/2019-09/schema", **loose})
    assert small.accepts(start.copy(), text_of(value_in([1])))
    assert not small.accepts(start.copy(), text_of(value_in([1, 2])))


NAMES = ["a", "b", "c"]
parts = st.recursive(
    st.sampled_from([True, INT, TEXT, ref("p"), ref("q"), named(a=INT), named(b=True), {"prefixItems": [INT]},
                     {"patternProperties": {"^[ab]": INT}}, {"additionalProperties": INT},
                     {"required": ["a"]}, {"items": INT}, {"contains": TEXT}]),
    lambda inner: st.one_of(
        st.builds(lambda some: {"allOf": some}, st.lists(inner, min_size=1, max_size=2)),
        st.builds(lambda some: {"anyOf": some}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda some: {"oneOf": some}, st.lists(inner, min_size=1, max_size=2)),
        st.builds(lambda a, b, c: {"if": a, "then": b, "else": c}, inner, inner, inner),
        st.builds(lambda a: {"dependentSchemas": {"a": a}}, inner),
        st.builds(lambda a, b: {"allOf": [a], "unevaluatedProperties": b}, inner, inner),
        st.builds(lambda a, b: {"anyOf": [a, {"prefixItems": [True, INT]}], "unevaluatedItems": b},
                  inner, inner),
        st.builds(lambda a, b: {**named(a=a), "prefixItems": [b]}, inner, inner),
    ),
    max_leaves=6,
)  # fmt: skip
leaves = st.sampled_from([0, 1, "x", None])
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None, max_examples=150)
@given(
    parts, parts, parts, st.sampled_from([False, INT]), st.sampled_from(sorted(WRAPS)),
    st.lists(values, min_size=4, max_size=8),
)  # fmt: skip
def test_what_is_drawn_is_read_as_by_the_reference(small, body, p, q, rest, wrap, some):
    around, value_in = WRAPS[wrap]
    # References among definitions are left to lead on only: a loop of them alone means nothing.
    defs = {"p": {"properties": {"c": p}, "prefixItems": [q]}, "q": {"properties": {"b": q}}}
    inner = {"allOf": [body], "unevaluatedProperties": rest, "unevaluatedItems": rest}
    schema = merged(around(inner), defs)
    reference = jsonschema.Draft202012Validator(schema)
    verdicts = [(value, reference.is_valid(value_in(value))) for value in some]
    try:
        start = small.matcher(schema)
    except BadConstraint as error:
        assert "nothing matches" in str(error)  # noqa: PT017
        assert not any(valid for _, valid in verdicts)
        return
    for value, valid in verdicts:
        assert takes_value(start.matcher, value_in(value), schema) == valid, (schema, value)


META = "https://json-schema.org/draft/2020-12/schema"
DRAFT_7 = "http://json-schema.org/draft-07/schema#/definitions/simpleTypes"


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"$ref": META}, [True, {"type": "string"}, {"properties": {"a": {"minimum": 1}}}],
         ["x", {"type": "text"}, {"minimum": "1"}]),
        ({"$ref": META, "type": "object"}, [{}, {"$id": "http://a.b/", "title": "x"}], [{"title": 1}, True]),
        ({"$ref": DRAFT_7}, ["array", "null"], ["x", "", 1]),
        ({"anyOf": [{"$ref": DRAFT_7}, {"type": "integer"}]}, ["array", 3], ["x", None]),
    ],
)  # fmt: skip
def test_metaschemas_are_referred_to(small, schema, good, bad, wrap):
    around, value_in = WRAPS[wrap]
    start = small.matcher(around(schema))
    for value in good:
        assert small.accepts(start.copy(), text_of(value_in(value))), value
    for value in bad:
        assert not small.accepts(start.copy(), text_of(value_in(value))), value
