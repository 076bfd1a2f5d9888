"""Arguments that a format writes as plain text, and the types that a tool's schema gives them."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping
from typing import Any

from runtime.formats.tools.types import Tool
from runtime.formats.tools.values import text_of

_DEEPEST = 16
_LONGEST_LITERAL = 20_000  # characters of a Python literal that are read
_SPELLINGS = {
    "string": "str varchar char text string enum date datetime time uuid",
    "integer": "int integer bigint smallint tinyint int8 int16 int32 int64 long short uint",
    "number": "num number float double decimal real float32 float64",
    "boolean": "bool boolean",
    "object": "object dict map struct mapping",
    "array": "array list tuple set arr sequence",
    "null": "null none nil",
}
_TYPES = {spelling: kind for kind, spellings in _SPELLINGS.items() for spelling in spellings.split()}


def type_named(name: str) -> str | None:
    """The JSON type that a schema means by a name: "varchar" is string, "list[int]" array."""
    word = name.strip().lower()
    for bracket in "[<(":
        word = word.partition(bracket)[0]
    return _TYPES.get(word.strip())


def types_of(schema: Any, depth: int = 0, root: Any = None) -> frozenset[str]:
    """The JSON types that a value of `schema` may have; empty where it does not say. root: what it refers
    to, where that is not in itself."""
    root = schema if root is None else root
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return frozenset()
    schema = referred(schema, root)
    if not isinstance(schema, Mapping):
        return frozenset()
    given = schema.get("type")
    names = given if isinstance(given, list) else [given]
    found = {kind for name in names if isinstance(name, str) and (kind := type_named(name))}
    if found:
        return frozenset(found)
    for word in ("anyOf", "oneOf"):
        parts = [types_of(part, depth + 1, root) for part in schema.get(word) or ()]
        if parts:
            return frozenset().union(*parts)
    for part in schema.get("allOf") or ():
        found |= types_of(part, depth + 1, root)
    values = schema["enum"] if isinstance(schema.get("enum"), list) else []
    values = [*values, schema["const"]] if "const" in schema else values
    found |= {_type_of(value) for value in values}
    if not found and "properties" in schema:
        return frozenset({"object"})
    return frozenset({"array"} if not found and "items" in schema else found)


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def property_of(tool: Tool, name: str) -> Any:
    """The schema of an argument; None where the tool's does not name it."""
    return _property(tool.parameters, name, tool.parameters, 0)


def _property(schema: Any, name: str, root: Mapping[str, Any], depth: int) -> Any:
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return None
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return with_definitions(referred(properties[name], root), root)
    parts = [*(schema.get("allOf") or ()), *(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]
    for part in parts:
        found = _property(referred(part, root), name, root, depth + 1)
        if found is not None:
            return found
    return None


def referred(schema: Any, root: Any) -> Any:
    """What `schema` refers to in `root`; itself where it refers to nothing."""
    for _ in range(_DEEPEST):
        if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
            break
        target: Any = root
        for step in schema["$ref"].removeprefix("#").strip("/").split("/"):
            target = target.get(step) if isinstance(target, Mapping) else None
        schema = target
    return schema


def is_plain(schema: Mapping[str, Any]) -> bool:
    """Whether it says what arguments there are by `properties` alone."""
    return not any(word in schema for word in ("$ref", "allOf", "anyOf", "oneOf", "if", "patternProperties"))


def with_definitions(schema: Any, root: Mapping[str, Any]) -> Any:
    """A part of `root` as a schema by itself: with the definitions it may refer to."""
    found = {word: root[word] for word in ("$defs", "definitions") if word in root}
    return {**schema, **found} if found and isinstance(schema, Mapping) else schema


_LIMITS = {"pattern", "format", "minLength", "maxLength", "allOf", "anyOf", "oneOf"}


def text_tag(schema: Mapping[str, Any], shown: Callable[[str], str], marks: list[str]) -> dict[str, Any]:
    """What a structural tag says of a text that is written without quotes. marks: what such a text does not
    hold where the schema says more of it; shown: how a text is written."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        texts = [shown(one) for one in values if isinstance(one, str)]
        return {"type": "or", "elements": [{"type": "const_string", "value": text} for text in texts]}
    if _LIMITS & schema.keys():
        return {"type": "any_text", "json_schema": schema, "excludes": marks}
    return {"type": "any_text"}


def typed(text: str, schema: Any) -> str:
    """The JSON of an argument written as plain text. What does not fit its type stays a text."""
    kinds = types_of(schema)
    if kinds == {"string"} or (isinstance(schema, Mapping) and text in (schema.get("enum") or ())):
        return text_of(text)
    plain = text.strip()
    if kinds & {"boolean"} and plain.lower() in ("true", "false"):
        return plain.lower()
    if plain in ("null", "None") and ("null" in kinds or "string" not in kinds):
        return "null"
    found = _read(plain)
    if found is not None and (not kinds or _type_of(found) in kinds or _near(found, kinds)):
        if isinstance(found, float) and "number" not in kinds and kinds:
            return text_of(int(found))
        return text_of(found)
    return text_of(text)


def _near(found: Any, kinds: frozenset[str]) -> bool:
    """An int is a number, and a float without a fraction an integer."""
    if isinstance(found, bool) or not isinstance(found, int | float):
        return False
    return "number" in kinds or ("integer" in kinds and found == int(found))


def _read(text: str) -> Any:
    """The value of JSON, or of a Python literal; None where it is neither, or not finite."""
    try:
        return json.loads(text, parse_constant=refused, strict=False)
    except (ValueError, RecursionError):
        pass
    if text[:1] not in "[{(" or len(text) > _LONGEST_LITERAL:
        return None
    try:
        value = ast.literal_eval(text)
        return json.loads(json.dumps(value, allow_nan=False))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def refused(name: str) -> Any:
    raise ValueError(name)


def plain(value: Any) -> str:
    """An argument as plain text, which typed() reads again."""
    return value if isinstance(value, str) else text_of(value)
