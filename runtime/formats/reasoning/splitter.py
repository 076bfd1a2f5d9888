"""Splits a reply's text into reasoning and answer as it comes. Knows only texts, no ids and no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from runtime.formats.reasoning.channels import ChannelSplitter
from runtime.formats.reasoning.marks import HARMONY, KNOWN, Marks, ReasoningType
from runtime.formats.tools.reader import held_back, longest_first


class ReasoningSplitter:
    """feed() and finally end() return (reasoning, answer) pieces. However the text is split, they add up to
    the same two texts. `head` is the text before the answer, unchanged: head + answer is the text, except for
    marks around the answer.

    choices: the marks that the text may begin with. begun: the text begins inside the reasoning, whether or
    not it has the opening mark. known_boundary: the start of the answer is passed with the pieces, and the
    closing mark is not searched in the text. Blanks around the reasoning are removed, and those before the
    answer, unless `exact`.
    """

    def __init__(
        self,
        choices: Sequence[Marks],
        *,
        begun: bool = False,
        known_boundary: bool = False,
        exact: bool = False,
    ) -> None:
        self._choices, self._begun, self._known_boundary, self._exact = choices, begun, known_boundary, exact
        self._marks = choices[0]
        self._close = choices[0].close if begun else ""
        self._held_mark = ""  # text that may be a mark around the answer
        self._state: Literal["start", "inside", "gap", "answer"] = "start"
        self._held = ""
        self._head: list[str] = []
        self._taken = 0  # characters of the head
        self._emitted = False  # whether a piece of reasoning was returned

    @property
    def head(self) -> str:
        return "".join(self._head)

    def feed(self, text: str, answer_start: int | None = None) -> tuple[str, str]:
        """The new pieces of reasoning and answer. answer_start: number of characters of the whole text that
        are reasoning and marks, once that is known."""
        if self._state == "answer":
            return "", self._cleaned(text)
        self._held += text
        reasoning = ""
        if self._state == "start":
            self._open(self._here(answer_start))
        if self._state == "inside":
            reasoning = self._inside(self._here(answer_start))
        return reasoning, self._cleaned(self._gap()) if self._state == "gap" else ""

    def end(self) -> tuple[str, str]:
        """The rest, at the end of the text. Unclosed reasoning is all reasoning."""
        held, self._held = self._held, ""
        if self._state == "start" and not (self._begun and (self._known_boundary or held.strip())):
            return "", held
        if self._state == "answer":
            return "", self._held_mark
        self._head.append(held)
        return ("" if self._state in ("gap", "answer") else self._trimmed(held.rstrip())), ""

    def _here(self, answer_start: int | None) -> int | None:
        """The same position, relative to the held text."""
        return None if answer_start is None else max(0, answer_start - self._taken)

    def _open(self, end: int | None) -> None:
        """Leave the start once it is known whether an opening mark is there."""
        stripped = self._undressed(self._held[:end])
        for marks in self._choices:
            if stripped.startswith(marks.open):
                self._take(len(self._held[:end]) - len(stripped) + len(marks.open))
                self._marks, self._close, self._state = marks, marks.close, "inside"
                return
        known = [mark for marks in self._choices for mark in (marks.open, *marks.dropped)]
        undecided = any(mark.startswith(stripped) for mark in (*known, ""))
        if undecided and (end is None or end > len(self._held)):
            return  # it may still come
        if self._begun:
            self._state = "inside"
        else:
            self._state, self._exact = "gap", True

    def _inside(self, end: int | None) -> str:
        held, close = self._held, self._close
        closers = (close,) if self._known_boundary else (close, *self._marks.ends)
        if not self._known_boundary:
            match = longest_first(closers)[0].search(held)
            # Another mark than the closing one belongs to the answer.
            end = None if match is None else match.end() if match[0] == close else match.start()
        if end is not None and end <= len(held):
            self._take(end)
            self._state = "gap"
            return self._trimmed(held[:end].rstrip().removesuffix(close).rstrip())
        bare = held.rstrip()
        if self._known_boundary and bare.endswith(close):
            sure = bare.removesuffix(close).rstrip()
        else:
            sure = held[: len(held) - held_back(held, 0, closers)].rstrip()
        self._take(len(sure))
        return self._trimmed(sure)

    def _trimmed(self, text: str) -> str:
        """Without the blanks that begin the reasoning."""
        if not self._emitted:
            text = text.lstrip()
            self._emitted = bool(text)
        return text

    def _gap(self) -> str:
        """Blanks between the closing mark and the answer."""
        if not self._exact:
            self._take(len(self._held) - len(self._held.lstrip()))
        answer, self._held = self._held, ""
        if answer:
            self._state = "answer"
        return answer

    def _undressed(self, text: str) -> str:
        """Without leading blanks and marks of the answer, which may precede the reasoning."""
        while True:
            text = text.lstrip()
            dropped = (one for marks in self._choices for one in marks.dropped)
            mark = next((one for one in dropped if text.startswith(one)), "")
            if not mark:
                return text
            text = text[len(mark) :]

    def _cleaned(self, text: str) -> str:
        """A piece of the answer without the marks around it."""
        marks = () if self._known_boundary else self._marks.dropped
        if not marks or not text:
            return text
        *pieces, text = longest_first(marks)[0].split(self._held_mark + text)
        keep = len(text) - held_back(text, 0, marks)
        self._held_mark = text[keep:]
        return "".join([*pieces, text[:keep]])

    def _take(self, size: int) -> None:
        self._head.append(self._held[:size])
        self._taken += size
        self._held = self._held[size:]


@dataclass(frozen=True, slots=True)
class Split:
    """A split text. `head`: everything before the answer, with marks and blanks, unchanged; `reasoning`: the
    thoughts without them. head + answer is the text."""

    head: str
    reasoning: str
    answer: str


class KeptReasoning:
    """Everything is the answer, preceded by the mark at the end of the prompt."""

    head = ""

    def __init__(self, mark: str) -> None:
        self._mark = mark

    def feed(self, text: str) -> tuple[str, str]:
        mark, self._mark = self._mark, ""
        return "", mark + text

    def end(self) -> tuple[str, str]:
        return self.feed("")


AnySplitter: TypeAlias = ReasoningSplitter | ChannelSplitter | KeptReasoning


def splitter_of(kind: ReasoningType | None) -> AnySplitter:
    """For a text of this kind; None: with any known mark."""
    if kind is None:
        return ReasoningSplitter(KNOWN)
    if kind.kept:
        return KeptReasoning(kind.marks.open)
    return splitter_by(kind.marks, begun=kind.begun)


def splitter_by(marks: Marks, *, begun: bool) -> ReasoningSplitter | ChannelSplitter:
    """For a text with these marks; begun: it begins inside the reasoning."""
    if marks.close == HARMONY.close:
        return ChannelSplitter(begun=begun)
    return ReasoningSplitter([marks], begun=begun)


def split_reasoning(text: str, kind: ReasoningType | None) -> Split:
    """Split a whole text; see ReasoningSplitter."""
    splitter = splitter_of(kind)
    thought, answer = splitter.feed(text)
    more, rest = splitter.end()
    return Split(splitter.head, thought + more, answer + rest)
