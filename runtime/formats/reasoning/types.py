"""Model families by the names that programs give them, and how each marks its reasoning. Knows texts only, no
ids and no model.

Sources: the model cards and chat templates of the families named. Families whose marks are control tokens of
a channel protocol are in the table where the decoded text shows them.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.formats.reasoning.marks import BRACKETS, COMMAND, HARMONY, KIMI, KNOWN, SEED, THINK, Marks
from runtime.formats.reasoning.splitter import ReasoningSplitter
from runtime.protocol.registry import UnknownName

_GRANITE = Marks("Here is my thought process:", "Here is my response:")
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class ReasoningType:
    """`marks` around the reasoning. `begun`: whether the prompt opens it, so that an output begins inside and
    shows only the closing mark; else an output that does not open it has none."""

    marks: Marks
    begun: bool = False


REASONING_TYPES: dict[str, ReasoningType] = {
    # DeepSeek-R1's template ends with <think>; so do those of the pure thinking models below.
    "deepseek-r1": ReasoningType(THINK, begun=True),
    "deepseek-v3": ReasoningType(THINK),
    "qwen3": ReasoningType(THINK),
    "qwen3-thinking": ReasoningType(THINK, begun=True),
    "glm45": ReasoningType(THINK),
    "hunyuan": ReasoningType(THINK),
    "interns1": ReasoningType(THINK),
    "kimi": ReasoningType(KIMI),
    "kimi_k2": ReasoningType(THINK, begun=True),
    "minimax": ReasoningType(THINK, begun=True),
    "mimo": ReasoningType(THINK),
    "nemotron_3": ReasoningType(THINK),
    "step3": ReasoningType(THINK, begun=True),
    "mistral": ReasoningType(BRACKETS),
    "seed_oss": ReasoningType(SEED),
    "cohere_command4": ReasoningType(COMMAND),
    "gpt-oss": ReasoningType(HARMONY),
    "granite_thinking_parser": ReasoningType(_GRANITE),
}
"""Name -> how the family marks its reasoning. "auto" takes whatever known mark an output shows."""


def reasoning_type(name: str) -> ReasoningType | None:
    """The family called `name`; None for "auto". Raises UnknownName with the known ones."""
    if name == AUTO:
        return None
    found = REASONING_TYPES.get(name)
    if found is None:
        known = ", ".join([AUTO, *REASONING_TYPES])
        raise UnknownName(f"unknown kind of reasoning {name!r}; known: {known}")
    return found


@dataclass(frozen=True, slots=True)
class Split:
    """A text taken apart. `head`: all that stands before the answer, marks and blanks included, verbatim;
    `reasoning`: the thoughts without them. head + answer is the text."""

    head: str
    reasoning: str
    answer: str


def splitter_of(kind: ReasoningType | None) -> ReasoningSplitter:
    """For a text of this kind; None: whatever known mark it shows."""
    if kind is None:
        return ReasoningSplitter(KNOWN)
    return ReasoningSplitter([kind.marks], begun=kind.begun)


def split_reasoning(text: str, kind: ReasoningType | None) -> Split:
    """The whole text taken apart; see ReasoningSplitter."""
    splitter = splitter_of(kind)
    thought, answer = splitter.feed(text)
    more, rest = splitter.end()
    return Split(splitter.head, thought + more, answer + rest)
