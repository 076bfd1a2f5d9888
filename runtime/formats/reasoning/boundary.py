"""Finds where the reasoning of an output ends, while the output grows. Knows ids and texts, no requests."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from runtime.formats.reasoning.marks import ReasoningMarks, find


class ReasoningBoundary:
    """feed() takes the additions of each delta. The work is linear in the output, and nothing is kept once
    the boundary is found.

    tokens: number of ids that are reasoning so far, marks included. answer_start: number of characters of the
    text that are reasoning; None while it continues. opened: the output begins inside the reasoning, so that
    its beginning need not show a mark. decode: the text of leading ids, as in the output.
    """

    def __init__(
        self, marks: ReasoningMarks, decode: Callable[[Sequence[int]], str], *, opened: bool
    ) -> None:
        self.answer_start: int | None = None
        self._marks, self._decode, self._opened = marks, decode, opened
        self._ids: list[int] = []
        self._text = ""  # the whole text at the beginning, then as much as may begin the mark
        self._before = 0  # characters before `_text`
        self._end: int | None = None  # number of ids of the reasoning, once it has ended
        self._plain = False  # the output has no reasoning

    @property
    def tokens(self) -> int:
        if self._plain or not (self._opened or self._begins()):
            return 0
        return len(self._ids) if self._end is None else self._end

    def feed(self, text: str, ids: Sequence[int], replaced: int = 0) -> None:
        if self._end is not None or self._plain:
            return
        if replaced:
            del self._ids[-replaced:]
        seen = max(0, len(self._ids) - len(self._marks.close_ids) + 1)
        self._ids += ids
        if not (self._opened and self._marks.close_ids):
            self._text += text
        if not self._opened:
            self._look_at_beginning()
        if not self._plain:
            self._look_for_end(seen)

    def _begins(self) -> bool:
        """Whether the text begins with the mark that opens the reasoning."""
        marks = self._marks
        if marks.open_ids:
            return tuple(self._ids[: len(marks.open_ids)]) == marks.open_ids
        return bool(marks.open) and self._text.lstrip().startswith(marks.open)

    def _look_at_beginning(self) -> None:
        if self._begins():
            self._opened = True
        elif self._marks.open_ids:
            self._plain = len(self._ids) >= len(self._marks.open_ids)
        else:
            self._plain = not self._marks.open.startswith(self._text.lstrip())

    def _look_for_end(self, seen: int) -> None:
        marks = self._marks
        if marks.close_ids:
            end = find(self._ids, marks.close_ids, seen)
            if end is not None:
                self._set(end, len(self._decode(self._ids[:end])))
            return
        at = self._text.find(marks.close)
        if at >= 0:
            start = self._before + at + len(marks.close)
            count = bisect_left(
                range(len(self._ids)), start, key=lambda size: len(self._decode(self._ids[:size]))
            )
            self._set(count, start)
        elif self._opened:
            keep = len(marks.close) - 1
            dropped = max(0, len(self._text) - keep)
            self._before += dropped
            self._text = self._text[dropped:]

    def _set(self, count: int, start: int) -> None:
        self._end, self.answer_start = count, start
        self._ids, self._text = [], ""
