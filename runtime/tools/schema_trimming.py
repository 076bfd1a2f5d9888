"""Tool schemas as models should read them: shorter, and without what says nothing."""

from __future__ import annotations

from typing import Any

_DEEPEST = 64


def trimmed(schema: Any, depth: int = 0) -> Any:
    """Without titles and defaults of null; `anyOf` of one type and null is that type."""
    if depth > _DEEPEST or not isinstance(schema, dict | list):
        return schema
    if isinstance(schema, list):
        return [trimmed(one, depth + 1) for one in schema]
    made: dict[str, Any] = {}
    for word, value in schema.items():
        if (word == "title" and isinstance(value, str)) or (word == "default" and value is None):
            continue
        if word in ("properties", "$defs", "definitions") and isinstance(value, dict):
            # Here keys are names, also one that is called "title".
            made[word] = {name: trimmed(inner, depth + 1) for name, inner in value.items()}
        elif word in ("enum", "const", "default", "examples"):
            made[word] = value
        else:
            made[word] = trimmed(value, depth + 1)
    match made.get("anyOf"):
        case [*options] if len(options) > 1 and {"type": "null"} in options:
            left = [one for one in options if one != {"type": "null"}]
            if len(left) == 1 and isinstance(left[0], dict):
                del made["anyOf"]
                made = {**left[0], **made}
    return made
