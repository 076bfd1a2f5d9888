"""What a request says of tools: which are shown, what makes calls certain, how they are found in a reply.

One place for all APIs. Knows no API.
"""

from __future__ import annotations

import json
import re
import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import blake2b
from typing import Any, NamedTuple

import jsonschema_rs
import msgspec

from runtime.formats.reply import ToolCalls
from runtime.formats.tools.constraints import ToolConstraint, calls_or_json, structure_constraint
from runtime.formats.tools.parser import FunctionCallParser, detector_of
from runtime.formats.tools.types import Tool, tools_of
from runtime.grammar.json_schema.source import ANY_JSON
from runtime.protocol.errors import BadRequest
from runtime.protocol.messages import Message
from runtime.protocol.model_info import ModelInfo
from runtime.server.http.errors import FieldNames

CONSTRAINTS = ("regex", "ebnf", "json_schema", "structural_tag", "choices")
MAX_CHECKED = 1024
"""Sets of tools whose schemas are known to be sound, by their digest: an agent sends the same set each time.
"""
_checked: OrderedDict[bytes, None] = OrderedDict()


class ToolUse(NamedTuple):
    """tools: those that are offered, none where they may not be called. constraint: what the reply must look
    like. key: the format of the calls; None: they are not looked for. replaced: the request's own word of
    sampling that the constraint holds as well, or leaves nothing for."""

    tools: tuple[Tool, ...] = ()
    constraint: ToolConstraint | None = None
    key: str | None = None
    earlier: int = 0
    replaced: str | None = None

    @staticmethod
    def of(
        model: ModelInfo,
        given: Sequence[Mapping[str, Any]] | None,
        choice: str,
        parallel: bool | None,
        messages: Sequence[Message] = (),
        asked: Mapping[str, Any] = {},
    ) -> ToolUse:
        """`given`: OpenAI's dicts, checked. choice: "auto", "none", "required" or "=NAME". asked: the
        request's own words of sampling; a JSON schema among them is for a reply that calls nothing. Raises
        BadRequest."""
        if not given or choice == "none":
            return ToolUse()
        tools = tools_of(given)
        _check(tools)
        detector = None if model.tool_parser is None else detector_of(model.tool_parser)
        constraint = structure_constraint(detector, tools, choice, parallel is not False)
        own = next((word for word in CONSTRAINTS if asked.get(word) is not None), None)
        if own is not None and choice == "auto":
            schema = _schema_of(asked[own]) if own == "json_schema" else None
            constraint = None
            if schema is not None:
                constraint = calls_or_json(detector, tools, parallel is not False, schema)
        elif own is not None and own != "json_schema":
            raise BadRequest("cannot be combined with a constraint of the response", where="tool_choice")
        key = model.tool_parser if constraint is None or constraint.key is None else constraint.key
        earlier = sum(len(message.tool_calls) for message in messages)
        return ToolUse(tools, constraint, key, earlier, None if constraint is None else own)

    @property
    def sampling(self) -> dict[str, Any]:
        """Words for the sampling parameters."""
        words: dict[str, Any] = {} if self.key is None else {"skip_special_tokens": False}
        if self.replaced is not None:
            words[self.replaced] = None
        if self.constraint is not None:
            words[self.constraint.kind] = json.dumps(self.constraint.spec)
        return words

    def named(self, names: FieldNames) -> FieldNames:
        """What the runtime's fields are called in the request, with the constraint under the name of the one
        that it replaces."""
        if self.replaced is None or self.constraint is None:
            return names
        return {**names, self.constraint.kind: names.get(self.replaced, self.replaced)}

    def splitter(self, *, whole: bool = False) -> ToolCalls | None:
        """For one reply. whole: calls are given out when they are whole, also where a constraint is sure of
        them."""
        if self.key is None:
            return None
        incremental = self.constraint is not None and not whole
        return ToolCalls(FunctionCallParser(self.tools, self.key, incremental=incremental))

    def new_id(self, index: int, name: str) -> str:
        """Of a call. Kimi's are numbered through the conversation, and shown to the model again."""
        if self.key == "kimi_k2":
            return f"functions.{name}:{self.earlier + index}"
        return f"call_{secrets.token_hex(12)}"


def _schema_of(spec: Any) -> dict[str, Any] | bool | None:
    """The JSON schema that a word of sampling says; None: it is wrong, which is told where it is compiled."""
    if spec == ANY_JSON:
        return True
    try:
        schema = json.loads(spec) if isinstance(spec, str) else spec
    except (ValueError, RecursionError):
        return None
    return schema if isinstance(schema, dict | bool) and schema_fault(schema) is None else None


def _check(tools: Sequence[Tool]) -> None:
    """Raise BadRequest for parameters that are no JSON schema."""
    digest = blake2b(msgspec.json.encode([tool.parameters for tool in tools]), digest_size=16).digest()
    if digest in _checked:
        return
    for index, tool in enumerate(tools):
        if (fault := schema_fault(dict(tool.parameters))) is not None:
            raise BadRequest(f"is no JSON schema: {fault}", where=f"tools[{index}].function.parameters")
    _checked[digest] = None
    while len(_checked) > MAX_CHECKED:
        _checked.popitem(last=False)


def schema_fault(schema: Any) -> str | None:
    """What is wrong with a JSON schema of draft 2020-12, and where in it; None: nothing. Patterns must be
    regular expressions of Python; that references are URIs is not asked for: generators write
    #/$defs/List<Item>."""
    try:
        _metaschema().validate(schema)
    except jsonschema_rs.ValidationError as error:
        place = "/".join(map(str, error.instance_path))[:200]
        at = f" (at {place if place.isprintable() else repr(place)})" if place else ""
        return f"{error.message[:200]}{at}"
    except (ValueError, TypeError) as error:  # what JSON cannot hold
        return str(error)[:200]
    return None


@cache
def _metaschema() -> jsonschema_rs.Draft202012Validator:
    formats = {"regex": _is_pattern, "uri": _any, "uri-reference": _any}
    return jsonschema_rs.Draft202012Validator(
        {"$ref": "https://json-schema.org/draft/2020-12/schema"},
        validate_formats=True,
        formats=formats,
        offline=True,
    )


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError):
        return False
    return True


def _any(text: str) -> bool:
    return True
