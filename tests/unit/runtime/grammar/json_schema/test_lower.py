"""Lowering, references: what goes to the engine and what is left to check."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.grammar.json_schema.document import SchemaDocument, show
from runtime.grammar.json_schema.lower import lower
from runtime.grammar.json_schema.lowering import LADDER, Relaxation


def plan(schema: Any, relaxation: Relaxation = LADDER[0]) -> tuple[dict[str, Any], tuple[str, ...]]:
    made = lower(SchemaDocument(schema), relaxation)
    return made.schema, made.listed()


def test_references_become_local():
    schema = {
        "$id": "http://x/y",
        "$ref": "#thing",
        "$defs": {"t": {"$anchor": "thing", "items": {"$ref": "y#/$defs/t"}}},
    }
    assert plan(schema) == ({"$ref": "#/$defs/d0", "$defs": {"d0": {"items": {"$ref": "#/$defs/d0"}}}}, ())


def test_old_drafts_are_read_as_such():
    four = {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "minimum": 1,
        "exclusiveMinimum": True,
        "const": 3,
    }
    assert plan(four)[0] == {"exclusiveMinimum": 1}
    seven = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "items": [{"type": "null"}, {"$ref": "#/items/0", "type": "string"}],
        "additionalItems": False,
    }
    null = {"type": "null"}
    assert plan(seven)[0] == {
        "prefixItems": [null, {"$ref": "#/$defs/d0"}],
        "items": False,
        "$defs": {"d0": null},
    }


@pytest.mark.parametrize(
    ("schema", "checks"),
    [
        ({"uniqueItems": True}, ["uniqueItems at #"]),
        ({"uniqueItems": False, "minContains": 2}, []),
        ({"uniqueItems": True, "maxItems": 1}, []),
        ({"properties": {"a": {"contains": {}}}}, ["contains at #/properties/a"]),
        ({"then": {"type": "null"}}, []),
        ({"pattern": "^(?=a)"}, ["pattern at #"]),
        ({"format": "regex"}, ["format at #"]),
        ({"format": "date"}, []),
        ({"minProperties": 2}, ["minProperties at #"]),
        ({"not": {"required": ["a"]}}, ["not at #"]),
        ({"not": {"multipleOf": 2}}, ["not at #"]),
        ({"unevaluatedProperties": False, "properties": {"a": {}}}, []),
        (
            {"unevaluatedProperties": False, "allOf": [{"properties": {"a": {}}}]},
            ["unevaluatedProperties at #"],
        ),
        ({"propertyNames": {"maxLength": 3}}, []),
        ({"propertyNames": {"format": "date"}}, ["propertyNames at #"]),
        ({"dependencies": {"a": ["b"]}}, ["dependencies at #"]),
    ],
)
def test_what_is_left_to_check(schema, checks):
    assert list(plan(schema)[1]) == checks


def test_unknown_keywords_are_annotations():
    assert plan({"x-guidance": {"lenient": True}, "deprecated": True, "units": "cm"}) == ({}, ())


def test_order_of_keywords_is_kept():
    schema, _ = plan({"properties": {"b": {}, "a": {}}, "allOf": [{"properties": {"c": {}}}]})
    assert list(schema) == ["properties", "allOf"]
    assert list(schema["properties"]) == ["b", "a"]


def test_places_are_json_pointers():
    assert show(("properties", "a/b~c", "items", 0)) == "#/properties/a~1b~0c/items/0"
