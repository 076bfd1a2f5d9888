"""What `format` does in a schema is a setting: of an engine, and of one constraint; every backend has it."""

from __future__ import annotations

import json

import pytest

from runtime.grammar.byte_matcher import BYTES, ByteMatcher, byte_matcher
from runtime.grammar.manager import GrammarManager
from runtime.grammar.table import make_backend
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import BadConstraint, BadRequest, UnsupportedConstraint
from runtime.protocol.sampling import SamplingParams

DATE = {"type": "object", "properties": {"day": {"type": "string", "format": "date"}}, "required": ["day"],
        "additionalProperties": False}  # fmt: skip
GOOD, BAD = '{"day": "2026-11-21"}', '{"day": "a Saturday"}'
WRONG = '{"day": 3}'
BACKENDS = ("auto", "llguidance", "xgrammar")


def takes(matcher, text):
    face = ByteMatcher(matcher.copy())
    return all(face.advance(byte) for byte in text.encode()) and face.may_stop()


@pytest.mark.parametrize("name", BACKENDS)
def test_an_annotation_binds_nothing_and_is_told(name):
    matcher = byte_matcher("json_schema", json.dumps(DATE), name, schema_format="annotation").matcher
    assert [takes(matcher, text) for text in (GOOD, BAD, WRONG)] == [True, True, False]
    assert matcher.origin.ignored == ("format 'date' at #/properties/day (an annotation here)",)


@pytest.mark.parametrize("name", BACKENDS)
def test_it_asserts_unless_it_is_said_otherwise(name):
    spec = json.dumps(DATE)
    if name == "xgrammar":
        with pytest.raises(UnsupportedConstraint, match="format 'date'"):
            byte_matcher("json_schema", spec, name)
        return
    for options in ({}, {"schema_format": "assertion"}):
        matcher = byte_matcher("json_schema", spec, name, **options).matcher
        assert [takes(matcher, text) for text in (GOOD, BAD)] == [True, False]
        assert not matcher.origin.ignored


@pytest.mark.parametrize("name", BACKENDS)
def test_a_constraint_says_it_over_the_backend(name):
    spec = json.dumps(DATE)
    strict, loose = (make_backend(name, BYTES, schema_format=word) for word in ("assertion", "annotation"))
    assert takes(strict.compile(Constraint("json_schema", spec, schema_format="annotation")), BAD)
    if name != "xgrammar":
        assert not takes(loose.compile(Constraint("json_schema", spec, schema_format="assertion")), BAD)


@pytest.mark.parametrize("name", ["auto", "xgrammar"])
def test_the_schemas_in_a_structural_tag_have_it_too(name):
    tag = {"type": "structural_tag", "format": {"type": "tag", "begin": "<d>", "end": "</d>",
           "content": {"type": "json_schema", "json_schema": DATE}}}  # fmt: skip
    constraint = Constraint("structural_tag", json.dumps(tag), schema_format="annotation")
    matcher = make_backend(name, BYTES).compile(constraint)
    assert takes(matcher, f"<d>{BAD}</d>")
    assert "format 'date'" in matcher.origin.ignored[0]
    if name == "auto":
        strict = make_backend(name, BYTES).compile(Constraint("structural_tag", json.dumps(tag)))
        assert [takes(strict, f"<d>{text}</d>") for text in (GOOD, BAD)] == [True, False]


def test_the_manager_keeps_the_two_apart():
    manager = GrammarManager(BYTES)
    try:
        found = [
            manager.submit(Constraint("json_schema", json.dumps(DATE), schema_format=word)).result(300)
            for word in ("assertion", "annotation", None, "annotation")
        ]
    finally:
        manager.close()
    assert [takes(matcher, BAD) for matcher in found] == [False, True, False, True]
    assert [matcher.origin.cached for matcher in found] == [False, False, False, True]


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        # Wherever a format stands: it neither asserts nor is the opposite of one.
        ({"type": ["string", "null"], "if": {"format": "date"}, "then": {"maxLength": 3}, "else": False},
         ['"abc"', "null"], ['"abcd"']),
        ({"$ref": "#/$defs/d", "$defs": {"d": {"type": "string", "format": "ipv4"}}}, ['"x"'], ["1"]),
        ({"type": "string", "allOf": [{"format": "regex"}, {"minLength": 1}]}, ['"("'], ['""']),
        ({"type": "object", "properties": {"format": {"const": "date"}}, "required": ["format"]},
         ['{"format": "date"}'], ['{"format": "time"}', "{}"]),
        ({"enum": [{"format": "date"}]}, ['{"format": "date"}'], ["{}"]),
        ({"type": "array", "items": {"type": "string", "format": "date"}, "uniqueItems": True,
          "contains": {"format": "time", "minLength": 2}}, ['["ab"]'], ['["a"]', '["ab", "ab"]']),
        ({"type": "object", "propertyNames": {"format": "date"}}, ['{"x": 1}'], []),
    ],
)  # fmt: skip
def test_annotations_everywhere(small, schema, good, bad):
    face = small.matcher(schema, schema_format="annotation")
    assert [small.accepts(face.copy(), text) for text in good] == [True] * len(good)
    assert [small.accepts(face.copy(), text) for text in bad] == [False] * len(bad)


def test_the_opposite_of_an_annotation_is_nothing(small):
    assert small.accepts(small.matcher({"not": {"format": "date"}}), '"x"')
    with pytest.raises(BadConstraint, match="nothing matches"):
        small.matcher({"not": {"format": "date"}}, schema_format="annotation")


def test_what_it_may_be(small):
    with pytest.raises(BadRequest, match="assertion, annotation"):
        small.matcher({}, schema_format="off")
    with pytest.raises(BadConstraint, match="must be one of assertion, annotation"):
        Constraint("json_schema", "{}", schema_format="off").verify()  # type: ignore[arg-type]
    with pytest.raises(BadConstraint, match="not regex"):
        Constraint("regex", "a", schema_format="annotation").verify()


def test_a_request_says_it():
    words = {"json_schema": DATE, "schema_format": "annotation", "whitespace": "compact"}
    constraint = SamplingParams.from_user(words)[1]
    assert constraint is not None
    assert (constraint.schema_format, constraint.whitespace) == ("annotation", "compact")
    with pytest.raises(BadRequest, match="needs json_schema"):
        SamplingParams.from_user({"schema_format": "annotation"})
