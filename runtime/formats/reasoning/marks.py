"""How models mark their reasoning: the text before the answer, and the mark that ends it.

A table of the marks of model families, which of them a checkpoint uses, and where the answer begins in an
output. It knows texts and ids, no model and no server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from runtime.protocol.errors import BadRequest

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


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """How one model marks its reasoning.

    close_ids: the mark as ids, if it contains an added token; then these ids end the reasoning, and the same
    letters in other tokens do not. () = the mark is plain text, however it is tokenised. inside_ids: control
    tokens that may occur in the reasoning. ends, dropped: see Marks.
    """

    open: str
    close: str
    open_ids: tuple[int, ...] = ()
    close_ids: tuple[int, ...] = ()
    inside_ids: tuple[int, ...] = ()
    ends: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()

    def opened_by(self, prompt: str) -> bool:
        """Whether the end of the prompt opens the reasoning, so that the output begins with it."""
        return bool(self.open) and prompt.rstrip().endswith(self.open)

    def closed_by(self, prompt: str) -> bool:
        """Whether the end of the prompt closes the reasoning, so that the output begins with the answer."""
        return prompt.rstrip().endswith(self.close)


def find(ids: Sequence[int], sequence: Sequence[int], start: int = 0) -> int | None:
    """The end of the first `sequence` in `ids` from `start` on; None if there is none."""
    size, first = len(sequence), sequence[0]
    while True:
        try:
            start = ids.index(first, start)
        except ValueError:
            return None
        if tuple(ids[start : start + size]) == tuple(sequence):
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
    if isinstance(option, Marks):
        marks: Marks | None = option
    else:
        marks = _known(added_id, list(templates)) if option == AUTO else _marks_ending_with(option)
    if marks is None:
        return None
    opens = _ids(marks.open, added_id, encode)
    inside = [token for text in marks.inside if (token := added_id(text)) is not None]
    closes = _ids(marks.close, added_id, encode)
    every = tuple({*opens, *inside})
    return ReasoningMarks(marks.open, marks.close, opens, closes, every, marks.ends, marks.dropped)


def _marks_ending_with(close: str) -> Marks:
    return next((marks for marks in KNOWN if marks.close == close), Marks("", close))


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
