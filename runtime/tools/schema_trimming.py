"""Tool schemas as models should read them: shorter, and without what says nothing."""

from __future__ import annotations

from typing import Any

from runtime.formats.schema_walk import rewritten


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
