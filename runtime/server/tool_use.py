"""What a request says of tools: which are shown, what makes calls certain, how they are found in a reply.

One place for all APIs. Knows no API.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from jsonschema.exceptions import SchemaError  # type: ignore[import-untyped]

from runtime.formats.reply import ToolCalls
from runtime.formats.tools.constraints import ToolConstraint, structure_constraint
from runtime.formats.tools.parser import FunctionCallParser, detector_of
from runtime.formats.tools.types import Tool, tools_of
from runtime.protocol.errors import BadRequest
from runtime.protocol.messages import Message
from runtime.protocol.model_info import ModelInfo

CONSTRAINTS = ("regex", "ebnf", "json_schema", "structural_tag", "choices")


class ToolUse(NamedTuple):
    """tools: those that are offered, none where they may not be called. constraint: what the reply must look
    like. key: the format of the calls; None: they are not looked for."""

    tools: tuple[Tool, ...] = ()
    constraint: ToolConstraint | None = None
    key: str | None = None
    earlier: int = 0

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
        request's own words of sampling. Raises BadRequest."""
        if not given or choice == "none":
            return ToolUse()
        tools = tools_of(given)
        for index, tool in enumerate(tools):
            _check(tool, f"tools[{index}].function.parameters")
        detector = None if model.tool_parser is None else detector_of(model.tool_parser)
        constraint = structure_constraint(detector, tools, choice, parallel is not False)
        if constraint is not None and any(word in asked for word in CONSTRAINTS):
            if choice != "auto":
                raise BadRequest("does not go with a constraint of the reply", where="tool_choice")
            constraint = None
        key = model.tool_parser if constraint is None or constraint.key is None else constraint.key
        earlier = sum(len(message.tool_calls) for message in messages)
        return ToolUse(tools, constraint, key, earlier)

    @property
    def sampling(self) -> dict[str, Any]:
        """Words for the sampling parameters."""
        words: dict[str, Any] = {} if self.key is None else {"skip_special_tokens": False}
        if self.constraint is not None:
            words[self.constraint.kind] = json.dumps(self.constraint.spec)
        return words

    def splitter(self) -> ToolCalls | None:
        """For one reply."""
        if self.key is None:
            return None
        return ToolCalls(FunctionCallParser(self.tools, self.key, incremental=self.constraint is not None))

    def new_id(self, index: int, name: str) -> str:
        """Of a call. Kimi's are numbered through the conversation, and shown to the model again."""
        if self.key == "kimi_k2":
            return f"functions.{name}:{self.earlier + index}"
        return f"call_{secrets.token_hex(12)}"


def _check(tool: Tool, where: str) -> None:
    try:
        Draft202012Validator.check_schema(dict(tool.parameters))
    except SchemaError as error:
        place = "/".join(map(str, error.absolute_path))
        told = f"is no JSON schema: {error.message[:200]}{f' (at {place})' if place else ''}"
        raise BadRequest(told, where=where) from None
