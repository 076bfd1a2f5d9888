"""A change made to a JSON schema and to every schema within it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["rewritten"]

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
