"""Cases where some engine once took what its schema does not allow, or led where no text ends: each engine is
exact, checks what is left, or refuses by keyword and place."""

from __future__ import annotations

import json
import random

import pytest

from runtime.grammar.byte_matcher import BYTES, ByteMatcher
from runtime.grammar.table import make_backend
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import BadConstraint, UnsupportedConstraint
from tests.unit.runtime.grammar.json_schema.spelled import takes_value

MADE = {name: make_backend(name, BYTES) for name in ("auto", "xgrammar")}
DRAFT_2019 = "https://json-schema.org/draft/2019-09/schema"
NOT_3 = {"not": {"const": 3}}


def compiled(engine, schema):
    """A matcher, or the error of a refusal."""
    try:
        return MADE[engine].compile(Constraint("json_schema", json.dumps(schema)))
    except BadConstraint as error:
        return error


def takes(matcher, text):
    face = ByteMatcher(matcher.copy())
    return all(face.advance(byte) for byte in text.encode()) and face.may_stop()


@pytest.mark.parametrize("engine", MADE)
@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        # What is unevaluated, with no keyword beside it that evaluates in place, is what no other names.
        ({"type": "array", "unevaluatedItems": {"type": "array", "uniqueItems": True}},
         "[[1, 2]]", "[[1, 1]]"),
        ({"type": "array", "prefixItems": [{"type": "string"}], "unevaluatedItems": NOT_3},
         '["a", 4]', '["a", 3]'),
        ({"type": "object", "unevaluatedProperties": NOT_3}, '{"b": 4}', '{"b": 3}'),
        ({"type": "object", "unevaluatedProperties": {"enum": ["a", 12345678901234567890]}}, '{"b": "a"}',
         '{"b": 2}'),
        ({"$schema": DRAFT_2019, "type": "array", "items": [{"type": "string"}], "unevaluatedItems": NOT_3},
         '["a", 4]', '["a", 3]'),
        ({"$schema": DRAFT_2019, "type": "array", "items": [{"type": "string"}], "unevaluatedItems": False},
         '["a"]', '["a", 3]'),
        ({"$schema": DRAFT_2019, "type": "array", "items": [True], "additionalItems": True,
          "unevaluatedItems": False}, '["a", 3]', "{}"),
        ({"type": "object", "patternProperties": {"^(?!foo)": {"type": "integer"}},
          "unevaluatedProperties": False}, '{"fo": 1}', '{"foo": "ab"}'),
        ({"type": "object", "patternProperties": {"^(?!foo)": {"type": "integer"}},
          "unevaluatedProperties": NOT_3}, '{"foo": 1, "a": 3}', '{"foo": 3}'),
        # Two keywords of one object, and keywords of several that are joined, that become one condition.
        ({"type": "string", "pattern": r"^\S+$", "format": "email"}, '"a@b.c"', '"a"'),
        ({"type": "string", "pattern": "^a", "allOf": [{"pattern": "b$"}, {"pattern": "c"}]},
         '"acb"', '"ab"'),
        ({"type": "string", "pattern": "^a", "allOf": [{"maxLength": 2, "format": "hostname"}]},
         '"ab"', '"a_"'),
        # A named property whose name a pattern matches, too.
        ({"type": "object", "properties": {"ab": {"type": "object"}}, "additionalProperties": False,
          "patternProperties": {"^[a-z]+$": {"maxLength": 3}}}, '{"ab": {}}', '{"ab": "c"}'),
        # What is denied twice holds, with all that has to be checked of it.
        ({"not": {"not": {"oneOf": [{"maxProperties": 2}, {"type": "string"}]}}}, "3", '"a"'),
        ({"type": "array", "not": {"not": {"items": {"oneOf": [{"minimum": 2}, {"maximum": 3}]}}}},
         "[1, 4]", "[2]"),
        # JSON strings hold no control characters, whatever their length.
        ({"type": "string", "minLength": 1}, '"abé"', '"a\x01"'),
        ({"type": "string", "maxLength": 2}, '"é😀"', '"\t"'),
        ({"type": "string", "minLength": 2, "maxLength": 3}, '"]["', '"-"'),
        ({"type": "string", "maxLength": 0}, '""', '"a"'),
        # Numbers that a float does not hold.
        ({"type": "array", "items": {"enum": [12345678901234567890]}}, "[12345678901234567890]",
         "[1.2345678901234567e+19]"),
    ],
)  # fmt: skip
def test_neither_more_nor_less(engine, schema, good, bad):
    matcher = compiled(engine, schema)
    if isinstance(matcher, BadConstraint):
        assert engine != "auto"
        assert "json_schema #" in str(matcher)
        return
    assert takes_value(matcher, json.loads(good), schema)
    assert not takes(matcher, bad)


