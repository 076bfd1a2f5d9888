"""The language of a schema, byte by byte and token by token: what a validator accepts, and nothing else."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.grammar.base import Matcher
from runtime.grammar.table import make_backend
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import BadConstraint, BadRequest, UnsupportedConstraint
from runtime.protocol.vocabulary import Vocabulary
from tests.exploring import tries
from tests.unit.runtime.grammar.json_schema.spelled import in_order, named_in

PIECES = [
    '"a',
    '":',
    '": ',
    ', "',
    '"}',
    "}}",
    "]}",
    "[]",
    "{}",
    "1,",
    "10",
    "], ",
    "true",
    "null",
    '"b"',
    'ab"',
]
EOS = 256 + len(PIECES)
VOCABULARY = Vocabulary(
    (*(bytes([value]) for value in range(256)), *(piece.encode() for piece in PIECES), b""),
    frozenset({EOS}),
    frozenset({EOS}),
)
EVERY = [
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}, "required": ["a"]},
    {"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True, "minItems": 2},
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 30},
     "contains": {"multipleOf": 7}},
    {"oneOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 5}]},
    {"type": "object", "propertyNames": {"maxLength": 2}, "additionalProperties": {"type": "null"},
     "maxProperties": 2},
    {"type": "string", "not": {"enum": ["a", "b"]}, "maxLength": 2},
    {"if": {"type": "integer"}, "then": {"multipleOf": 3}, "else": {"type": "boolean"}},
    {"type": "object", "properties": {"a": True, "b": {"type": "null"}}, "dependentRequired": {"a": ["b"]},
     "additionalProperties": False},
    {"$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "uniqueItems": True}},
     "$ref": "#/$defs/tree"},
    {"type": "object", "properties": {"x": {"anyOf": [{"type": "null"}, {"not": {"type": "string"}}]}},
     "patternProperties": {"^a": {"type": "integer"}, "^.b": {"minimum": 5}}, "additionalProperties": False},
]  # fmt: skip


def start(schema: object, **options: str) -> Matcher:
    return make_backend("llguidance", VOCABULARY, **options).compile(
        Constraint("json_schema", json.dumps(schema))
    )


def allowed(found: Matcher) -> list[int]:
    mask = found.mask()
    ids = np.flatnonzero(np.unpackbits(mask.bits.view(np.uint8), bitorder="little")).tolist()
    assert mask.allowed is None or mask.allowed.tolist() == ids
    return ids


@settings(deadline=None, max_examples=tries(120), suppress_health_check=list(HealthCheck))
@given(st.data())
def test_accepts_what_a_validator_accepts(small, data):
    schema = data.draw(small.schemas)
    instances = data.draw(st.lists(small.values, min_size=3, max_size=6))
    try:
        face = small.matcher(schema)
    except BadConstraint:
        assert not any(small.is_valid(schema, value) for value in instances)
        return
    for value in map(small.shortest, instances):
        # Members come in the schema's order; those of an enum's objects in the enum's.
        texts = [json.dumps(one, ensure_ascii=False) for one in (value, in_order(value, named_in(schema)))]
        accepted = any(small.accepts(face.copy(), text) for text in texts)
        assert accepted == small.is_valid(schema, value), texts


def beyond_floats(text: bytes) -> bool:
    """Whether some number of the JSON becomes an infinity."""
    numbers: list[float] = []
    json.loads(text, parse_float=lambda number: numbers.append(float(number)))
    return any(map(math.isinf, numbers))


@settings(deadline=None, max_examples=tries(60), suppress_health_check=list(HealthCheck))
@given(st.data(), st.randoms(use_true_random=False))
def test_whatever_stops_is_valid(small, data, pick):
    schema = data.draw(small.schemas)
    """A walk along next_bytes(), towards an end: whenever it may stop the text is a valid document (as far as
    the reference can say: it has no numbers such as 1e999)."""
    try:
        face = small.matcher(schema, whitespace="compact")
    except BadConstraint:
        return
    text = b""
    for _ in range(80):
        if face.may_stop() and not beyond_floats(text):
            assert small.is_valid(schema, json.loads(text)), text
        nexts = face.next_bytes()
        likely = sorted(nexts & set(b'"]},:[{0123456789abtrue')) or sorted(nexts)
        if not likely:
            break
        byte = pick.choice(likely)
        assert face.advance(byte)
        text += bytes([byte])


@pytest.mark.parametrize("schema", EVERY)
def test_masks_say_what_advance_does(schema):
    found, pick = start(schema), random.Random(3)
    for _ in range(10):
        ids = allowed(found)
        for token in range(len(VOCABULARY)):
            assert found.copy().advance(token) == (token in ids), (token, VOCABULARY.tokens[token])
        assert (EOS in ids) == found.may_stop()
        texts = [token for token in ids if token != EOS]
        if not texts:
            break
        assert found.advance(pick.choice(texts))


@pytest.mark.parametrize("schema", EVERY)
def test_rollback_and_copies_are_exact(schema):
    found, pick = start(schema), random.Random(5)
    trail = [allowed(found)]
    for _ in range(12):
        ids = [token for token in allowed(found) if token != EOS]
        if not ids:
            break
        token = pick.choice(ids)
        taken = found.advance_bytes(VOCABULARY.tokens[token]) if pick.random() < 0.3 else found.advance(token)
        assert taken
        trail.append(allowed(found))
    steps = len(trail) - 1
    for _ in range(10):
        back = pick.randint(0, steps)
        twin = found.copy()
        twin.rollback(back)
        assert allowed(twin) == trail[steps - back]
        assert allowed(found) == trail[-1]
    with pytest.raises(ValueError, match="undo"):
        found.copy().rollback(steps + 1)
    found.rollback(steps)
    assert allowed(found) == trail[0]


@pytest.mark.parametrize("schema", EVERY)
def test_walks_with_rejections_end_in_valid_documents(small, schema):
    """As a scheduler does it: sample from the mask; where nothing is left, go back and forbid."""
    pick = random.Random(7)
    for _ in range(12):
        found, text, rejections = start(schema, whitespace="compact"), [], 0
        for _ in range(400):
            ids = allowed(found)
            if not ids:
                rejection = found.verdict()
                assert rejection is not None
                assert rejection.back, rejection.reason
                found.retract(rejection)
                del text[len(text) - rejection.back :]
                rejections += 1
                assert rejections < 200
                continue
            ends = [token for token in (EOS, ord('"'), ord("}"), ord("]")) if token in ids]
            token = ends[0] if ends and pick.random() < 0.4 else pick.choice(ids)
            assert found.advance(token)
            if token == EOS:
                break
            text.append(VOCABULARY.tokens[token])
        else:
            pytest.fail(f"no end: {b''.join(text)!r}")
        whole = b"".join(text)
        assert beyond_floats(whole) or small.is_valid(schema, json.loads(whole))


def test_a_value_is_refused_as_it_closes(small):
    face = small.matcher({"type": "array", "items": {"type": "string", "not": {"enum": ["ab"]}}})
    for byte in b'["ab':
        assert face.advance(byte)
    assert ord('"') not in face.next_bytes()
    assert not face.advance(ord('"'))
    assert face.advance(ord("c"))
    assert ord('"') in face.next_bytes()


def test_a_repeated_item_is_refused_before_the_array_ends(small):
    face = small.matcher({"type": "array", "items": {"enum": [1, 10]}, "uniqueItems": True})
    for byte in b"[1,1":
        assert face.advance(byte)
    assert face.next_bytes() == {ord("0")}


def test_dead_ends_say_how_far_back():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
              "additionalProperties": False, "not": {"const": {"a": 1}}}  # fmt: skip
    found = start(schema)
    for data in (b"{", b'"a', b'":', b"1", b" "):
        assert found.advance(VOCABULARY.tokens.index(data))
    assert allowed(found) == []
    rejection = found.verdict()
    assert rejection is not None
    assert (rejection.back, "not" in rejection.reason) == (1, True)
    found.retract(rejection)
    assert found.verdict() is None
    assert ord(" ") not in allowed(found)
    assert found.advance(ord("2"))
    assert found.advance(ord("}"))
    assert found.is_terminated()


def test_properties_come_in_the_order_of_the_schema(small):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}, "required": ["a", "b"],
              "additionalProperties": False}  # fmt: skip
    assert small.accepts(small.matcher(schema), '{"a": 2, "b": 1}')
    assert not small.accepts(small.matcher(schema), '{"b": 1, "a": 2}')
    assert not small.accepts(small.matcher(schema), '{"a": 1}')
    face = small.matcher(schema)
    assert face.advance(ord("{"))
    assert face.next_bytes() <= set(b'" \r\n')


@pytest.mark.parametrize("values", [{}, True, {"type": "null"}])
def test_names_that_are_listed_beside_unevaluated_properties(small, values):
    schema = {"unevaluatedProperties": values, "propertyNames": {"enum": ["a", "b"]}}
    face = small.matcher(schema)
    for value in ({}, {"b": None}, {"a": None, "b": 1}, {"c": None}, [None]):
        assert small.accepts(face.copy(), json.dumps(value)) == small.is_valid(schema, value), value


def test_spellings_of_one_value(small):
    assert small.accepts(small.matcher({"const": 1.0}), "1")
    assert not small.accepts(small.matcher({"type": "integer"}), "1.5")
    assert small.accepts(small.matcher({"type": "object"}), json.dumps({"é": "ü"}, ensure_ascii=False))
    assert not small.accepts(small.matcher({"properties": {"a": {"type": "integer"}}}), r'{"\u0061": "x"}')


@pytest.mark.parametrize(
    ("whitespace", "good", "bad"),
    [
        ("compact", ['{"a":[1,2]}'], ['{"a": [1,2]}', '{ "a":[1,2]}']),
        ("single", ['{"a":[1,2]}', '{"a": [1, 2]}', '{ "a" : [ 1 , 2 ] }'],
         ['{"a":  [1,2]}', '{\n"a":[1,2]}']),
        ("flexible", [json.dumps({"a": [1, 2]}, indent=indent) for indent in (None, 0, 2, 8, "\t")],
         ['{"a":  [1,2]}', '{\n\n"a":[1,2]}']),
    ],
)  # fmt: skip
def test_whitespace_is_bounded(small, whitespace, good, bad):
    for text in good:
        assert small.accepts(small.matcher({"type": "object"}, whitespace=whitespace), text)
    for text in bad:
        assert not small.accepts(small.matcher({"type": "object"}, whitespace=whitespace), text)


def test_options_are_checked(small):
    with pytest.raises(BadRequest, match="whitespace"):
        small.matcher({}, whitespace="none")
    with pytest.raises(BadRequest, match="colour"):
        small.matcher({}, colour="red")


def test_any_json():
    spec = "$$ANY$$"
    found = make_backend("auto", VOCABULARY).compile(Constraint("json_schema", spec))
    assert found.origin.exact
    for text in ('{"a": [1, null]}', "[]", '"x"', "-1.5e3", "true"):
        twin = found.copy()
        assert twin.advance_bytes(text.encode())
        assert twin.may_stop()
    assert not found.advance_bytes(b"x")


def test_origin_tells_backend_and_checks():
    found = make_backend("auto", VOCABULARY).compile(
        Constraint(
            "json_schema", '{"properties": {"t": {"items": {}, "uniqueItems": true, "format": "topic"}}}'
        )
    )
    assert found.origin.backend == "llguidance"
    assert found.origin.checked == ("uniqueItems at #/properties/t",)
    assert found.origin.ignored == ("format 'topic' at #/properties/t",)
    assert found.copy().origin == found.origin
    assert found.origin.why


@pytest.mark.parametrize(
    ("schema", "kind", "told"),
    [
        ({"type": "text"}, BadConstraint, r"#/type.*one or more of"),
        ({"properties": {"a/b": {"minimum": "1"}}}, BadConstraint, r"#/properties/a~1b/minimum"),
        ({"$ref": "http://elsewhere/x.json"}, UnsupportedConstraint, r"#.*elsewhere.*leads out of"),
        ({"anyOf": []}, BadConstraint, r"#/anyOf"),
        ({"enum": []}, BadConstraint, r"#/enum"),
        ({"items": {"pattern": "(a"}}, BadConstraint, r"#/items/pattern"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, BadConstraint, r"nothing matches"),
        (False, BadConstraint, r"nothing matches"),
        ({"not": {}}, BadConstraint, r"nothing matches"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, BadConstraint, r"#: nothing matches"),
        ({"type": "object", "properties": {"a": {"type": "string", "minLength": 2, "maxLength": 1}},
          "required": ["a"]}, BadConstraint, r"#/properties/a: nothing matches"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, BadConstraint,
         r"#/properties/a: nothing matches"),
        ({"$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}},
          "$ref": "#/$defs/n"}, BadConstraint, r"nothing matches.*infinite"),
        ({"enum": ["a"], "pattern": "^b"}, BadConstraint, r"#: nothing matches"),
    ],
)  # fmt: skip
def test_refusals_name_keyword_and_place(small, schema, kind, told):
    with pytest.raises(kind, match=told):
        small.matcher(schema)


@pytest.mark.parametrize("spec", ['{"type":', "[]", "3", '{"minimum": NaN}', "{'a': 1}"])
def test_what_is_not_a_schema_is_told(spec):
    with pytest.raises(BadConstraint, match="json_schema"):
        make_backend("llguidance", VOCABULARY).compile(Constraint("json_schema", spec))


def _chain(count: int, link) -> dict:
    links = {str(i): link(f"#/$defs/{i + 1}") for i in range(count)}
    return {"$ref": "#/$defs/0", "$defs": links | {str(count): {"type": "null"}}}


@pytest.mark.parametrize(
    "schema",
    [
        _chain(5000, lambda ref: {"$ref": ref}),
        _chain(5000, lambda ref: {"type": "object", "properties": {"x": {"$ref": ref}}}),
        _chain(5000, lambda ref: {"allOf": [{"$ref": ref}, {"maxProperties": 3}]}),
        _chain(3000, lambda ref: {"not": {"$ref": ref}}),
        {"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(5)]} for i in range(8)]},
        {"$ref": "#"},
        {"properties": {f"p{i}": {"type": "string", "maxLength": i} for i in range(2000)}},
        {"enum": [f"value {i}" for i in range(20000)]},
        {"type": "string", "pattern": "^(a{1,500}){1,500}$"},
        {"type": "array", "minItems": 10**9},
    ],
)  # fmt: skip
def test_hostile_schemas_are_refused_or_bounded(small, schema):
    try:
        face = small.matcher(schema)
    except BadConstraint:
        return
    for byte in b'{"x": 1}':
        if not face.advance(byte):
            break


def test_nesting_is_bounded():
    spec = '{"items":' * 3000 + "{}" + "}" * 3000
    with pytest.raises(BadConstraint, match="nested"):
        make_backend("llguidance", VOCABULARY).compile(Constraint("json_schema", spec))
