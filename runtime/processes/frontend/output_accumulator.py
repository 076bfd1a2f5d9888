"""OutputAccumulator: the deltas of one engine request added up, and their meta_info.

A stream's is drained whenever its reader takes the new output, so that an event costs no more than it adds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from runtime.formats.reasoning.marks import ReasoningMarks
from runtime.protocol.io_struct import SpecFigures, TokenizedGenerateReqInput, TokenOutput

TokenText = Callable[[int], str]
"""A token id's own text."""
Pairs = Sequence[Sequence[tuple[int, float]]]


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about the model for answers. text_of: a token's text; decode: the text of ids, with or without
    special ones; opens_reasoning: the chat template opens every reply inside the reasoning."""

    text_of: TokenText
    decode: Callable[[Sequence[int], bool], str]
    marks: ReasoningMarks | None = None
    opens_reasoning: bool = False
    weight_version: str = "default"

    def boundary(self, request: TokenizedGenerateReqInput, is_chat: bool) -> ReasoningBoundary | None:
        """The boundary detector of a request's output; None for models without reasoning."""
        if self.marks is None:
            return None
        skip = request.sampling_params.skip_special_tokens
        opened = request.require_reasoning or (is_chat and self.opens_reasoning)
        return ReasoningBoundary(self.marks, lambda ids: self.decode(ids, skip), opened=opened)


