"""A model's text, split into content and tool calls, or into reasoning and answer.

POST /parse_function_call {"text": "...", "tools": [...], "tool_call_parser": "qwen25"}
    -> {"normal_text": "...", "calls": [...]}
POST /separate_reasoning {"text": "...", "reasoning_parser": "qwen3"}
    -> {"text": "...", "reasoning_text": "..."}
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request

from runtime.formats.reasoning.marks import AUTO, reasoning_type
from runtime.formats.reasoning.splitter import split_reasoning
from runtime.formats.tools import FunctionCallParser, ToolCallItem
from runtime.protocol.errors import BadRequest
from runtime.protocol.registry import UnknownName
from runtime.server.context import RouteGroup, serves
from runtime.server.http.openapi import Operation

MOST_TEXT = 1 << 20
"""Characters of one text, at most."""


class ParseFunctionCall(msgspec.Struct, forbid_unknown_fields=True):
    """tools: as in /v1/chat/completions. tool_call_parser: a format's name, by default the model's."""

    text: str
    tools: list[dict[str, Any]] = []
    tool_call_parser: str | None = None


class ParsedCalls(msgspec.Struct):
    """Each call with its index, name, and arguments as JSON."""

    normal_text: str
    calls: list[ToolCallItem]


class SeparateReasoning(msgspec.Struct, forbid_unknown_fields=True):
    """reasoning_parser: how the model marks its reasoning; "auto": by any known mark in the text."""

    text: str
    reasoning_parser: str = AUTO


class SeparatedReasoning(msgspec.Struct):
    text: str
    reasoning_text: str


_SEPARATE = Operation(
    "Separate the reasoning from the answer in a text",
    request=SeparateReasoning,
    response=SeparatedReasoning,
)
_PARSE = Operation("Extract the tool calls from a text", request=ParseFunctionCall, response=ParsedCalls)


class Parsing(RouteGroup):
    @serves(_SEPARATE, "POST /separate_reasoning")
    async def separate(self, request: Request) -> SeparatedReasoning:
        return await self._ctx.admit(request, SeparateReasoning, self._separated, encodes=True)

    def _separated(self, body: SeparateReasoning) -> SeparatedReasoning:
        _check(body.text)
        try:
            split = split_reasoning(body.text, reasoning_type(body.reasoning_parser))
        except UnknownName as error:
            raise BadRequest(str(error), where="reasoning_parser") from error
        return SeparatedReasoning(split.answer, split.reasoning)

    @serves(_PARSE, "POST /parse_function_call")
    async def parse(self, request: Request) -> ParsedCalls:
        return await self._ctx.admit(request, ParseFunctionCall, self._parsed, encodes=True)

    def _parsed(self, body: ParseFunctionCall) -> ParsedCalls:
        key = body.tool_call_parser or self._ctx.model.tool_parser
        if key is None:
            reason = self._ctx.model.tool_parser_reason or "the model has none"
            raise BadRequest(f"is needed: {reason}", where="tool_call_parser")
        _check(body.text)
        try:
            parser = FunctionCallParser(body.tools, key)
        except ValueError as error:
            field = "tool_call_parser" if "tool_call_parser" in str(error) else "tools"
            raise BadRequest(str(error), where=field) from error
        return ParsedCalls(*parser.parse_non_stream(body.text))


def _check(text: str) -> None:
    if len(text) > MOST_TEXT:
        raise BadRequest(f"has {len(text)} characters; at most {MOST_TEXT}", where="text")
