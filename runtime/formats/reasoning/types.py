"""Model families by their names, and how each marks its reasoning. Knows only texts, no ids and no model.

Sources: the model cards and chat templates of the families. Families whose marks are control tokens of a
channel protocol are included if the decoded text shows them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from runtime.formats.reasoning.channels import ChannelSplitter
from runtime.formats.reasoning.marks import (
    APERTUS,
    BRACKETS,
    COMMAND,
    GEMMA,
    HARMONY,
    INKLING,
    KIMI,
    KIMI_3,
    KNOWN,
    MINIMAX_3,
    SEED,
    THINK,
    Marks,
)
from runtime.formats.reasoning.splitter import ReasoningSplitter, TextMarks
from runtime.protocol.registry import UnknownName

_GRANITE = Marks("Here is my thought process:", "Here is my response:")
_THINK_OR_CALL = replace(THINK, ends=("<tool_call>",))
_HUNYUAN = replace(THINK, ends=("<tool_calls>",), dropped=("<answer>", "</answer>"))
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class ReasoningType:
    """`marks` around the reasoning. `begun`: whether the prompt opens it, so that an output begins inside it
    and has only the closing mark; otherwise an output that does not open it has none. kept: the reasoning is
    not removed from the content; the mark with which the prompt opened it is put before it."""

    marks: Marks
    begun: bool = False
    kept: bool = False


REASONING_TYPES: dict[str, ReasoningType] = {
    # DeepSeek-R1's template ends with <think>, as do those of the pure thinking models below.
    "deepseek-r1": ReasoningType(THINK, begun=True),
    "deepseek-v3": ReasoningType(_THINK_OR_CALL),
    "deepseek-v4": ReasoningType(THINK),
    "deepseek-v41": ReasoningType(THINK),
    "qwen3": ReasoningType(_THINK_OR_CALL),
    "qwen3-thinking": ReasoningType(_THINK_OR_CALL, begun=True),
    "glm45": ReasoningType(_THINK_OR_CALL),
    "hunyuan": ReasoningType(_HUNYUAN),
    "interns1": ReasoningType(_THINK_OR_CALL),
    "iquest_q1": ReasoningType(THINK),
    "kimi": ReasoningType(KIMI),
    "kimi_k2": ReasoningType(replace(THINK, ends=("<|tool_calls_section_begin|>",)), begun=True),
    "kimi_k3": ReasoningType(KIMI_3, begun=True),
    "ling3": ReasoningType(THINK),
    "minimax": ReasoningType(_THINK_OR_CALL, begun=True),
    "minimax-append-think": ReasoningType(THINK, begun=True, kept=True),
    "minimax-m3": ReasoningType(MINIMAX_3),
    "mimo": ReasoningType(_THINK_OR_CALL),
    "nanbeige": ReasoningType(THINK),
    "nemotron_3": ReasoningType(_THINK_OR_CALL),
    "poolside_v1": ReasoningType(_THINK_OR_CALL),
    "step3": ReasoningType(THINK, begun=True),
    "step3p5": ReasoningType(THINK, begun=True),
    "mistral": ReasoningType(BRACKETS),
    "seed_oss": ReasoningType(SEED),
    "cohere_command4": ReasoningType(COMMAND),
    "gemma4": ReasoningType(GEMMA),
    "gpt-oss": ReasoningType(HARMONY),
    "apertus2509": ReasoningType(APERTUS),
    "inkling": ReasoningType(INKLING),
    "granite_thinking_parser": ReasoningType(_GRANITE),
}
"""Name -> how the family marks its reasoning. "auto" uses any known mark in the output."""


def reasoning_type(name: str) -> ReasoningType | None:
    """The family called `name`; None for "auto". Raises UnknownName listing the known ones."""
    if name == AUTO:
        return None
    kind = REASONING_TYPES.get(name)
    if kind is None:
        known = ", ".join([AUTO, *REASONING_TYPES])
        raise UnknownName(f"unknown kind of reasoning {name!r}; known: {known}")
    return kind


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


def splitter_by(marks: TextMarks, *, begun: bool) -> ReasoningSplitter | ChannelSplitter:
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
