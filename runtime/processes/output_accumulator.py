"""OutputAccumulator: all that was heard of one engine request, added up, and its meta_info.

Knows no threads and no queues.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from runtime.formats.reasoning.marks import ReasoningMarks, find
from runtime.protocol.io_struct import StrOutput, TokenizedGenerateReqInput, TokenOutput

TokenText = Callable[[int], str]
"""A token id's own text."""
Pairs = Sequence[Sequence[tuple[int, float]]]


@dataclass(frozen=True, slots=True)
class Facts:
    """What answers need to know of the model. text_of: a token's text; decode: the text of ids, with or
    without special ones; marks: around its reasoning; opens_thoughts: the template opens every reply of a
    chat inside the reasoning."""

    text_of: TokenText
    decode: Callable[[Sequence[int], bool], str]
    marks: ReasoningMarks | None = None
    opens_thoughts: bool = False
    weight_version: str = "default"

    def thoughts(self, part: OutputAccumulator, is_chat: bool) -> int:
        """How many of an output's ids are reasoning, its marks included."""
        marks, ids = self.marks, part.ids
        if marks is None:
            return 0
        opened = part.request.require_reasoning or (is_chat and self.opens_thoughts)
        if not opened:
            begun = tuple(ids[: len(marks.open_ids)]) == marks.open_ids
            if not begun if marks.open_ids else not part.text.lstrip().startswith(marks.open or "\0"):
                return 0
        if marks.close_ids:
            end = find(ids, marks.close_ids)
            return len(ids) if end is None else end
        start = self.answer_start(part)
        if start is None:
            return len(ids)
        return bisect_left(range(len(ids)), start, key=lambda count: len(self._text(part, ids[:count])))

    def answer_start(self, part: OutputAccumulator) -> int | None:
        """How many characters of the part's text are reasoning; None while it goes on."""
        marks = self.marks
        if marks is None:
            return 0
        return marks.answer_starts(part.text, part.ids, lambda ids: self._text(part, ids))

    def _text(self, part: OutputAccumulator, ids: Sequence[int]) -> str:
        return self.decode(ids, part.request.sampling_params.skip_special_tokens)


class OutputAccumulator:
    """text and ids so far; lists of log-probabilities have one entry per id."""

    __slots__ = (
        "_pieces", "_told", "grammar", "hidden_states", "ids", "last", "logprobs", "request", "scored",
        "token_ids", "top",
    )  # fmt: skip

    def __init__(self, request: TokenizedGenerateReqInput) -> None:
        self.request = request
        self.ids: list[int] = []
        self.logprobs: list[float | None] = []
        self.top: list[list[tuple[int, float]]] = []
        self.token_ids: list[list[tuple[int, float]]] = []
        self.hidden_states: list[list[float]] = []
        self.last: TokenOutput | None = None
        self.scored: TokenOutput | None = None  # what came with the prompt's log-probabilities
        self.grammar: dict[str, Any] | None = None
        self._pieces: list[str] = []
        self._told = False

    @property
    def text(self) -> str:
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def add(self, output: StrOutput) -> None:
        news = output.news
        if output.text:
            self._pieces.append(output.text)
        if news.replaced:
            for some in (self.ids, self.logprobs, self.top, self.token_ids):
                del some[-news.replaced :]
        self.ids += news.new_ids
        self.logprobs += news.output_logprobs
        self.top += news.output_top_logprobs
        self.token_ids += news.output_token_ids_logprobs
        self.hidden_states += news.hidden_states or ()
        self.last = news
        if news.input_logprobs is not None:
            self.scored = news
        if news.grammar is not None:
            self.grammar = msgspec.to_builtins(news.grammar)

    def counters(self) -> dict[str, Any]:
        """What every answer tells."""
        news = self.last
        if news is None:
            return {}
        return {
            "prompt_tokens": news.prompt_tokens,
            "completion_tokens": news.completion_tokens,
            "cached_tokens": news.cached_tokens,
            "jumped_tokens": news.jumped_tokens,
            "decode_steps": news.decode_steps,
            "num_retractions": news.retractions,
            "queue_time": news.queue_s,
            "first_token_latency": news.first_token_s,
        }

    def finish_reason(self) -> dict[str, Any] | None:
        """{type, and what goes with it: matched, or length}; None while it goes on."""
        finish = None if self.last is None else self.last.finish
        if finish is None:
            return None
        made: dict[str, Any] = {"type": finish.type}
        if finish.type == "length":
            made["length"] = len(self.ids)
        elif finish.matched is not None:
            made["matched"] = finish.matched
        if finish.unfinished is not None:
            made["unfinished"] = finish.unfinished
        return made

    def logprob_meta(self, text_of: TokenText | None) -> dict[str, Any]:
        """[log-probability, id, text] of every token, where asked for; text is None without `text_of`. The
        prompt's are in the first and in the last answer of a stream: they may be long; [] where none of them
        are asked for."""
        if not self.request.return_logprob:
            return {}
        entries = _Entries(text_of)
        meta: dict[str, Any] = {
            "output_token_logprobs": [
                entries.one(logprob, token) for logprob, token in zip(self.logprobs, self.ids, strict=False)
            ]
        }
        if self.request.top_logprobs_num:
            meta["output_top_logprobs"] = entries.many(self.top)
        if self.request.token_ids_logprob:
            meta["output_token_ids_logprobs"] = entries.many(self.token_ids)
        none_of_prompt: dict[str, Any] = {name.replace("output", "input"): [] for name in meta}
        # Streams may leave earlier entries out (native.Cut): this says how many there are in all.
        meta["output_token_logprobs_length"] = len(meta["output_token_logprobs"])
        if self.request.logprob_start_len < 0:
            return meta | none_of_prompt
        news = self.scored
        if news is None or news.input_logprobs is None or (self._told and self.finish_reason() is None):
            return meta
        self._told = True
        ids = _last(self.request.input_ids, len(news.input_logprobs))
        meta["input_token_logprobs"] = [
            entries.one(logprob, token) for logprob, token in zip(news.input_logprobs, ids, strict=True)
        ]
        if news.input_top_logprobs is not None:
            meta["input_top_logprobs"] = entries.of_prompt(news.input_top_logprobs)
        if news.input_token_ids_logprobs is not None:
            meta["input_token_ids_logprobs"] = entries.of_prompt(news.input_token_ids_logprobs)
        return meta


class _Entries:
    """Log-probabilities as answers hold them; each token's text is made once."""

    def __init__(self, text_of: TokenText | None) -> None:
        self._text_of = text_of
        self._known: dict[int, str] = {}

    def one(self, logprob: float | None, token: int | None) -> list[Any]:
        return [logprob, token, self._text(token)]

    def many(self, positions: Pairs) -> list[list[list[Any]]]:
        return [[self.one(logprob, token) for token, logprob in pairs] for pairs in positions]

    def of_prompt(self, positions: Pairs) -> list[list[list[Any]] | None]:
        """None for the first token of a prompt, which has none."""
        return [pairs or None for pairs in self.many(positions)]

    def _text(self, token: int | None) -> str | None:
        if self._text_of is None or token is None:
            return None
        if token not in self._known:
            self._known[token] = self._text_of(token)
        return self._known[token]


def _last(ids: Sequence[int], count: int) -> list[int | None]:
    """The last `count` ids; None for those that stand before them (what a session said earlier)."""
    missing = max(0, count - len(ids))
    return [None] * missing + list(ids[len(ids) - (count - missing) :])
