"""JSON schemas rewritten: a change made to a schema and every schema within it; schemas shortened for a
model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

_DEEPEST = 64
# The keys of these are names that the schema's author chose.
_NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
# These hold values, not schemas.
_VALUES = frozenset(("enum", "const", "default", "examples"))


def rewritten(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]], depth: int = 0) -> Any:
    """A copy of the schema to which `change` was applied, to the innermost schemas first. What is nested
    deeper than 64 levels stays as it is."""
    if depth > _DEEPEST or isinstance(schema, str):
        return schema
    if isinstance(schema, Sequence):
        return [rewritten(one, change, depth + 1) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    made: dict[str, Any] = {}
    for word, value in schema.items():
        if word in _VALUES:
            made[word] = value
        elif word in _NAMED and isinstance(value, Mapping):
            made[word] = {name: rewritten(one, change, depth + 1) for name, one in value.items()}
        else:
            made[word] = rewritten(value, change, depth + 1)
    return change(made)


def trimmed(schema: Any) -> Any:
    """Without titles and defaults of null; `anyOf` of one type and null is that type."""
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
