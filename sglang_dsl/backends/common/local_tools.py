"""Tools on the bundled runtime, in this process or behind its native interface: a reply is constrained to
calls of the offered tools, in the model's own format, and read by that format's parser.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from runtime.formats.reply import was_cut
from runtime.formats.tools.constraints import structure_constraint
from runtime.formats.tools.parser import FunctionCallParser, detector_of
from runtime.formats.tools.schema import rewritten
from runtime.formats.tools.types import Tool
from runtime.protocol.constraint import Constraint
from sglang_dsl.backends.base import Call, Completion
from sglang_dsl.errors import Unsupported


def held_to_tools(call: Call, key: str | None, backend: str) -> tuple[Call, str]:
    """The call with its reply constrained to calls of its tools, and the parser of that reply. `key`: the
    model's format. Raises Unsupported if that is not known and the reply is free."""
    tools = [_strict(one) for one in call.prompt.tools]
    detector = None if key is None else detector_of(key)
    constraint = structure_constraint(detector, tools, call.tool_choice, call.parallel_tools)
    parser = key if constraint is None or constraint.key is None else constraint.key
    if parser is None:
        raise Unsupported(
            "this model's tool call format is not known",
            backend=backend,
            hint='start it with tool_call_parser, or use tool_choice="required"',
        )
    shape = None if constraint is None else Constraint(constraint.kind, json.dumps(constraint.spec))
    sampling = msgspec.structs.replace(call.sampling, skip_special_tokens=False)
    return msgspec.structs.replace(call, sampling=sampling, constraint=shape), parser


def with_calls(text: str, meta: Mapping[str, Any], call: Call, parser: str) -> Completion:
    """The completion of a reply to held_to_tools(), with its calls; a reply that was cut calls nothing."""
    if was_cut(meta) or (meta.get("finish_reason") or {}).get("type") == "length":
        return Completion((text,), dict(meta))
    reader = FunctionCallParser(call.prompt.tools, parser, incremental=call.constraint is not None)
    text, calls = reader.parse_non_stream(text)
    if not calls:
        return Completion((text,), dict(meta))
    earlier = sum(len(message.tool_calls) for message in call.prompt.messages)
    meta_calls = [
        {"id": _id(parser, str(one.name), number), "name": one.name, "arguments": one.parameters}
        for number, one in enumerate(calls, earlier)
    ]
    return Completion((text,), {**meta, "tool_calls": meta_calls})


def _id(parser: str, name: str, number: int) -> str:
    """By its number in the conversation, so that a repeated run has the same prompts. Some templates take 9
    letters and digits only; Kimi's has its own form."""
    return f"functions.{name}:{number}" if parser == "kimi_k2" else f"call{number:05d}"


def _strict(function: Mapping[str, Any]) -> Tool:
    """A tool whose calls are constrained to its schema; objects have no other members unless the schema
    allows them."""
    tool = Tool.of(function)
    return Tool(tool.name, rewritten(tool.parameters, _closed), tool.description, strict=True)


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    if "properties" in schema and not schema.keys() & {"allOf", "patternProperties", "unevaluatedProperties"}:
        schema.setdefault("additionalProperties", False)
    return schema
