"""A model's output on its way to a client: text deltas -> reasoning splitter -> tool-call splitter -> events.
Every API renders the same events. Knows no API, no ids and no tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec

from runtime.formats.reasoning.marks import Marks, ReasoningType
from runtime.formats.reasoning.splitter import AnySplitter, ReasoningSplitter, splitter_by, splitter_of
from runtime.formats.tools.parser import FunctionCallParser
from runtime.formats.tools.types import StreamingParseResult
from runtime.protocol.io_struct import OutputDelta


class ReasoningDelta(msgspec.Struct, frozen=True, gc=False):
    text: str


class ContentDelta(msgspec.Struct, frozen=True, gc=False):
    """Empty if a delta has log-probabilities but no content: they are sent with an event of this kind."""

    text: str


class ToolCallDelta(msgspec.Struct, frozen=True, gc=False):
    """index: of the call in the reply. The first delta of a call has its name; arguments: the next piece of
    their JSON."""

    index: int
    name: str | None
    arguments: str = ""


ReplyEvent: TypeAlias = ReasoningDelta | ContentDelta | ToolCallDelta


def _events(result: StreamingParseResult) -> list[ReplyEvent]:
    content: list[ReplyEvent] = [ContentDelta(result.normal_text)] if result.normal_text else []
    return content + [ToolCallDelta(item.tool_index, item.name, item.parameters) for item in result.calls]


def was_cut(meta: Mapping[str, Any]) -> bool:
    """Whether an output stops within its constraint, or the engine wrote its end instead of the model
    (closed_by_budget): then a call at its end is not valid."""
    unfinished = (meta.get("finish_reason") or {}).get("unfinished")
    return unfinished is not None or _closed(meta)


def _closed(meta: Mapping[str, Any]) -> bool:
    return bool((meta.get("grammar") or {}).get("closed_by_budget"))


class ReplyParser:
    """One reply. It is fed the deltas of a stream, or a whole output, and keeps the results:

    events      of the last delta
    output      the last delta itself; None before the first
    is_first    whether it was the first
    reasoning   all of it so far, None if the reply has none
    content     all of it so far
    calls       [name, arguments' JSON] of each tool call so far

    The end of an output that was_cut() creates no call: if none has begun, the text is content; a call that a
    stream has begun stays as the model left it, without the engine's text.

    marks: of the model's reasoning; None: it is not separated. tools: parses the text after the reasoning;
    None: all of it is content. apart: separate the reasoning whenever the text shows it, not only if it was
    requested. kind: how such a model marks it, if given. held: return all reasoning at its
    end. Unless the output was cut, any split of it into deltas gives the same reasoning and content.
    """

    def __init__(
        self,
        marks: Marks | None = None,
        tools: FunctionCallParser | None = None,
        *,
        apart: bool = False,
        kind: ReasoningType | None = None,
        held: bool = False,
    ) -> None:
        self.events: list[ReplyEvent] = []
        self.output: OutputDelta | None = None
        self.is_first = True
        self._marks, self._tools = marks, tools
        self._apart, self._kind, self._held = apart and marks is not None, kind, held
        self._held_reasoning: list[str] = []
        self._splitter: AnySplitter | None = None
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._answer: list[str] = []  # the text after the reasoning, until a call begins
        self.calls: list[list[str]] = []

    @property
    def reasoning(self) -> str | None:
        if self._splitter is None or (self._apart and not self._reasoning):
            return None
        return "".join(self._reasoning)

    @property
    def may_reason(self) -> bool:
        """Whether reasoning is still possible."""
        return self._apart and not self._content and not self.calls

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def meta(self) -> dict[str, Any]:
        """The meta_info of the last delta."""
        return {} if self.output is None else self.output.meta

    def feed(self, output: OutputDelta) -> None:
        meta = output.meta
        self.is_first = self.output is None
        self.output = output
        ended = meta.get("finish_reason") is not None
        if self._marks is not None and "answer_start" in meta:
            self._apart = False
            reasoning, text = self._by_boundary(self._marks, output, ended)
        elif self._marks is not None and self._apart:
            reasoning, text = self._by_text(self._marks, output, ended)
        else:
            reasoning, text = "", output.text
        events = self._parsed(text, ended)
        for one in events:
            match one:
                case ContentDelta(text=piece):
                    self._content.append(piece)
                case ToolCallDelta(name=None, arguments=piece):
                    self.calls[-1][1] += piece
                case ToolCallDelta(name=str(name), arguments=piece):
                    self.calls.append([name, piece])
        if meta.get("output_token_logprobs") and not any(isinstance(one, ContentDelta) for one in events):
            events = [ContentDelta(""), *events]
        if reasoning:
            self._reasoning.append(reasoning)
            self._held_reasoning.append(reasoning)
        if self._held_reasoning:
            complete = ended or any(not isinstance(one, ContentDelta) or one.text for one in events)
            if complete or not self._held:
                events = [ReasoningDelta("".join(self._held_reasoning)), *events]
                self._held_reasoning.clear()
        self.events = events

    @property
    def was_cut(self) -> bool:
        return was_cut(self.meta)

    def _parsed(self, text: str, ended: bool) -> list[ReplyEvent]:
        """The events of the next piece of text after the reasoning."""
        if not self.calls:
            self._answer.append(text)
        if ended and self.was_cut:
            if not self.calls:
                rest = "".join(self._answer)[len(self.content) :]
                return [ContentDelta(rest)] if rest else []
            if _closed(self.meta):
                return []
        if self._tools is None:
            return [ContentDelta(text)] if text else []
        events = _events(self._tools.parse_stream_chunk(text)) if text else []
        return events + _events(self._tools.parse_stream_end()) if ended else events

    def _by_text(self, marks: Marks, output: OutputDelta, ended: bool) -> tuple[str, str]:
        """Reasoning in the text, or begun by the prompt."""
        if self._splitter is None:
            begun = output.meta.get("reasoning_begun")
            if begun is False:  # the prompt closed it
                self._apart = False
                return "", output.text
            if self._kind is not None and (begun is None or self._kind.kept):
                self._splitter = splitter_of(self._kind)
            else:
                self._splitter = splitter_by(marks, begun=bool(begun))
        return _with_rest(self._splitter.feed(output.text), self._splitter, ended)

    def _by_boundary(self, marks: Marks, output: OutputDelta, ended: bool) -> tuple[str, str]:
        """The engine found where the answer starts."""
        meta = output.meta
        if not isinstance(self._splitter, ReasoningSplitter):
            # Constrained text is exact; other text begins with the separator after the mark.
            self._splitter = ReasoningSplitter(
                [marks], begun=True, known_boundary=True, exact="grammar" in meta
            )
        return _with_rest(self._splitter.feed(output.text, meta["answer_start"]), self._splitter, ended)


def _with_rest(pieces: tuple[str, str], splitter: AnySplitter, ended: bool) -> tuple[str, str]:
    """Reasoning and answer, with what the splitter still holds if the output has ended."""
    more, rest = splitter.end() if ended else ("", "")
    return pieces[0] + more, pieces[1] + rest


def ToolCalls(parser: FunctionCallParser) -> FunctionCallParser:
    """The former name of what splits tool calls off, for one release: the parser does it itself."""
    return parser
