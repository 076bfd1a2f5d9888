"""A reply's text taken apart as it comes: the reasoning, and the answer. Knows texts only, no ids and no
model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol


class TextMarks(Protocol):
    """What stands around reasoning; `open` may be empty."""

    @property
    def open(self) -> str: ...

    @property
    def close(self) -> str: ...


class ReasoningSplitter:
    """feed() and at last end() give (reasoning, answer) pieces; whatever the pieces of the text, they add up
    to the same two texts. `head` is what stood before the answer, verbatim: head + answer is the text.

    choices: the marks that the text may show at its beginning. begun: the text begins inside the reasoning,
    whether or not it shows the opening mark. boundary_given: where the answer starts comes with the pieces;
    the closing mark is not looked for in the text. The blanks around the reasoning are left out, and those
    that lead the answer, unless `exact`.
    """

    def __init__(
        self,
        choices: Sequence[TextMarks],
        *,
        begun: bool = False,
        boundary_given: bool = False,
        exact: bool = False,
    ) -> None:
        self._choices, self._begun, self._boundary_given, self._exact = choices, begun, boundary_given, exact
        self._close = choices[0].close if begun else ""
        self._state: Literal["start", "inside", "gap", "answer"] = "start"
        self._held = ""
        self._head: list[str] = []
        self._taken = 0  # characters of the head
        self._emitted = False  # whether a piece of reasoning was given out

    @property
    def head(self) -> str:
        return "".join(self._head)

    def feed(self, text: str, answer_start: int | None = None) -> tuple[str, str]:
        """What can be told now of the reasoning and of the answer. answer_start: characters of the whole text
        that are reasoning and marks, once that is told."""
        if self._state == "answer":
            return "", text
        self._held += text
        reasoning = ""
        if self._state == "start":
            self._open(self._here(answer_start))
        if self._state == "inside":
            reasoning = self._inside(self._here(answer_start))
        return reasoning, self._gap() if self._state == "gap" else ""

    def end(self) -> tuple[str, str]:
        """What is left when the text is over. Reasoning that was not closed is all reasoning."""
        held, self._held = self._held, ""
        if self._state == "start" and not (self._begun and (self._boundary_given or held.strip())):
            return "", held
        self._head.append(held)
        return ("" if self._state in ("gap", "answer") else self._trimmed(held.rstrip())), ""

    def _here(self, answer_start: int | None) -> int | None:
        """The same place, counted in the held text."""
        return None if answer_start is None else max(0, answer_start - self._taken)

    def _open(self, end: int | None) -> None:
        """Leave the start once it is known whether an opening mark stands there."""
        stripped = self._held[:end].lstrip()
        for marks in self._choices:
            if stripped.startswith(marks.open):
                self._take(len(self._held[:end]) - len(stripped) + len(marks.open))
                self._close, self._state = marks.close, "inside"
                return
        undecided = not stripped or any(marks.open.startswith(stripped) for marks in self._choices)
        if undecided and (end is None or end > len(self._held)):
            return  # it may still come
        if self._begun:
            self._state = "inside"
        else:
            self._state, self._exact = "gap", True

    def _inside(self, end: int | None) -> str:
        held, close = self._held, self._close
        if not self._boundary_given:
            at = held.find(close)
            end = None if at < 0 else at + len(close)
        if end is None or end > len(held):
            sure = held[: len(held) - self._open_end()].rstrip()
            self._take(len(sure))
            return self._trimmed(sure)
        self._take(end)
        self._state = "gap"
        return self._trimmed(held[:end].rstrip().removesuffix(close).rstrip())

    def _open_end(self) -> int:
        """How many of the last characters may turn out to be the closing mark."""
        held, close = self._held, self._close
        bare = held.rstrip()
        if self._boundary_given and bare.endswith(close):
            return len(held) - len(bare) + len(close)
        sizes = range(min(len(close) - 1, len(held)), 0, -1)
        return next((size for size in sizes if close.startswith(held[-size:])), 0)

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

    def _take(self, size: int) -> None:
        self._head.append(self._held[:size])
        self._taken += size
        self._held = self._held[size:]
