"""FunctionCallParser: splits a model's text into content and tool calls, whole or as it comes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from runtime.formats.tools.base import BaseFormatDetector
from runtime.formats.tools.formats.declared import LIST
from runtime.formats.tools.splitter import Splitter
from runtime.formats.tools.table import FORMATS
from runtime.formats.tools.types import StreamingParseResult, ToolCallItem, tools_of
from runtime.protocol.registry import UnknownName


class FunctionCallParser:
    """tools: the available tools, as OpenAI's dicts or objects. key: a name of FORMATS, or "json-array" for
    text constrained by a JSON schema of calls. Without tools all text is content.

    Any split of a text gives the same content and calls. A call of an unknown tool is content, like a
    malformed one; with SGLANG_FORWARD_UNKNOWN_TOOLS=1 it is returned with the index -1. incremental:
    arguments are returned as they come, for constrained text; an unfinished call stays as far as it came.
    Raises ValueError for an unknown key.
    """

    def __init__(self, tools: Iterable[Any] | None, key: str, *, incremental: bool = False) -> None:
        self.tools = tools_of(tools)
        self.detector = detector_of(key)
        self._incremental = incremental
        self._stream: Splitter | None = None

    def has_tool_call(self, text: str) -> bool:
        """Whether the text contains a mark of the format."""
        return bool(self.tools) and self.detector.has_tool_call(text)

    def parse_non_stream(self, text: str) -> tuple[str, list[ToolCallItem]]:
        """The content, and each call as one item."""
        result = self._splitter().whole(text)
        calls: list[ToolCallItem] = []
        for item in result.calls:
            if item.name is not None:
                calls.append(item)
            else:
                calls[-1].parameters += item.parameters
        return result.normal_text, calls

    def parse_stream_chunk(self, text: str) -> StreamingParseResult:
        """The next piece of a reply: for each call first the name, then pieces of its arguments."""
        if self._stream is None:
            self._stream = self._splitter()
        return self._stream.feed(text)

    def parse_stream_end(self) -> StreamingParseResult:
        """The rest at the end of the reply; the next piece begins another one."""
        stream, self._stream = self._stream, None
        return StreamingParseResult() if stream is None else stream.end()

    def _splitter(self) -> Splitter:
        forward = os.environ.get("SGLANG_FORWARD_UNKNOWN_TOOLS", "").lower() in ("1", "true", "yes")
        tools = {tool.name: tool for tool in self.tools}
        return Splitter(self.detector, tools, incremental=self._incremental, forward=forward)


def detector_of(key: str) -> BaseFormatDetector:
    """Raises ValueError."""
    if key == "json-array":
        return LIST
    try:
        return FORMATS.load(key)
    except UnknownName as error:
        raise ValueError(
            f"Unsupported tool_call_parser: {key}; known: {', '.join(FORMATS.names())}"
        ) from error
