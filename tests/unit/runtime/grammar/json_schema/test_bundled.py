"""References to other documents: nothing is fetched, so they are refused by name; with those documents under
$defs, each with its `$id` (JSON Schema 2020-12, core, section 9.3), they mean what they mean anywhere."""

from __future__ import annotations

import pytest

from runtime.protocol.errors import UnsupportedConstraint

AT = "http://a.invalid/"
PARTS = {
    "integer": {"$id": f"{AT}integer.json", "type": "integer"},
    "parts": {"$id": f"{AT}parts.json", "$defs": {
        "integer": {"type": "integer"}, "again": {"$ref": "#/$defs/integer"},
        "named": {"$anchor": "named", "type": "integer"}}},
    "inner": {"$id": f"{AT}folder/inner.json", "type": "integer"},
    "names": {"$id": f"{AT}names.json", "type": "string",
              "$defs": {"orNull": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}}},
    "urn": {"$id": "urn:a:b", "type": "string", "$defs": {"x": {"$anchor": "x", "maxLength": 2}}},
    "via": {"$id": f"{AT}deep/via.json", "type": "object", "properties": {"foo": {"$ref": "texts.json"}}},
    "texts": {"$id": f"{AT}deep/texts.json", "type": "string"},
    "tree": {"$id": f"{AT}tree.json", "$dynamicAnchor": "node", "type": "object", "properties": {
        "data": True, "children": {"type": "array", "items": {"$dynamicRef": "#node"}}}},
    "loose": {"$id": f"{AT}loose.json", "$ref": "#/$defs/foo", "$defs": {
        "foo": {"$dynamicRef": "#far"}, "far": {"$dynamicAnchor": "far", "type": "integer"}}},
    "open": {"$id": f"{AT}open.json", "type": "object",
             "properties": {"elements": {"type": "array", "items": {"$dynamicRef": "#elements"}}},
             "required": ["elements"], "additionalProperties": False,
             "$defs": {"elements": {"$dynamicAnchor": "elements"}}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"$ref": f"{AT}integer.json"}, "1", '"a"'),
        ({"$ref": f"{AT}parts.json#/$defs/integer"}, "1", '"a"'),
        ({"$ref": f"{AT}parts.json#named"}, "1", '"a"'),
        ({"$ref": f"{AT}parts.json#/$defs/again"}, "1", '"a"'),
        ({"$id": f"{AT}root.json", "$ref": "parts.json#/$defs/again"}, "1", '"a"'),
        ({"$id": AT, "type": "array", "items": {"$id": "folder/", "items": {"$ref": "inner.json"}}},
         "[[1]]", '[["a"]]'),
        ({"$id": f"{AT}x.json", "$ref": "#/$defs/own", "$defs": {
            "own": {"$id": "folder/", "type": "array", "items": {"$ref": "inner.json"}}}}, "[1]", '["a"]'),
        ({"$id": f"{AT}object", "type": "object", "properties": {"n": {"$ref": "names.json#/$defs/orNull"}}},
         '{"n": null}', '{"n": {}}'),
        ({"$ref": "urn:a:b"}, '"a"', "1"),
        ({"$ref": "urn:a:b#x", "type": "string"}, '"ab"', '"abc"'),
        ({"$ref": f"{AT}deep/via.json"}, '{"foo": "1"}', '{"foo": 1}'),
        ({"$ref": f"{AT}loose.json#/$defs/foo"}, "1", '"a"'),
        ({"$id": f"{AT}strict.json", "$dynamicAnchor": "node", "$ref": "tree.json",
          "unevaluatedProperties": False},
         '{"children": [{"data": 1}]}', '{"children": [{"daat": 1}]}'),
        ({"$id": f"{AT}closed.json", "$ref": "open.json",
          "$defs": {"elements": {"$dynamicAnchor": "elements", "properties": {"a": True}, "required": ["a"],
                                 "additionalProperties": False}}},
         '{"elements": [{"a": 1}]}', '{"elements": [{"b": 1}]}'),
    ],
)  # fmt: skip
def test_a_bundle_is_one_document(small, schema, good, bad):
    bundle = {**schema, "$defs": {**schema.get("$defs", {}), **PARTS}}
    assert small.accepts(small.matcher(bundle), good)
    assert not small.accepts(small.matcher(bundle), bad)
    with pytest.raises(UnsupportedConstraint, match="nothing is fetched") as caught:
        small.matcher(schema)
    assert "$ref" in caught.value.message
    assert str(caught.value.where).startswith("json_schema #")
