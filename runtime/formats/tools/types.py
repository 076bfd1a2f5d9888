"""The inputs and outputs of a tool-call parser."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec


class ToolCallItem(msgspec.Struct):
    """A piece of a call. tool_index: index of the call in the reply (-1: a forwarded call of an unknown
    tool). name: on a call's first piece, else None. parameters: the next piece of its arguments' JSON
    text."""

    tool_index: int
    name: str | None = None
    parameters: str = ""


class StreamingParseResult(msgspec.Struct):
    """The results of a piece of text: content, and pieces of calls in order."""

    normal_text: str = ""
    calls: list[ToolCallItem] = msgspec.field(default_factory=list)


class StructureInfo(msgspec.Struct, frozen=True):
    """The texts around the arguments of a call of one tool; `trigger`: the text at which a constraint
    begins."""

    begin: str
    end: str
    trigger: str


@dataclass(frozen=True)
class Tool:
    """A function that a model may call. parameters: JSON schema of its arguments, an object."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    description: str | None = None
    strict: bool = False

    @staticmethod
    def of(definition: Any) -> Tool:
        """From {"type": "function", "function": {...}}, the function alone, a Tool, or an object with the
        same attributes. Raises ValueError."""
        if isinstance(definition, Tool):
            return definition
        inner = _get(definition, "function") or definition
        name = _get(inner, "name")
        if not isinstance(name, str) or not name:
            raise ValueError(f"a tool needs a name: {definition!r:.200}")
        schema = _get(inner, "parameters")
        if schema is None:
            schema = _get(inner, "input_schema")
        if schema is not None and not isinstance(schema, Mapping):
            raise ValueError(f"the parameters of tool {name!r} must be a JSON schema, an object")
        return Tool(name, schema or {}, _get(inner, "description"), bool(_get(inner, "strict")))


def tools_of(definitions: Iterable[Any] | None) -> tuple[Tool, ...]:
    return tuple(Tool.of(one) for one in definitions or ())


def _get(source: Any, name: str) -> Any:
    return source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)


@dataclass(frozen=True)
class Call:
    """A complete call, to be rendered. arguments: parsed JSON."""

    name: str
    arguments: Mapping[str, Any]
