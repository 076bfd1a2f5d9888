"""The reasoning of a reply, and the reply proper: one text cut in two, whole or as it grows.

Where the answer starts is told by the front door (`answer_start` in the meta); here the marks are taken off.
It knows no routes.
"""

from __future__ import annotations

from typing import NamedTuple

from runtime.formats.reasoning.marks import ReasoningMarks
from runtime.protocol.io_struct import GenerateOutput


class Said(NamedTuple):
    """reasoning: None where the output has none."""

    reasoning: str | None
    content: str


def split(output: GenerateOutput, thoughts: ReasoningMarks | None) -> Said:
    """The output so far. What it gives of an output that goes on is the beginning of what it will give of a
    later one: blanks and letters that may belong to a mark are held back."""
    meta, text = output.meta, output.text
    if "answer_start" not in meta or thoughts is None:
        return Said(None, text)
    start = meta["answer_start"]
    if start is not None:
        content = text[start:]
        # Text that a constraint shaped is exact; any other begins with what separates it from the mark.
        return Said(thoughts.stripped(text[:start]), content if "grammar" in meta else content.lstrip())
    if meta.get("finish_reason") is not None:
        return Said(_opened(text, thoughts).rstrip(), "")
    begun = text.lstrip()
    if thoughts.open.startswith(begun):
        return Said("", "")
    return Said(_certain(_opened(text, thoughts), thoughts.close), "")


def _opened(text: str, thoughts: ReasoningMarks) -> str:
    return text.lstrip().removeprefix(thoughts.open).lstrip()


def _certain(text: str, close: str) -> str:
    """`text` without an end that may be part of the closing mark, and without blanks before that."""
    held = next((size for size in range(min(len(close), len(text)), 0, -1) if text.endswith(close[:size])), 0)
    return text[: len(text) - held].rstrip()


class Splitter:
    """The same as news: what each output adds to both."""

    def __init__(self, thoughts: ReasoningMarks | None) -> None:
        self._thoughts = thoughts
        self._reasoning = self._content = 0

    def news(self, output: GenerateOutput) -> tuple[str, str]:
        """(reasoning, content) that were not given before."""
        said = split(output, self._thoughts)
        thought = said.reasoning or ""
        news = thought[self._reasoning :], said.content[self._content :]
        self._reasoning, self._content = len(thought), len(said.content)
        return news
