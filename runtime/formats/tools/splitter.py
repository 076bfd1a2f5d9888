"""Takes a reply apart as it comes: content, and tool calls.

Content goes out at once, but for what may be the beginning of a call. White space before a call, and between
two of them, belongs to neither. What turns out to be no call is content, from its first character on.
"""

from __future__ import annotations

from collections.abc import Mapping

from runtime.formats.tools.base import BaseFormatDetector, CallSink
from runtime.formats.tools.reader import Malformed, Reader, Reading
from runtime.formats.tools.types import StreamingParseResult, Tool

_WIDEST = 800  # characters that the `unsure` of a format matches, at most


class Splitter:
    """One reply. feed() and at last end(): whatever the pieces, they add up to the same content and calls."""

    def __init__(
        self, detector: BaseFormatDetector, tools: Mapping[str, Tool], *, incremental: bool, forward: bool
    ) -> None:
        self._format, self._reader = detector, Reader()
        self._triggers = detector.triggers if tools else ()
        self._unsure = detector.unsure if tools else None
        self._pattern = detector.finder(None if forward else tuple(tools))
        self._calls = CallSink(self._reader, tools, incremental, forward)
        self._content: list[str] = []
        self._blank: list[str] = []  # white space that belongs to what follows, if that is content
        self._steps = self._run()
        self._done = False

    def feed(self, text: str) -> StreamingParseResult:
        return self._step() if self._reader.feed(text) else StreamingParseResult()

    def whole(self, text: str) -> StreamingParseResult:
        """All of a reply at once."""
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
                self._say(reader.reset())
            else:
                self._blank.clear()

    def _find(self) -> Reading[str]:
        """Content, up to a trigger, which is not consumed; "" at the end of the text."""
        reader, triggers, pattern = self._reader, self._triggers, self._pattern
        while True:
            place = reader.find(triggers, pattern)
            unsure = None if place == 0 else self._unsure_place(place)
            if unsure is not None:
                self._say(reader.take(min(unsure, reader.left - reader.held(triggers))))
                reader.reset()
                yield
                continue
            if place != 0:
                self._say(reader.take(reader.left - reader.held(triggers) if place is None else place))
                reader.reset()
            if place is not None:
                return (yield from reader.starts(triggers))
            if reader.over:
                self._say(reader.take(reader.left))
                if not self._calls.count:
                    self._content += self._blank
                return ""
            yield

    def _unsure_place(self, place: int | None) -> int | None:
        """How far away a trigger is, before the one at `place`, of which it is not yet known whether it
        counts."""
        reader = self._reader
        if self._unsure is None or reader.over or (place is not None and reader.left - place > _WIDEST):
            return None
        found = self._unsure.search(reader.text, max(reader.at, len(reader.text) - _WIDEST))
        if found is None or (place is not None and found.start() - reader.at >= place):
            return None
        return found.start() - reader.at

    def _say(self, text: str) -> None:
        said = text.rstrip()
        if said:
            self._content += [*self._blank, said]
            self._blank.clear()
        if len(said) < len(text):
            self._blank.append(text[len(said) :])