LOOP = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}


@pytest.mark.parametrize("engine", MADE)
@pytest.mark.parametrize(
    "schema",
    [
        LOOP,
        {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1, "$defs": LOOP["$defs"]},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a"}], "$defs": LOOP["$defs"]},
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": LOOP["$defs"]},
        {"type": "array", "items": {"type": "integer", "minimum": 5, "maximum": 2}, "minItems": 1},
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"type": "array", "items": {"$ref": "#"}},
        {"anyOf": [{"type": "null"},
                   {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}]},
    ],
)  # fmt: skip
def test_masks_lead_to_an_end_or_the_schema_is_refused(engine, schema):
    first = compiled(engine, schema)
    if isinstance(first, BadConstraint):
        assert "json_schema" in str(first)
        return
    dice = random.Random(1)
    for _ in range(6):
        matcher, text = first.copy(), b""
        while not matcher.may_stop():
            ways = sorted(ByteMatcher(matcher).next_bytes() - set(b" \t\r\n"))
            assert ways, text
            ends = [byte for byte in ways if byte in b'"]}'] if len(text) > 40 else ways
            byte = dice.choice(ends or ways)
            assert matcher.advance(byte)
            text += bytes([byte])
            assert len(text) < 400, text
        json.loads(text)


def test_what_stands_beside_a_reference_is_hidden_in_older_drafts(small):
    schema = {"$schema": "http://json-schema.org/draft-04/schema#", "$ref": "#/definitions/a",
              "type": "object", "definitions": {"a": {"enum": ["US", "\u2028"]}}}  # fmt: skip
    for text in ('"US"', '"\u2028"'):
        assert small.accepts(small.matcher(schema), text)
    assert not small.accepts(small.matcher(schema), "{}")


def test_a_schema_is_of_one_draft(small):
    part = {"$id": "http://a.b/c", "$schema": "http://json-schema.org/draft-07/schema#", "items": [False]}
    with pytest.raises(UnsupportedConstraint, match="another draft") as caught:
        small.matcher({"$defs": {"c": part}, "$ref": "http://a.b/c"})
    assert caught.value.where == "json_schema #/$defs/c"
    # Without an identifier it means nothing where it stands.
    schema = {"type": "array", "items": {"$schema": part["$schema"], "prefixItems": [False]}}
    assert not small.accepts(small.matcher(schema), "[[1]]")
    assert not small.accepts(small.matcher({**part, "$id": "x", "type": "array"}), "[1]")


def test_a_metaschema_nobody_knows_is_told_and_has_all_vocabularies(small):
    matcher = small.matcher({"$schema": "http://a.b/meta", "maximum": 3})
    assert matcher.matcher.origin.ignored == (
        "$schema 'http://a.b/meta', which is not known: read as draft 2020-12",
    )
    assert not small.accepts(matcher, "4")


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("end", ["", "#"])
def test_the_address_of_a_draft_is_read_with_either_scheme(small, scheme, end):
    schema = {
        "$schema": f"{scheme}://json-schema.org/draft-07/schema{end}",
        "type": "array",
        "items": [False],
    }
    assert small.accepts(small.matcher(schema), "[]")
    assert not small.accepts(small.matcher(schema), "[1]")
    newer = {**schema, "$schema": f"{scheme}://json-schema.org/draft/2020-12/schema{end}"}
    with pytest.raises(BadConstraint, match="prefixItems"):
        small.matcher(newer)


def test_xgrammar_tells_what_it_does_not_offer():
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "maxLength": 3}, "b": {}},
        "required": ["b"],
    }
    assert compiled("xgrammar", schema).origin.narrowed == (
        "properties come in the order of the schema",
        "properties that it does not name at #",
        "quotes, backslashes and control characters in strings at #/properties/a",
    )
    assert not compiled("xgrammar", {"type": "array", "items": {"type": "string"}}).origin.narrowed


@pytest.mark.parametrize(
    "word", [{"const": "\ud800"}, {"enum": ["a", "x\udfff"]}, {"properties": {"\ud800": {}}}]
)
def test_a_lone_surrogate_is_refused_by_its_place(small, word):
    with pytest.raises(UnsupportedConstraint, match="lone surrogate"):
        small.matcher(word)


def test_surrogates_in_pairs_and_in_remarks_are_no_mistake(small):
    schema = {"const": "\ud83d\ude0a", "description": "\ud800"}
    assert small.accepts(small.matcher(schema), '"😊"')
