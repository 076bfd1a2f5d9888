"""Listed strings that a schema and its alternatives both name, worked out before an engine has to.

`properties` beside `anyOf` means that both hold. Where both list the strings of one property, an engine finds
out by automata which of them are left, and takes a hundred milliseconds for lists of sixty. Here the
alternatives get what is left, and the schema beside them leaves the property open. It knows lowered schemas,
and no engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LISTS = {"type", "enum"}
_LENGTHS = {"type", "minLength", "maxLength"}
_JOINS = {"$ref", "anyOf", "oneOf", "allOf"}


_MAPS = {"properties", "patternProperties", "$defs"}
_ROWS = {"anyOf", "oneOf", "allOf", "prefixItems"}
_ONES = {"items", "additionalProperties"}


def settle_lists(schema: Any) -> Any:
    """The same language; parts that need no change are shared."""
    if not isinstance(schema, dict):
        return schema
    changed: dict[str, Any] = {}
    for key, value in schema.items():
        after = value
        if key in _MAPS and isinstance(value, dict):
            after = {name: settle_lists(node) for name, node in value.items()}
            after = value if all(after[name] is value[name] for name in value) else after
        elif key in _ROWS and isinstance(value, list):
            after = [settle_lists(node) for node in value]
            after = value if all(one is other for one, other in zip(after, value)) else after
        elif key in _ONES:
            after = settle_lists(value)
        if after is not value:
            changed[key] = after
    node = {**schema, **changed} if changed else schema
    return _settled(node) if "anyOf" in node and "properties" in node else node


def _settled(node: dict[str, Any]) -> dict[str, Any]:
    own, options = node["properties"], node["anyOf"]
    if not isinstance(own, dict) or not isinstance(options, list) or not all(map(_is_open, options)):
        return node
    opened: dict[str, Any] = {}
    given: list[dict[str, Any]] = [{} for _ in options]
    for name, schema in own.items():
        listed = _strings(schema)
        if listed is None or not all(name in option.get("properties", ()) for option in options):
            continue
        left = [_left(listed, option["properties"][name]) for option in options]
        if None in left:
            continue
        opened[name] = True
        for after, some in zip(given, left):
            after[name] = {"type": "string", "enum": some} if some else False
    if not opened:
        return node
    changed = [
        {**option, "properties": {**option["properties"], **after}} for option, after in zip(options, given)
    ]
    return {**node, "properties": {**own, **opened}, "anyOf": changed}


def _is_open(option: Any) -> bool:
    """Whether it is of objects, and says all itself."""
    return (
        isinstance(option, Mapping)
        and not option.keys() & _JOINS
        and option.get("type", "object") == "object"
        and isinstance(option.get("properties", {}), Mapping)
    )


def _strings(schema: Any) -> list[str] | None:
    """The strings that `schema` lists, if that is all it says."""
    if not isinstance(schema, Mapping) or not schema.keys() <= _LISTS or "enum" not in schema:
        return None
    values = schema["enum"]
    if schema.get("type", "string") != "string" or not all(isinstance(value, str) for value in values):
        return None
    return list(values)


def _left(listed: list[str], schema: Any) -> list[str] | None:
    """Those of `listed` that `schema` takes. None: not known."""
    if schema is True or schema == {}:
        return listed
    others = _strings(schema)
    if others is not None:
        some = set(others)
        return [value for value in listed if value in some]
    if not isinstance(schema, Mapping) or not schema.keys() <= _LENGTHS or schema.get("type") != "string":
        return None
    low, high = schema.get("minLength", 0), schema.get("maxLength")
    return [value for value in listed if low <= len(value) and (high is None or len(value) <= high)]
