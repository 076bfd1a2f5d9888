"""Kimi K2."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from runtime.formats.tools.base import CallSink
from runtime.formats.tools.named_calls import NamedCalls, arguments
from runtime.formats.tools.reader import Malformed, Reader, Reading
from runtime.formats.tools.schema import property_of
from runtime.formats.tools.types import Tool
from runtime.formats.tools.values import JSON

_ID = re.compile(r"(?:functions\.)?(?P<name>.+?)(?::(?P<number>\d+))?")


class _Kimi(NamedCalls):
    def call(self, reader: Reader, name: str, calls: CallSink) -> Reading[None]:
        match = _ID.fullmatch(name)
        if match is None:
            raise Malformed("a call has no name")
        if not (name.isdigit() and not calls.knows(name)):
            yield from super().call(reader, match["name"], calls)
            return
        # Only a number: find the tool by its arguments.
        pieces: list[str] = []
        yield from arguments(reader, JSON, pieces.append)
        keys = json.loads("".join(pieces))
        fits = {
            tool.name: sum(property_of(tool, key) is not None for key in keys)
            for tool in calls.tools.values()
        }
        best = max(fits, key=lambda one: fits[one], default="")
        if not best or (keys and not fits[best]):
            raise Malformed("a call has no name")
        calls.whole(best, "".join(pieces))

    def call_tag(self, tool: Tool, schema: Mapping[str, Any]) -> dict[str, Any] | None:
        number = {"type": "regex", "pattern": "[0-9]{1,3}"}
        after = {"type": "const_string", "value": self.after}
        arguments = {"type": "json_schema", "json_schema": schema}
        begin = f"{self.opener}{self.prefix}{tool.name}:"
        content = {"type": "sequence", "elements": [number, after, arguments]}
        return {"type": "tag", "begin": begin, "content": content, "end": self.closer}


KIMI_K2 = _Kimi(
    begin="<|tool_calls_section_begin|>",
    end="<|tool_calls_section_end|>",
    opener="<|tool_call_begin|>",
    closer="<|tool_call_end|>",
    prefix="functions.",
    suffix=":{}",
    after="<|tool_call_argument_begin|>",
)
