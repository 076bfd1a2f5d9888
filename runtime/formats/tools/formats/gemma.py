"""Gemma 4: keys without quotes, strings in marks of their own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from runtime.formats.tools.named_calls import NamedCalls
from runtime.formats.tools.pythonic import const, listed_arguments, sequence
from runtime.formats.tools.schema import is_plain, referred, text_tag, types_of, with_definitions
from runtime.formats.tools.types import Call, StructureInfo, Tool
from runtime.formats.tools.values import Dialect, text_of

_QUOTE = '<|"|>'
_KEY = re.compile(r"[\w.\-]{1,64}")
_DEEPEST = 8
_OF_ARRAYS = {"minItems", "maxItems", "uniqueItems", "contains", "prefixItems"}


class _Gemma(NamedCalls):
    def written(self, number: int, call: Call) -> str:
        return f"{self.opener}{call.name}{_literal(call.arguments)}{self.closer}"

    def structure_info(self, name: str) -> StructureInfo | None:
        return None

    def call_tag(self, tool: Tool, schema: Mapping[str, Any]) -> dict[str, Any] | None:
        content = _value_tag({"type": "object", "properties": {}, **tool.parameters}, tool.parameters, 0)
        if content is None:
            return None
        return {"type": "tag", "begin": self.opener + tool.name, "content": content, "end": self.closer}


def _value_tag(schema: Any, root: Mapping[str, Any], depth: int) -> dict[str, Any] | None:
    """The tag of one value; None if structural tags cannot express its schema."""
    schema = with_definitions(referred(schema, root), root)
    kinds = types_of(schema)
    if depth > _DEEPEST or not kinds:
        return None
    if kinds == {"string"}:
        text = text_tag(schema, str, [_QUOTE])
        return {"type": "tag", "begin": _QUOTE, "content": text, "end": _QUOTE}
    if kinds <= {"integer", "number", "boolean", "null"}:
        return {"type": "json_schema", "json_schema": schema}
    content: list[dict[str, Any]] | None = None
    if kinds == {"object"} and "properties" in schema and is_plain(schema):
        values = {key: _value_tag(one, root, depth + 1) for key, one in schema["properties"].items()}
        members = {key: one for key, one in values.items() if one is not None and _KEY.fullmatch(key)}
        if len(members) == len(values):
            content = listed_arguments(schema, ",", lambda key: sequence(const(f"{key}:"), members[key]))
        brackets = "{}"
    elif kinds == {"array"} and not schema.keys() & _OF_ARRAYS:
        one = _value_tag(schema.get("items"), root, depth + 1)
        if one is not None:
            more = {"type": "star", "content": sequence(const(","), one)}
            content = [{"type": "optional", "content": sequence(one, more)}]
        brackets = "[]"
    return None if content is None else sequence(const(brackets[0]), *content, const(brackets[1]))


def _literal(value: Any) -> str:
    match value:
        case str():
            return f"{_QUOTE}{value}{_QUOTE}"
        case Mapping():
            return f"{{{','.join(f'{key}:{_literal(one)}' for key, one in value.items())}}}"
        case list():
            return f"[{','.join(map(_literal, value))}]"
    return text_of(value)


GEMMA_4 = _Gemma(
    opener="<|tool_call>call:",
    after="",
    closer="<tool_call|>",
    dialect=Dialect(quotes=(_QUOTE,), escaped=False, bare_keys=True),
)