class OutputAccumulator:
    """ids, text and lists hold what came since the last drain(). replaced: the first of `ids` take the place
    of so many ids that were drained before. total: all ids. lists: the entries of meta_info per token, as
    [log-probability, id, text]; text is None without `text_of`."""

    __slots__ = (
        "_pieces", "_prompt_sent", "_text_of", "grammar", "hidden_states", "ids", "last", "lists",
        "reasoning", "replaced", "request", "scored", "total",
    )  # fmt: skip

    def __init__(
        self,
        request: TokenizedGenerateReqInput,
        text_of: TokenText | None = None,
        reasoning: ReasoningBoundary | None = None,
    ) -> None:
        self.request, self.reasoning, self._text_of = request, reasoning, text_of
        self.total = 0
        self.last: TokenOutput | None = None
        self.scored: TokenOutput | None = None  # the delta with the prompt's log-probabilities
        self.grammar: dict[str, Any] | None = None
        self._prompt_sent = False
        self.drain()

    def drain(self) -> None:
        """Begin anew, with new lists: the caller keeps those that it read."""
        self.ids: list[int] = []
        self.replaced = 0
        self.hidden_states: list[list[float]] = []
        self._pieces: list[str] = []
        self.lists: dict[str, list[Any]] = {}
        if self.request.return_logprob:
            self.lists["output_token_logprobs"] = []
            if self.request.top_logprobs_num:
                self.lists["output_top_logprobs"] = []
            if self.request.token_ids_logprob:
                self.lists["output_token_ids_logprobs"] = []
            self.lists["output_token_origins"] = []

    @property
    def text(self) -> str:
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def add(self, delta: TokenOutput) -> None:
        if delta.text:
            self._pieces.append(delta.text)
        if delta.replaced:
            held = min(delta.replaced, len(self.ids))
            self.total -= delta.replaced
            self.replaced += delta.replaced - held
            if held:
                for entries in (self.ids, *self.lists.values()):
                    del entries[-held:]
        self.ids += delta.new_ids
        self.total += len(delta.new_ids)
        if lists := self.lists:
            pairs = zip(delta.output_logprobs, delta.new_ids, strict=False)
            lists["output_token_logprobs"] += [self._entry(logprob, token) for logprob, token in pairs]
            lists["output_token_origins"] += delta.output_origins
            if "output_top_logprobs" in lists:
                lists["output_top_logprobs"] += self._many(delta.output_top_logprobs)
            if "output_token_ids_logprobs" in lists:
                lists["output_token_ids_logprobs"] += self._many(delta.output_token_ids_logprobs)
        if self.reasoning is not None:
            self.reasoning.feed(delta.text, delta.new_ids, delta.replaced)
        if delta.hidden_states:
            self.hidden_states += delta.hidden_states
        self.last = delta
        if delta.input_logprobs is not None:
            self.scored = delta
        if delta.grammar is not None:
            self.grammar = msgspec.to_builtins(delta.grammar)

    def _entry(self, logprob: float | None, token: int | None) -> list[Any]:
        text = None if self._text_of is None or token is None else self._text_of(token)
        return [logprob, token, text]

    def _many(self, positions: Pairs) -> list[list[list[Any]]]:
        return [[self._entry(logprob, token) for token, logprob in pairs] for pairs in positions]

    # -- meta_info -------------------------------------------------------------------------------------------

    def counters(self) -> dict[str, Any]:
        """The counts and times of every answer."""
        last = self.last
        if last is None:
            return {}
        return {
            "prompt_tokens": last.prompt_tokens,
            "completion_tokens": last.completion_tokens,
            "cached_tokens": last.cached_tokens,
            "jumped_tokens": last.jumped_tokens,
            "decode_steps": last.decode_steps,
            "num_retractions": last.retractions,
            "queue_time": last.queue_s,
            "first_token_latency": last.first_token_s,
            **spec_meta(last.spec),
        }

    def finish_reason(self) -> dict[str, Any] | None:
        """{"type": ..., and matched or length}; None while it generates."""
        finish = None if self.last is None else self.last.finish
        if finish is None:
            return None
        reason: dict[str, Any] = {"type": finish.type}
        if finish.type == "length":
            reason["length"] = self.total
        elif finish.matched is not None:
            reason["matched"] = finish.matched
        if finish.unfinished is not None:
            reason["unfinished"] = finish.unfinished
        return reason

    def logprob_meta(self) -> dict[str, Any]:
        """The log-probabilities of `ids`, for requests that ask for them. The prompt's are in the first and
        the last answer of a stream only: they may be long."""
        meta: dict[str, Any] = {name: list(entries) for name, entries in self.lists.items()}
        meta["output_token_logprobs_length"] = self.total
        if self.request.logprob_start_len < 0:
            scores = [name for name in self.lists if name != "output_token_origins"]
            return meta | {name.replace("output", "input"): [] for name in scores}
        scored = self.scored
        ended = self.finish_reason() is not None
        if scored is None or scored.input_logprobs is None or (self._prompt_sent and not ended):
            return meta
        self._prompt_sent = True
        # A session's earlier turns stand before the request's own ids.
        ids: list[int | None] = [*self.request.input_ids]
        missing = len(scored.input_logprobs) - len(ids)
        ids[: max(0, -missing)] = [None] * missing
        meta["input_token_logprobs"] = [
            self._entry(logprob, token) for logprob, token in zip(scored.input_logprobs, ids, strict=True)
        ]
        # The first token of a prompt has none.
        for name in ("input_top_logprobs", "input_token_ids_logprobs"):
            if (positions := getattr(scored, name)) is not None:
                meta[name] = [pairs or None for pairs in self._many(positions)]
        return meta


def spec_meta(spec: SpecFigures | None) -> dict[str, Any]:
    """The figures of drafted tokens under their public names; {} if none were drafted."""
    if spec is None:
        return {}
    steps, accepted, drafted = spec.verify_ct, spec.accepted_tokens, spec.drafted_tokens
    return {
        "spec_verify_ct": steps,
        "spec_accept_token_num": accepted,
        "spec_draft_token_num": drafted,
        "spec_accept_rate": accepted / drafted if drafted else 0.0,
        "spec_accept_length": (accepted + steps) / steps if steps else 0.0,
        "spec_accept_histogram": spec.acceptance_histogram,
    }


class ReasoningBoundary:
    """Finds where the reasoning of an output ends, while the output grows. feed() takes the additions of each
    delta. The work is linear in the output, and nothing is kept once the boundary is found.

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
            end = marks.end_in(self._ids, seen)
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
