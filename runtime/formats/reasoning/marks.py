"""How models mark their reasoning: the text before the answer, and the mark that ends it.

Tables of marks and of model families, and which marks a checkpoint uses. It knows texts and ids, no model and
no server. Sources: the model cards and chat templates of the families.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from runtime.protocol.errors import BadRequest
from runtime.protocol.registry import UnknownName

AUTO, NONE = "auto", "none"
SWITCHES = ("enable_thinking", "thinking")
"""The names of chat-template variables that switch reasoning on or off."""


@dataclass(frozen=True, slots=True)
class Marks:
    """Texts around the reasoning. `open` may be written by the prompt or by the model. inside: control tokens
    that may also occur in the reasoning. ends: texts before which the reasoning also ends, such as the
    beginning of a tool call; they are kept. dropped: texts around the answer that are removed."""

    open: str
    close: str
    inside: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()


THINK = Marks("<think>", "</think>")  # DeepSeek-R1, Qwen3, QwQ, GLM-4.5, SmolLM3, Kimi K2, MiniMax
BRACKETS = Marks("[THINK]", "[/THINK]")  # Magistral
SEED = Marks("<seed:think>", "</seed:think>")  # Seed-OSS
COMMAND = Marks(
    "<|START_THINKING|>",
    "<|END_THINKING|>",
    ends=("<|START_ACTION|>", "<|START_TEXT|>", "<|START_RESPONSE|>"),
    dropped=("<|START_TEXT|>", "<|END_TEXT|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
)  # Command A
GEMMA = Marks("<|channel>thought\n", "<channel|>")  # Gemma 4
APERTUS = Marks("<|inner_prefix|>", "<|inner_suffix|>", ends=("<|tools_prefix|>",))
MINIMAX_3 = Marks("<mm:think>", "</mm:think>")
INKLING = Marks(
    "<|content_thinking|>",
    "<|end_message|>",
    dropped=("<|message_model|>", "<|content_text|>", "<|end_message|>", "<|content_model_end_sampling|>"),
)
KIMI_3 = Marks(
    "<|open|>think<|sep|>",
    "<|close|>think<|sep|>",
    ends=("<|open|>tools<|sep|>", "<|open|>response<|sep|>"),
    dropped=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
)
KIMI = Marks("◁think▷", "◁/think▷")  # Kimi-VL
HARMONY = Marks(
    "<|channel|>analysis<|message|>", "<|channel|>final<|message|>", ("<|end|>", "<|start|>")
)  # gpt-oss

KNOWN: tuple[Marks, ...] = (THINK, BRACKETS, SEED, COMMAND, KIMI, GEMMA, APERTUS, MINIMAX_3, HARMONY)
"""The most common first: if a tokenizer has the tokens of several, the first is used."""


_GRANITE = Marks("Here is my thought process:", "Here is my response:")
_THINK_OR_CALL = replace(THINK, ends=("<tool_call>",))
_HUNYUAN = replace(THINK, ends=("<tool_calls>",), dropped=("<answer>", "</answer>"))


@dataclass(frozen=True, slots=True)
class ReasoningType:
    """`marks` around the reasoning. `begun`: whether the prompt opens it, so that an output begins inside it
    and has only the closing mark; otherwise an output that does not open it has none. kept: the reasoning is
    not removed from the content; the mark with which the prompt opened it is put before it."""

    marks: Marks
    begun: bool = False
    kept: bool = False


REASONING_TYPES: dict[str, ReasoningType] = {
    # Their templates end with <think>.
    **dict.fromkeys(("deepseek-r1", "step3", "step3p5"), ReasoningType(THINK, begun=True)),
    **dict.fromkeys(("qwen3-thinking", "minimax"), ReasoningType(_THINK_OR_CALL, begun=True)),
    "kimi_k2": ReasoningType(replace(THINK, ends=("<|tool_calls_section_begin|>",)), begun=True),
    "kimi_k3": ReasoningType(KIMI_3, begun=True),
    "minimax-append-think": ReasoningType(THINK, begun=True, kept=True),
    **dict.fromkeys(("deepseek-v4", "deepseek-v41", "iquest_q1", "ling3", "nanbeige"), ReasoningType(THINK)),
    **dict.fromkeys(
        ("deepseek-v3", "qwen3", "glm45", "interns1", "mimo", "nemotron_3", "poolside_v1"),
        ReasoningType(_THINK_OR_CALL),
    ),
    "hunyuan": ReasoningType(_HUNYUAN),
    "kimi": ReasoningType(KIMI),
    "minimax-m3": ReasoningType(MINIMAX_3),
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
    if name != AUTO and name not in REASONING_TYPES:
        known = ", ".join([AUTO, *REASONING_TYPES])
        raise UnknownName(f"unknown kind of reasoning {name!r}; known: {known}")
    return REASONING_TYPES.get(name)


@dataclass(frozen=True, slots=True)
class ReasoningMarks(Marks):
    """The marks of one model.

    close_ids: the closing mark as ids, if it contains an added token; then these ids end the reasoning, and
    the same letters in other tokens do not. () = the mark is plain text, however it is tokenised. open_ids:
    likewise. inside_ids: control tokens that may occur in the reasoning.
    """

    open_ids: tuple[int, ...] = ()
    close_ids: tuple[int, ...] = ()
    inside_ids: tuple[int, ...] = ()

    def opened_by(self, prompt: str) -> bool:
        """Whether the end of the prompt opens the reasoning, so that the output begins with it."""
        return bool(self.open) and prompt.rstrip().endswith(self.open)

    def closed_by(self, prompt: str) -> bool:
        """Whether the end of the prompt closes the reasoning, so that the output begins with the answer."""
        return prompt.rstrip().endswith(self.close)

    def end_in(self, ids: Sequence[int], start: int = 0) -> int | None:
        """The end of the first close_ids in `ids` from `start` on; None if there are none."""
        size = len(self.close_ids)
        while True:
            try:
                start = ids.index(self.close_ids[0], start)
            except ValueError:
                return None
            if tuple(ids[start : start + size]) == self.close_ids:
                return start + size
            start += 1


def marks_of(
    option: str | Marks,
    added_id: Callable[[str], int | None],
    encode: Callable[[str], Sequence[int]],
    templates: Iterable[str] = (),
) -> ReasoningMarks | None:
    """The marks of a model; None if it does not reason.

    option: marks, "auto" (known marks whose end is an added token of the tokenizer, else whose two ends are
    in a chat template), "none", or the text that ends the reasoning. encode: text -> ids, with control
    tokens. Raises BadRequest for an empty text.
    """
    if option == NONE:
        return None
    if not option:
        raise BadRequest('is empty; "none" says that the model does not reason', where="reasoning_end")
    marks = option if isinstance(option, Marks) else None
    if option == AUTO:
        marks = _known(added_id, list(templates))
    elif marks is None:
        marks = next((known for known in KNOWN if known.close == option), Marks("", str(option)))
    if marks is None:
        return None
    opens, closes = (_ids(mark, added_id, encode) for mark in (marks.open, marks.close))
    inside = [token for text in marks.inside if (token := added_id(text)) is not None]
    texts = (marks.open, marks.close, marks.inside, marks.ends, marks.dropped)
    return ReasoningMarks(*texts, opens, closes, tuple({*opens, *inside}))


def _known(added_id: Callable[[str], int | None], templates: Sequence[str]) -> Marks | None:
    for marks in KNOWN:
        if added_id(marks.close) is not None:
            return marks
    for marks in KNOWN:
        if any(marks.open in text and marks.close in text for text in templates):
            return marks
    return None


def _ids(
    mark: str, added_id: Callable[[str], int | None], encode: Callable[[str], Sequence[int]]
) -> tuple[int, ...]:
    """`mark` as ids, if it begins with an added token of the tokenizer; else () for plain text."""
    if not mark:
        return ()
    whole = added_id(mark)
    if whole is not None:
        return (whole,)
    cut = next((at for at in range(len(mark), 0, -1) if added_id(mark[:at]) is not None), 0)
    return tuple(encode(mark)) if cut else ()
