"""What the values of JSON Schema keywords must look like; the first that does not is told with its place."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from runtime.grammar.json_schema.refs import KIND, Place, mistake, show
from runtime.protocol.errors import UnsupportedConstraint

_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")

Test = Callable[[Any], bool]


def _count(value: Any) -> bool:
    return _number(value) and value >= 0 and float(value).is_integer()


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _schema(value: Any) -> bool:
    return isinstance(value, (bool, Mapping))


def _schemas(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_schema, value))


def _schema_map(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_schema, value.values()))


def _type(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in _TYPES for name in names)


def _is_string(value: Any) -> bool:
    return isinstance(value, str)


_COUNT = (_count, "a count: a whole number, 0 or more")
_NUMBER = (_number, "a finite number")
_SCHEMA = (_schema, "a schema: an object or a boolean")
_SCHEMAS = (_schemas, "a non-empty list of schemas")
_MAP = (_schema_map, "an object whose values are schemas")
_TEXT = (_is_string, "a string")

_SHAPES: dict[str, tuple[Test, str]] = {
    "type": (_type, f"one or more of {', '.join(_TYPES)}"),
    "enum": (lambda value: isinstance(value, list), "a list of values"),
    "multipleOf": (lambda value: _number(value) and value > 0, "a number above 0"),
    "minimum": _NUMBER,
    "maximum": _NUMBER,
    "exclusiveMinimum": _NUMBER,
    "exclusiveMaximum": _NUMBER,
    "required": (_strings, "a list of strings"),
    "uniqueItems": (lambda value: isinstance(value, bool), "a boolean"),
    "items": (
        lambda value: _schema(value) or (isinstance(value, list) and all(map(_schema, value))),
        "a schema, or a list of schemas",
    ),
    "dependentRequired": (
        lambda value: isinstance(value, Mapping) and all(map(_strings, value.values())),
        "an object of lists of strings",
    ),
    "dependencies": (
        lambda value: (
            isinstance(value, Mapping) and all(_strings(item) or _schema(item) for item in value.values())
        ),
        "an object of schemas and lists of strings",
    ),
    "format": _TEXT,
    "pattern": _TEXT,
    "$ref": _TEXT,
    "$dynamicRef": _TEXT,
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties"), _COUNT),
    **dict.fromkeys(("maxProperties", "minContains", "maxContains"), _COUNT),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), _SCHEMAS),
    **dict.fromkeys(("properties", "patternProperties", "dependentSchemas"), _MAP),
    **dict.fromkeys(("not", "if", "then", "else", "contains", "propertyNames"), _SCHEMA),
    **dict.fromkeys(("additionalProperties", "additionalItems"), _SCHEMA),
    **dict.fromkeys(("unevaluatedProperties", "unevaluatedItems"), _SCHEMA),
}
_SINCE = {
    "const": 6, "contains": 6, "propertyNames": 6, "if": 7, "then": 7, "else": 7, "dependentRequired": 2019,
    "dependentSchemas": 2019, "minContains": 2019, "maxContains": 2019, "unevaluatedItems": 2019,
    "unevaluatedProperties": 2019, "prefixItems": 2020, "$dynamicRef": 2020, "$recursiveRef": 2019,
}  # fmt: skip
_DRAFT_3 = {"disallow": "not", "extends": "allOf", "divisibleBy": "multipleOf"}
"""Keywords that no later draft knows, and what says the same now."""
_UNTIL = {"additionalItems": 2019, "$recursiveRef": 2019}


KEYWORDS = ("const", *_SHAPES)
"""All that say what is valid, of all drafts."""


def known(word: str, draft: int) -> bool:
    """Whether `word` asserts something in that draft."""
    return _SINCE.get(word, 0) <= draft <= _UNTIL.get(word, 9999)


def check_shapes(place: Place, node: Mapping[str, Any], draft: int) -> None:
    """Raises BadConstraint for the first keyword of `node` whose value is not of its kind, and
    UnsupportedConstraint for one of draft 3."""
    for word, value in node.items():
        if word in _DRAFT_3:
            raise UnsupportedConstraint(
                f"{word} is a keyword of draft 3, which is not supported",
                where=f"{KIND} {show((*place, word))}",
                hint=f"use {_DRAFT_3[word]}",
            )
        shape = _SHAPES.get(word)
        if shape is None or not known(word, draft):
            continue
        if word.startswith("exclusive") and draft <= 4 and isinstance(value, bool):
            continue
        if not shape[0](value):
            raise mistake(f"{word} must be {shape[1]}, not {shown(value)}", (*place, word))


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def canonical(value: object) -> str:
    """The same text for values that JSON Schema calls equal."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: object) -> object:
    match value:
        case float() if value.is_integer():
            return int(value)
        case list():
            return [_plain(item) for item in value]
        case dict():
            return {name: _plain(item) for name, item in value.items()}
        case _:
            return value
