"""Texts of replies: split into reasoning and answer, each for its own variable, and requested again if they
are no value of their type. Knows no backends."""

from __future__ import annotations

from typing import Any

import msgspec

from runtime.formats.reasoning.marks import reasoning_type
from runtime.formats.reasoning.splitter import Split, split_reasoning, splitter_of
from runtime.protocol.messages import Message
from sglang_dsl.concurrency.streams import Stream
from sglang_dsl.conversation.requests import Completion, Delta, Prompt
from sglang_dsl.interpreter.lower import of_sample
from sglang_dsl.interpreter.run import Variable
from sglang_dsl.ir import Gen

__all__ = ["ReasoningStream", "Split", "corrected"]

_CUE = 400
"""Characters of a line that are repeated, at most."""


class ReasoningStream:
    """For one generation. `reasoning`: the variable of its reasoning; `whole`: the stream of the program's
    text, which contains no reasoning. Pieces of reasoning are also metadata (reasoning_content) of the
    variable's own stream. A backend that separates the reasoning itself sends texts without it."""

    def __init__(self, node: Gen, variable: Variable, reasoning: Variable | None, whole: Stream) -> None:
        self._variable, self._reasoning, self._whole = variable, reasoning, whole
        kind = None if node.reasoning is None else reasoning_type(node.reasoning)
        self._splitter = None if node.reasoning is None else splitter_of(kind)

    def piece(self, delta: Delta) -> None:
        if delta.reasoning:
            self._splitter = None
        if self._splitter is None:
            self._put(delta.reasoning, delta.text, delta)
        else:
            self._put(*self._splitter.feed(delta.text), delta)

    def end(self) -> None:
        """Pass on what was held back at the end of the stream."""
        if self._splitter is not None:
            self._put(*self._splitter.end(), Delta(""))

    def _put(self, reasoning: str, answer: str, delta: Delta) -> None:
        if reasoning:
            self._variable.put("", {"reasoning_content": reasoning})
            if self._reasoning is not None:
                self._reasoning.put(reasoning)
        meta = delta.meta if delta.piece_meta is None else delta.piece_meta
        if meta is not None and "reasoning_content" in meta:  # passed on in pieces
            meta = {name: value for name, value in meta.items() if name != "reasoning_content"}
        self._variable.put(answer, meta if answer or delta.meta is not None else None)
        self._whole.put(answer)

    @staticmethod
    def splits(node: Gen, done: Completion) -> list[Split]:
        """Reasoning and answer of complete texts; without `reasoning` all text is answer."""
        if node.reasoning is None:
            return [Split("", "", text) for text in done.texts]
        kind, splits = reasoning_type(node.reasoning), []
        for index, text in enumerate(done.texts):
            apart = of_sample(done.meta, index).get("reasoning_content")
            splits.append(Split("", apart, text) if apart else split_reasoning(text, kind))
        return splits


def corrected(prompt: Prompt, text: str, kind: str, fault: str, cut: bool) -> Prompt:
    """The prompt that requests a `kind` again after the model wrote `text`: in an assistant's turn by a turn
    of the user behind it, elsewhere by a remark in the text and the prompt's last line. `cut`: the text ended
    at its token limit."""
    *before, last = prompt.messages
    message = f"That is not a valid {kind}: {fault}."
    if cut:
        message += " It was cut off at the token limit: write less."
    failed = _behind(last.content, text)
    if last.role == "assistant":
        message += f" Answer again, with a valid {kind} and nothing else."
        if not failed and before and before[-1].role == "user":
            # The reply was empty, and APIs take no empty turn: the remark goes into the turn before.
            content = _behind(before[-1].content, f"\n\n({message})")
            turn = msgspec.structs.replace(before[-1], content=content)
            return Prompt((*before[:-1], turn, last), prompt.tools)
        turn = Message("user", message)
        done = msgspec.structs.replace(last, content=failed, open=False)
        return Prompt((*before, done, turn, last), prompt.tools)
    line = _behind(last.content, "")
    cue = (line if isinstance(line, str) else str(line[-1]["text"])).rsplit("\n", 1)[-1][-_CUE:]
    again = _behind(failed, f"\n\n({message} Once more, valid:)\n\n{cue}")
    return Prompt((*before, msgspec.structs.replace(last, content=again)), prompt.tools)


def _behind(content: str | list[dict[str, Any]], text: str) -> str | list[dict[str, Any]]:
    """A message's content with text behind it."""
    if isinstance(content, str):
        return content + text
    if content and content[-1]["type"] == "text":
        return [*content[:-1], {"type": "text", "text": content[-1]["text"] + text}]
    return [*content, {"type": "text", "text": text}]
