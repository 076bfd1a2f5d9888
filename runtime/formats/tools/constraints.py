"""Constraints of replies that may, or must, call tools.

The structural tag of a format comes from its own declaration. A format that structural tags cannot express is
replaced by a JSON list of calls, which the parser "json-array" reads.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from runtime.formats.tools.base import BaseFormatDetector
from runtime.formats.tools.types import Tool
from runtime.protocol.errors import BadRequest

ToolChoice: TypeAlias = Literal["auto", "none", "required"] | str
"""A tool's name is written with "=" before it ("=search"), so that a tool may be called "auto"."""

_LEVELS = {"off": 0, "function": 1, "parameter": 2}


class ToolConstraint(NamedTuple):
    """kind: "structural_tag" or "json_schema". key: the parser of the text, if it is not the format's own."""

    kind: Literal["structural_tag", "json_schema"]
    spec: dict[str, Any]
    key: str | None = None


def strict_level() -> int:
    """SGLANG_TOOL_STRICT_LEVEL: 0, off: only tools that ask for it. 1, function: names and form of all calls.
    2, parameter: the schemas of their arguments, too."""
    level = os.environ.get("SGLANG_TOOL_STRICT_LEVEL", "0").strip().lower()
    return _LEVELS.get(level, int(level) if level.isdigit() else 0)


def chosen(tools: Sequence[Tool], choice: ToolChoice) -> list[Tool]:
    """The tools that may be called. Raises BadRequest."""
    if choice == "none":
        return []
    if not choice.startswith("="):
        if choice == "required" and not tools:
            raise BadRequest("Tools cannot be empty if tool choice is set to required.", where="tools")
        return list(tools)
    if not tools:
        raise BadRequest("Tools cannot be empty if tool choice is set to a specific tool.", where="tools")
    matches = [tool for tool in tools if tool.name == choice[1:]]
    if not matches:
        raise BadRequest(f"Tool '{choice[1:]}' not found in tools list.", where="tool_choice")
    return matches


def structure_constraint(
    detector: BaseFormatDetector | None, tools: Sequence[Tool], choice: ToolChoice, parallel: bool = True
) -> ToolConstraint | None:
    """None: the reply is unconstrained. `detector` None: the model's format is unknown."""
    allowed = chosen(tools, choice)
    if not allowed:
        return None
    auto, level = choice == "auto", strict_level()
    if auto and level == 0 and not any(tool.strict for tool in allowed):
        return None
    tags = _tags(detector, allowed, level if auto else 2)
    if detector is None or tags is None:
        return None if auto else ToolConstraint("json_schema", calls_schema(allowed, parallel), "json-array")
    if not auto:
        return _tagged(_only_calls(detector, tags, parallel))
    trigger = detector.auto_trigger()
    return None if trigger is None else _tagged(_optional_calls(detector, trigger, tags, parallel))


def calls_or_json(
    detector: BaseFormatDetector | None, tools: Sequence[Tool], parallel: bool, schema: dict[str, Any] | bool
) -> ToolConstraint | None:
    """The reply is calls, or JSON of this schema without calls. None: structural tags cannot express the
    format."""
    tags = _tags(detector, tools, level=2)
    if detector is None or tags is None:
        return None
    json_text = {"type": "json_schema", "json_schema": schema}
    either = {"type": "or", "elements": [_only_calls(detector, tags, parallel), json_text]}
    return _tagged(either)


def _optional_calls(
    detector: BaseFormatDetector, trigger: str, tags: list[dict[str, Any]], parallel: bool
) -> dict[str, Any]:
    """Free text in which every call is one of these."""
    begin, _, end = detector.around
    if begin or end:
        tags, parallel = [{**_only_calls(detector, tags, parallel), "type": "tag"}], False
    return {
        "type": "triggered_tags",
        "triggers": [trigger],
        "tags": tags,
        "at_least_one": False,
        "stop_after_first": not parallel,
    }


def _tagged(inner: Mapping[str, Any]) -> ToolConstraint:
    return ToolConstraint("structural_tag", {"type": "structural_tag", "format": inner})


def _tags(
    detector: BaseFormatDetector | None, tools: Sequence[Tool], level: int
) -> list[dict[str, Any]] | None:
    if detector is None:
        return None
    tags = [
        detector.call_tag(tool, schema_of(tool) if tool.strict or level >= 2 else {"type": "object"})
        for tool in tools
    ]
    return None if any(tag is None for tag in tags) else [tag for tag in tags if tag is not None]


def _only_calls(detector: BaseFormatDetector, tags: list[dict[str, Any]], parallel: bool) -> dict[str, Any]:
    begin, separator, end = detector.around
    calls = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }
    return {"type": "tag", "begin": begin, "content": calls, "end": end} if begin or end else calls


def schema_of(tool: Tool) -> dict[str, Any]:
    """The schema of the tool's arguments: an object."""
    return {"type": "object", "properties": {}, **tool.parameters}


def calls_schema(tools: Sequence[Tool], parallel: bool) -> dict[str, Any]:
    """A list of calls as JSON. Raises BadRequest if a name has two different definitions."""
    definitions: dict[str, Any] = {}
    options = []
    for tool in tools:
        schema = schema_of(tool)
        for name, body in dict(schema.pop("$defs", {})).items():
            if definitions.setdefault(name, body) != body:
                raise BadRequest(
                    f"Tool definition '{name}' has multiple schemas, which is not supported.", where="tools"
                )
        options.append({
            "properties": {"name": {"type": "string", "enum": [tool.name]}, "parameters": schema},
            "required": ["name", "parameters"],
        })  # fmt: skip
    items = {"type": "object", **(options[0] if len(options) == 1 else {"anyOf": options})}
    calls: dict[str, Any] = {"type": "array", "minItems": 1, "items": items}
    if not parallel:
        calls["maxItems"] = 1
    return {**calls, "$defs": definitions} if definitions else calls
