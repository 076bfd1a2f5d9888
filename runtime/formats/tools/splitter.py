"""Splits a reply into content and tool calls as it comes.

Content is returned at once, except for text that may begin a call. White space before a call, and between two
calls, belongs to neither. Text that turns out not to be a call is content, from its first character on.
"""

from __future__ import annotations

from collections.abc import Mapping

from runtime.formats.tools.base import BaseFormatDetector, CallSink
from runtime.formats.tools.reader import Malformed, Reader, Reading
from runtime.formats.tools.types import StreamingParseResult, Tool

_WIDEST = 800  # maximum characters that a format's `unsure` matches


class Splitter:
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
        self._done = False

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
        if not self._done:
            self._done = next(self._steps, self) is self
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
            if reader.over:
                self._add_content(reader.take(reader.left))
                if not self._calls.count:
                    self._content += self._blank
                return ""
            yield

    def _unsure_distance(self, distance: int | None) -> int | None:
        """The distance to a trigger, before the one at `distance`, that needs more text to decide whether it
        counts."""
        reader = self._reader
        if self._unsure is None or reader.over or (distance is not None and reader.left - distance > _WIDEST):
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
