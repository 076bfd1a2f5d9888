"""FunctionCallParser: splits a model's text into content and tool calls, whole or as it comes.

Content is returned at once, except for text that may begin a call. White space before a call, and between two
calls, belongs to neither. Text that turns out not to be a call is content, from its first character on.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from runtime.formats.tools.base import BaseFormatDetector, CallSink
from runtime.formats.tools.formats import LIST
from runtime.formats.tools.reader import Malformed, Reader, Reading
from runtime.formats.tools.table import FORMATS
from runtime.formats.tools.types import StreamingParseResult, Tool, ToolCallItem, tools_of
from runtime.protocol.registry import UnknownName

_WIDEST = 800  # maximum characters that a format's `unsure` matches


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
        self._stream: _Splitter | None = None

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

    def _splitter(self) -> _Splitter:
        forward = os.environ.get("SGLANG_FORWARD_UNKNOWN_TOOLS", "").lower() in ("1", "true", "yes")
        tools = {tool.name: tool for tool in self.tools}
        return _Splitter(self.detector, tools, incremental=self._incremental, forward=forward)


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


class _Splitter:
    """One reply. feed() and finally end(): however the text is split, the results add up to the same content
    and calls."""

    def __init__(
        self, detector: BaseFormatDetector, tools: Mapping[str, Tool], *, incremental: bool, forward: bool
    ) -> None:
        self._format, self._reader = detector, Reader()
        self._triggers = detector.triggers if tools else ()
        self._unsure = detector.unsure if tools else None
        self._pattern = detector.finder(None if forward else tuple(tools))
        self._calls = CallSink(self._reader, tools, incremental, forward)
        self._content: list[str] = []
        self._blank: list[str] = []  # white space that belongs to the next content
        self._steps = self._run()

    def feed(self, text: str) -> StreamingParseResult:
        return self._step() if self._reader.feed(text) else StreamingParseResult()

    def whole(self, text: str) -> StreamingParseResult:
        """A whole reply at once."""
        self._reader.feed(text)
        return self.end()

    def end(self) -> StreamingParseResult:
        self._reader.end()
        return self._step()

    def _step(self) -> StreamingParseResult:
        next(self._steps, None)
        result = StreamingParseResult("".join(self._content), self._calls.items)
        self._content, self._calls.items = [], []
        return result

    def _run(self) -> Reading[None]:
        reader = self._reader
        while True:
            trigger = yield from self._find()
            if not trigger:
                return
            reader.reset()
            reader.take(len(trigger))
            before = self._calls.count
            try:
                yield from self._format.read(reader, trigger, self._calls)
            except Malformed:
                if self._calls.count != before:
                    self._blank.clear()
                self._add_content(reader.reset())
            else:
                self._blank.clear()

    def _find(self) -> Reading[str]:
        """Content up to a trigger, which is not consumed; "" at the end of the text."""
        reader, triggers, pattern = self._reader, self._triggers, self._pattern
        while True:
            distance = reader.find(triggers, pattern)
            unsure = None if distance == 0 else self._unsure_distance(distance)
            if unsure is not None:
                self._add_content(reader.take(min(unsure, reader.left - reader.held(triggers))))
                reader.reset()
                yield
                continue
            if distance != 0:
                self._add_content(
                    reader.take(reader.left - reader.held(triggers) if distance is None else distance)
                )
                reader.reset()
            if distance is not None:
                return (yield from reader.starts(triggers))
            if reader.ended:
                self._add_content(reader.take(reader.left))
                if not self._calls.count:
                    self._content += self._blank
                return ""
            yield

    def _unsure_distance(self, distance: int | None) -> int | None:
        """The distance to a trigger, before the one at `distance`, that needs more text to decide whether it
        counts."""
        reader = self._reader
        if (
            self._unsure is None
            or reader.ended
            or (distance is not None and reader.left - distance > _WIDEST)
        ):
            return None
        match = self._unsure.search(reader.text, max(reader.at, len(reader.text) - _WIDEST))
        if match is None or (distance is not None and match.start() - reader.at >= distance):
            return None
        return match.start() - reader.at

    def _add_content(self, text: str) -> None:
        stripped = text.rstrip()
        if stripped:
            self._content += [*self._blank, stripped]
            self._blank.clear()
        if len(stripped) < len(text):
            self._blank.append(text[len(stripped) :])
