"""Replies in channels (harmony, of gpt-oss): analysis is reasoning, other messages without a recipient are
the answer, and a message to a tool is passed on unchanged for the tool-call parser. Knows only texts. Source:
https://cookbook.openai.com/articles/openai-harmony"""

from __future__ import annotations

import re
from collections.abc import Callable

from runtime.formats.tools.reader import Malformed, Reader, Reading

_STARTS = ("<|start|>", "<|channel|>")
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_MESSAGE = "<|message|>"
_LONGEST_HEADER = 256
_TO_TOOL = re.compile(r"\bto=")
_PLAIN_START, _PLAIN_END = "analysis", "assistantfinal"  # in text without control tokens


class ChannelSplitter:
    """Like ReasoningSplitter, for one reply. begun: the text begins inside an analysis."""

    def __init__(self, *, begun: bool = False) -> None:
        self._reader, self._begun = Reader(), begun
        self._reasoning: list[str] = []
        self._answer: list[str] = []
        self._head: list[str] = []
        self._thoughts = 0  # number of analysis messages so far
        self._answered = False
        self._steps = self._run()

    @property
    def head(self) -> str:
        return "".join(self._head)

    def feed(self, text: str) -> tuple[str, str]:
        return self._step() if self._reader.feed(text) else ("", "")

    def end(self) -> tuple[str, str]:
        self._reader.end()
        return self._step()

    def _step(self) -> tuple[str, str]:
        next(self._steps, None)
        pieces = "".join(self._reasoning), "".join(self._answer)
        self._reasoning, self._answer = [], []
        return pieces

    def _run(self) -> Reading[None]:
        reader = self._reader
        if self._begun:
            yield from self._body(self._think, (*_STARTS, *_ENDS))
        elif (yield from reader.starts((_PLAIN_START,))):
            self._drop(len(_PLAIN_START))
            yield from self._body(self._think, (_PLAIN_END, *_STARTS, *_ENDS))
            if (yield from reader.starts((_PLAIN_END,))):
                self._drop(len(_PLAIN_END))
        while True:
            yield from self._body(self._add_answer, (*_STARTS, *_ENDS))
            mark = yield from reader.starts((*_STARTS, *_ENDS))
            if not mark:
                return
            if mark in _ENDS:
                self._drop(len(mark))
            else:
                yield from self._message()

    def _message(self) -> Reading[None]:
        """One message, from its start."""
        reader = self._reader
        reader.reset()
        try:
            header = yield from reader.until((_MESSAGE,), _LONGEST_HEADER)
        except Malformed:
            self._add_answer(reader.reset())
            return
        reader.take(len(_MESSAGE))
        raw = reader.reset()
        ends = ("<|start|>", *_ENDS)
        if _TO_TOOL.search(header):
            self._add_answer(raw)
            yield from self._body(self._add_answer, ends)
            end = yield from reader.starts(ends)
            if end in _ENDS:
                self._add_answer(reader.take(len(end)))
        elif "analysis" in header:
            self._keep(raw)
            if self._thoughts:
                self._reasoning.append("\n")
            yield from self._body(self._think, ends)
        else:
            self._keep(raw)
            yield from self._body(self._add_answer, ends)

    def _body(self, emit: Callable[[str], None], ends: tuple[str, ...]) -> Reading[None]:
        """Text up to one of `ends`, which is not consumed."""
        reader = self._reader
        self._thoughts += emit == self._think
        while True:
            distance = reader.find(ends)
            emit(reader.take(reader.left - reader.held(ends) if distance is None else distance))
            if distance is not None:
                return
            if reader.ended:
                emit(reader.take(reader.left))
                return
            yield

    def _think(self, text: str) -> None:
        self._reasoning.append(text)
        self._keep(text)

    def _add_answer(self, text: str) -> None:
        self._answer.append(text)
        self._answered = self._answered or bool(text)
        self._reader.taken.clear()

    def _drop(self, size: int) -> None:
        self._keep(self._reader.take(size))

    def _keep(self, text: str) -> None:
        """Remember text before the answer unchanged."""
        if not self._answered:
            self._head.append(text)
        self._reader.taken.clear()
