"""JSON schemas of tools: arguments that a format writes as plain text converted to their types, schemas
rewritten, and shortened for a model."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from runtime.formats.tools.types import Tool
from runtime.formats.tools.values import text_of

_DEEPEST = 16
_LONGEST_LITERAL = 20_000  # maximum characters of a Python literal
_SPELLINGS = {
    "string": "str varchar char text string enum date datetime time uuid",
    "integer": "int integer bigint smallint tinyint int8 int16 int32 int64 long short uint",
    "number": "num number float double decimal real float32 float64",
    "boolean": "bool boolean",
    "object": "object dict map struct mapping",
    "array": "array list tuple set arr sequence",
    "null": "null none nil",
}
_TYPE_NAMES: Mapping[type, str] = {
    type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array",
}  # fmt: skip
_TYPES = {spelling: kind for kind, spellings in _SPELLINGS.items() for spelling in spellings.split()}


def type_named(name: str) -> str | None:
    """The JSON type that a schema's type name means: "varchar" is string, "list[int]" array."""
    word = name.strip().lower()
    for bracket in "[<(":
        word = word.partition(bracket)[0]
    return _TYPES.get(word.strip())


def types_of(schema: Any, depth: int = 0, root: Any = None) -> frozenset[str]:
    """The JSON types that a value of `schema` may have; empty if it does not say. root: the schema for
    references, if not `schema` itself."""
    root = schema if root is None else root
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return frozenset()
    schema = referred(schema, root)
    if not isinstance(schema, Mapping):
        return frozenset()
    declared = schema.get("type")
    names = declared if isinstance(declared, list) else [declared]
    kinds = {kind for name in names if isinstance(name, str) and (kind := type_named(name))}
    if kinds:
        return frozenset(kinds)
    for word in ("anyOf", "oneOf"):
        parts = [types_of(part, depth + 1, root) for part in schema.get(word) or ()]
        if parts:
            return frozenset().union(*parts)
    for part in schema.get("allOf") or ():
        kinds |= types_of(part, depth + 1, root)
    values = schema["enum"] if isinstance(schema.get("enum"), list) else []
    values = [*values, schema["const"]] if "const" in schema else values
    kinds |= {_type_of(value) for value in values}
    if not kinds and "properties" in schema:
        return frozenset({"object"})
    return frozenset({"array"} if not kinds and "items" in schema else kinds)


def _type_of(value: Any) -> str:
    return _TYPE_NAMES.get(type(value), "object")


def property_of(tool: Tool, name: str) -> Any:
    """The schema of an argument; None if the tool's does not name it."""
    return _property(tool.parameters, name, tool.parameters, 0)


def _property(schema: Any, name: str, root: Mapping[str, Any], depth: int) -> Any:
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return None
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return with_definitions(referred(properties[name], root), root)
    parts = [*(schema.get("allOf") or ()), *(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]
    for part in parts:
        schema_of_part = _property(referred(part, root), name, root, depth + 1)
        if schema_of_part is not None:
            return schema_of_part
    return None


def referred(schema: Any, root: Any) -> Any:
    """The schema that `schema` refers to in `root`; itself if it has no reference."""
    for _ in range(_DEEPEST):
        if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
            break
        target: Any = root
        for step in schema["$ref"].removeprefix("#").strip("/").split("/"):
            target = target.get(step) if isinstance(target, Mapping) else None
        schema = target
    return schema


def is_plain(schema: Mapping[str, Any]) -> bool:
    """Whether `properties` alone determines the arguments."""
    return not any(word in schema for word in ("$ref", "allOf", "anyOf", "oneOf", "if", "patternProperties"))


def with_definitions(schema: Any, root: Mapping[str, Any]) -> Any:
    """A part of `root` as a standalone schema, with the definitions that it may refer to."""
    definitions = {word: root[word] for word in ("$defs", "definitions") if word in root}
    return {**schema, **definitions} if definitions and isinstance(schema, Mapping) else schema


_LIMITS = {"pattern", "format", "minLength", "maxLength", "allOf", "anyOf", "oneOf"}


def text_tag(schema: Mapping[str, Any], shown: Callable[[str], str], marks: list[str]) -> dict[str, Any]:
    """The structural tag of a text that is written without quotes. marks: texts that it must not contain, if
    the schema restricts it; shown: how a text is written."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        texts = [shown(one) for one in values if isinstance(one, str)]
        return {"type": "or", "elements": [{"type": "const_string", "value": text} for text in texts]}
    if _LIMITS & schema.keys():
        return {"type": "any_text", "json_schema": schema, "excludes": marks}
    return {"type": "any_text"}


def typed(text: str, schema: Any) -> str:
    """The JSON of an argument written as plain text. Text that does not fit its type stays a string."""
    kinds = types_of(schema)
    if kinds == {"string"} or (isinstance(schema, Mapping) and text in (schema.get("enum") or ())):
        return text_of(text)
    plain = text.strip()
    if kinds & {"boolean"} and plain.lower() in ("true", "false"):
        return plain.lower()
    if plain in ("null", "None") and ("null" in kinds or "string" not in kinds):
        return "null"
    value = _read(plain)
    if value is not None and (not kinds or _type_of(value) in kinds or _near(value, kinds)):
        if isinstance(value, float) and "number" not in kinds and kinds:
            return text_of(int(value))
        return text_of(value)
    return text_of(text)


def _near(value: Any, kinds: frozenset[str]) -> bool:
    """Whether an int can be a number, or a float without a fraction an integer."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return "number" in kinds or ("integer" in kinds and value == int(value))


def _read(text: str) -> Any:
    """The value of JSON, or of a Python literal; None if it is neither, or not finite."""
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
    """An argument as plain text, which typed() reads back."""
    return value if isinstance(value, str) else text_of(value)


# -- schemas rewritten ---------------------------------------------------------------------------------------

_DEEPEST_SCHEMA = 64
# Their keys are names chosen by the schema's author.
_NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
# Their contents are values, not schemas.
_VALUES = frozenset(("enum", "const", "default", "examples"))


def rewritten(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]], depth: int = 0) -> Any:
    """A copy of the schema with `change` applied, innermost schemas first. Parts nested deeper than 64 levels
    stay unchanged."""
    if depth > _DEEPEST_SCHEMA or isinstance(schema, str):
        return schema
    if isinstance(schema, Sequence):
        return [rewritten(one, change, depth + 1) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    changed: dict[str, Any] = {}
    for word, value in schema.items():
        if word in _VALUES:
            changed[word] = value
        elif word in _NAMED and isinstance(value, Mapping):
            changed[word] = {name: rewritten(one, change, depth + 1) for name, one in value.items()}
        else:
            changed[word] = rewritten(value, change, depth + 1)
    return change(changed)


def trimmed(schema: Any) -> Any:
    """Without titles and null defaults; `anyOf` of one type and null becomes that type."""
    return rewritten(schema, _shorter)


def _shorter(schema: dict[str, Any]) -> dict[str, Any]:
    if isinstance(schema.get("title"), str):
        del schema["title"]
    if "default" in schema and schema["default"] is None:
        del schema["default"]
    match schema.get("anyOf"):
        case [*options] if len(options) > 1 and {"type": "null"} in options:
            left = [one for one in options if one != {"type": "null"}]
            if len(left) == 1 and isinstance(left[0], dict):
                del schema["anyOf"]
                return {**left[0], **schema}
    return schema
