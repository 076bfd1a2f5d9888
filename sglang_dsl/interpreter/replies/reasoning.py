"""Splits a streamed generation into its reasoning and its answer, each for its own variable. Knows no
backends."""

from __future__ import annotations

from runtime.formats.reasoning.types import Split, reasoning_type, split_reasoning, splitter_of
from sglang_dsl.concurrency.streams import Stream
from sglang_dsl.conversation.requests import Completion, Delta
from sglang_dsl.interpreter.lower import of_sample
from sglang_dsl.interpreter.run import Variable
from sglang_dsl.ir import Gen

__all__ = ["Split", "ReasoningStream"]


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
        meta = delta.meta if delta.told is None else delta.told
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
