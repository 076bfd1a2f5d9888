"""/parse_function_call: a text that a model wrote, taken apart into content and tool calls.

POST {"text": "...", "tools": [...], "tool_call_parser": "qwen25"} -> {"normal_text": "...", "calls": [...]}
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from runtime.formats.tools import FunctionCallParser, ToolCallItem
from runtime.protocol.errors import BadRequest
from runtime.server.context import ServerContext
from runtime.server.http.body import read_struct
from runtime.server.http.errors import json_response
from runtime.server.http.openapi import Operation

MOST_TEXT = 1 << 20
"""Characters of one text, at most."""


class ParseFunctionCall(msgspec.Struct, forbid_unknown_fields=True):
    """tools: as in /v1/chat/completions. tool_call_parser: a format's name; left out: the model's own."""

    text: str
    tools: list[dict[str, Any]] = []
    tool_call_parser: str | None = None


class ParsedCalls(msgspec.Struct):
    """Each call with its place among them, its name, and its arguments as JSON."""

    normal_text: str
    calls: list[ToolCallItem]


OPENAPI = {
    "POST /parse_function_call": Operation(
        "content and tool calls of a model's text", request=ParseFunctionCall, response=ParsedCalls
    )
}


def routes(ctx: ServerContext) -> list[Route]:
    async def parse(request: Request) -> Response:
        body = await read_struct(request, ctx.config, ParseFunctionCall)
        key = body.tool_call_parser or ctx.model.tool_parser
        if key is None:
            raise BadRequest(
                f"is needed: {ctx.model.tool_parser_reason or 'the model has none'}", where="tool_call_parser"
            )
        if len(body.text) > MOST_TEXT:
            raise BadRequest(f"has {len(body.text)} characters; at most {MOST_TEXT}", where="text")
        try:
            parser = FunctionCallParser(body.tools, key)
        except ValueError as error:
            where = "tool_call_parser" if "tool_call_parser" in str(error) else "tools"
            raise BadRequest(str(error), where=where) from error
        content, calls = await asyncio.to_thread(parser.parse_non_stream, body.text)
        return json_response(ParsedCalls(content, calls))

    return [Route("/parse_function_call", parse, methods=["POST"])]
