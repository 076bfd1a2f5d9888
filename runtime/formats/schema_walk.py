"""Rewrites JSON schemas: applies a change to a schema and every schema within it; shortens schemas for a
model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

_DEEPEST = 64
# Their keys are names chosen by the schema's author.
_NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
# Their contents are values, not schemas.
_VALUES = frozenset(("enum", "const", "default", "examples"))


def rewritten(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]], depth: int = 0) -> Any:
    """A copy of the schema with `change` applied, innermost schemas first. Parts nested deeper than 64 levels
    stay unchanged."""
    if depth > _DEEPEST or isinstance(schema, str):
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
