"""Tools of a request: which are offered, the constraint on calls, and how calls are recognised in a reply.
Shared by all APIs; knows none.
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

from runtime.formats.tools.constraints import ToolConstraint, calls_or_json, structure_constraint
from runtime.formats.tools.parser import FunctionCallParser, detector_of
from runtime.formats.tools.types import Tool, tools_of
from runtime.grammar.json_schema.document import ANY_JSON
from runtime.protocol.errors import BadRequest
from runtime.protocol.messages import Message
from runtime.protocol.model_info import ModelInfo
from runtime.protocol.sampling import CONSTRAINT_KEYS
from runtime.server.http.errors import FieldNames

MAX_CHECKED = 1024
"""Sets of tools whose schemas are known to be valid, by digest: an agent sends the same set each time."""
_checked: OrderedDict[bytes, None] = OrderedDict()


class ToolUse(NamedTuple):
    """tools: those that may be called. constraint: on the reply. key: the format of calls; None: they are not
    recognised. replaced: the request's own constraint, which `constraint` contains or replaces."""

    tools: tuple[Tool, ...] = ()
    constraint: ToolConstraint | None = None
    key: str | None = None
    earlier: int = 0
    replaced: str | None = None

    @staticmethod
    def of(
        model: ModelInfo,
        offered: Sequence[Mapping[str, Any]] | None,
        choice: str,
        parallel: bool | None,
        messages: Sequence[Message] = (),
        sampling: Mapping[str, Any] = {},
    ) -> ToolUse:
        """`offered`: OpenAI's dicts, checked. choice: "auto", "none", "required" or "=NAME". sampling: the
        request's sampling parameters; a JSON schema among them is for a reply without calls. Raises
        BadRequest."""
        if not offered or choice == "none":
            return ToolUse()
        tools = tools_of(offered)
        _check(tools)
        detector = None if model.tool_parser is None else detector_of(model.tool_parser)
        constraint = structure_constraint(detector, tools, choice, parallel is not False)
        kind = next((kind for kind in CONSTRAINT_KEYS if sampling.get(kind) is not None), None)
        if kind is not None and choice == "auto":
            schema = _schema_of(sampling[kind]) if kind == "json_schema" else None
            constraint = None
            if schema is not None:
                constraint = calls_or_json(detector, tools, parallel is not False, schema)
        elif kind is not None and kind != "json_schema":
            raise BadRequest("cannot be combined with a constraint of the response", where="tool_choice")
        key = model.tool_parser if constraint is None or constraint.key is None else constraint.key
        earlier = sum(len(message.tool_calls) for message in messages)
        return ToolUse(tools, constraint, key, earlier, None if constraint is None else kind)

    @property
    def sampling(self) -> dict[str, Any]:
        values: dict[str, Any] = {} if self.key is None else {"skip_special_tokens": False}
        if self.replaced is not None:
            values[self.replaced] = None
        if self.constraint is not None:
            values[self.constraint.kind] = json.dumps(self.constraint.spec)
        return values

    def named(self, names: FieldNames) -> FieldNames:
        """`names`, with the constraint under the name of the one that it replaces."""
        if self.replaced is None or self.constraint is None:
            return names
        return {**names, self.constraint.kind: names.get(self.replaced, self.replaced)}

    def splitter(self, *, whole: bool = False) -> FunctionCallParser | None:
        """For one reply. whole: calls come whole, even if a constraint makes them certain."""
        if self.key is None:
            return None
        incremental = self.constraint is not None and not whole
        return FunctionCallParser(self.tools, self.key, incremental=incremental)

    def new_id(self, index: int, name: str) -> str:
        """The id of a call. Kimi's are numbered through the conversation, and part of its prompt."""
        if self.key == "kimi_k2":
            return f"functions.{name}:{self.earlier + index}"
        return f"call_{secrets.token_hex(12)}"


def _schema_of(spec: Any) -> dict[str, Any] | bool | None:
    """The JSON schema of a sampling parameter; None if it is wrong, which its compilation reports."""
    if spec == ANY_JSON:
        return True
    try:
        schema = json.loads(spec) if isinstance(spec, str) else spec
    except (ValueError, RecursionError):
        return None
    return schema if isinstance(schema, dict | bool) and schema_fault(schema) is None else None


def _check(tools: Sequence[Tool]) -> None:
    """Raise BadRequest for parameters that are not a JSON schema."""
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
    """What is wrong with a JSON schema of draft 2020-12, with its path; None: nothing. Patterns must be
    regular expressions of Python; references need not be URIs, since generators write #/$defs/List<Item>."""
    try:
        _metaschema().validate(schema)
    except jsonschema_rs.ValidationError as error:
        path = "/".join(map(str, error.instance_path))[:200]
        at = f" (at {path if path.isprintable() else repr(path)})" if path else ""
        return f"{error.message[:200]}{at}"
    except (ValueError, TypeError) as error:  # what JSON cannot hold
        return str(error)[:200]
    return None


@cache
def _metaschema() -> jsonschema_rs.Draft202012Validator:
    formats = {"regex": _is_pattern, "uri": lambda _: True, "uri-reference": lambda _: True}
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
