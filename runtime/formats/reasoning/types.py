"""Model families by the names that programs give them, and how each marks its reasoning; and the splitter
that takes a text apart. Knows texts only, no ids and no model.

Sources: the model cards and chat templates of the families named. Families whose marks are control tokens of
a channel protocol are in the table where the decoded text shows them.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.formats.reasoning.marks import BRACKETS, COMMAND, HARMONY, KIMI, KNOWN, SEED, THINK, Marks
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


class ReasoningSplitter:
    """Takes a text apart as it comes, in pieces of any size: feed() and at last end() give (reasoning,
    answer) pieces; whatever the pieces, they add up to the same two texts. `head` is what stood before the
    answer.

    An answer's leading blanks are left out, and the blanks around the thoughts.
    """

    def __init__(self, kind: ReasoningType | None) -> None:
        self._choices = [kind.marks] if kind is not None else list(KNOWN)
        self._begun = kind is not None and kind.begun
        self._marks: Marks | None = kind.marks if self._begun and kind is not None else None
        self._state = "start"  # start -> inside -> gap -> answer
        self._held = ""
        self._said = False  # whether a thought was given out
        self.head = ""

    def feed(self, text: str) -> tuple[str, str]:
        """What can be told now of the reasoning and of the answer."""
        if self._state == "answer":
            return "", text
        self._held += text
        thought = ""
        if self._state == "start":
            self._open()
        if self._state == "inside":
            thought = self._inside()
        return thought, self._gap() if self._state == "gap" else ""

    def end(self) -> tuple[str, str]:
        """What is left when the text is over. Reasoning that was not closed is all reasoning."""
        held, self._held = self._held, ""
        if self._state == "start":
            if self._begun and held.strip():
                self.head += held
                return held.strip(), ""
            return "", held
        if self._state == "inside":
            self.head += held
            return self._trimmed(held.rstrip()), ""
        if self._state == "gap":
            self.head += held
        return "", ""

    def _open(self) -> None:
        """Leave the start once it is known whether an opening mark stands there."""
        stripped = self._held.lstrip()
        for marks in self._choices:
            if stripped.startswith(marks.open):
                cut = len(self._held) - len(stripped) + len(marks.open)
                self._marks = marks
                self._take(cut)
                self._state = "inside"
                return
        if not stripped or any(marks.open.startswith(stripped) for marks in self._choices):
            return  # it may still come
        if self._begun:
            self._state = "inside"
        else:
            self._state = "gap"
            self._keep_blanks = True

    _keep_blanks = False

    def _inside(self) -> str:
        assert self._marks is not None
        close = self._marks.close
        at = self._held.find(close)
        if at >= 0:
            thought = self._trimmed(self._held[:at].rstrip())
            self._take(at + len(close))
            self._state = "gap"
            return thought
        # Hold back what may be the begin of the mark, and blanks before it.
        keep = next(
            (
                n
                for n in range(min(len(close) - 1, len(self._held)), 0, -1)
                if close.startswith(self._held[-n:])
            ),
            0,
        )
        sure = self._held[: len(self._held) - keep].rstrip()
        thought = self._trimmed(sure)
        self._take(len(sure))
        return thought

    def _trimmed(self, text: str) -> str:
        """Without the blanks that begin the thoughts."""
        if self._said:
            return text
        text = text.lstrip()
        self._said = bool(text)
        return text

    def _gap(self) -> str:
        """Blanks between the closing mark and the answer."""
        stripped = self._held if self._keep_blanks else self._held.lstrip()
        if not stripped:
            return ""
        self._take(len(self._held) - len(stripped))
        self._state, answer, self._held = "answer", self._held, ""
        return answer

    def _take(self, size: int) -> None:
        self.head += self._held[:size]
        self._held = self._held[size:]


def split_reasoning(text: str, kind: ReasoningType | None) -> Split:
    """The whole text taken apart; see ReasoningSplitter."""
    splitter = ReasoningSplitter(kind)
    thought, answer = splitter.feed(text)
    more, rest = splitter.end()
    return Split(splitter.head, thought + more, answer + rest)
