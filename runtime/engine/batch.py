"""Batch: a StepPlan as flat tensors, the validation of the plan, and the results of its rows from the outputs
of the pass. Knows the plan and the vocabulary's size; not the model, not sampling.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from msgspec.structs import replace
from torch import Tensor

from runtime.engine.sampling.logprobs import (
    NOT_FINITE,
    Pairs,
    ScoreRequest,
    Scores,
    scores_of,
    temperatures_of_scores,
)
from runtime.kernels.device import to_device
from runtime.models.vision.store import ImageStore
from runtime.plan import MediaSpan, Row, RowResult, Sample, Segment, StepPlan
from runtime.protocol.errors import InternalFault

_SHOWN: dict[str, Callable[[int], int]] = {
    "none": lambda length: 0,
    "last": lambda length: 1,
    "all": lambda length: length,
}


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """ids, positions   [tokens] int64, the plan's rows concatenated; positions [3, tokens] if some tokens
                     stand for parts of images
    sampled          the plan row of each next token to sample
    output_indices   [len(sampled) + scored + shown + drafts] int64: the tokens whose final hidden states are
                     needed: to sample from, to score at, to return, and to sample from after drafts; None:
                     all tokens, only to sample from
    targets          [scored] int64: the ids whose log-probabilities are needed there, in the order of
                     plan.rows
    score_requests   what each row with scores asks for, in the same order
    shown            how many tokens' hidden states each plan row returns
    media            tokens that stand for parts of images: their indices, int64, and in their order the
                     spans"""

    plan: StepPlan
    ids: Tensor
    positions: Tensor
    sampled: tuple[int, ...]
    output_indices: Tensor | None
    targets: Tensor
    score_requests: tuple[ScoreRequest, ...]
    shown: tuple[int, ...]
    media: tuple[Tensor, tuple[MediaSpan, ...]] | None = None

    @classmethod
    def of(
        cls,
        plan: StepPlan,
        vocab_size: int,
        slots: int,
        device: torch.device,
        adapters: Container[int] = (),
        images: ImageStore | None = None,
    ) -> Batch:
        """Raises InternalFault if the plan is not valid: see check()."""
        check(plan, vocab_size, slots, adapters, images)
        if all(map(decodes, plan.rows)):
            return cls._of_decoding(plan, device)
        lengths = [len(row.tokens) for row in plan.rows]
        ids = [token for row in plan.rows for token in row.tokens]
        positions = [
            position
            for row, length in zip(plan.rows, lengths)
            for position in range(row.position + row.shift, row.position + row.shift + length)
        ]
        sampled, output_indices, scored, targets, first = [], [], [], [], 0
        score_requests: list[ScoreRequest] = []
        shown: list[int] = []
        states: list[int] = []
        drafts: list[int] = []
        for index, (row, length) in enumerate(zip(plan.rows, lengths)):
            if row.sample:
                sampled.append(index)
                output_indices.append(first + length - 1 - row.drafts)
                drafts += range(first + length - row.drafts, first + length)
            scored += [first + token for token, _ in row.scores]
            targets += [target for _, target in row.scores]
            if row.scores:
                score_requests.append(ScoreRequest(len(row.scores), row.score_top, row.token_ids))
            shown.append(_SHOWN[row.hidden](length))
            states += range(first + length - shown[-1], first + length)
            first += length
        parts = (ids, positions, output_indices + scored + states + drafts, targets)
        # One tensor, so that there is one copy to the device.
        numbers = torch.tensor(list(chain.from_iterable(parts)), dtype=torch.int64)
        numbers = to_device(numbers, device)
        parts_of_numbers = numbers.split([len(part) for part in parts])
        position_tensor, media = parts_of_numbers[1], None
        if images is not None and any(row.media for row in plan.rows):
            position_tensor, media = _with_media(plan.rows, position_tensor, images)
        return cls(
            plan,
            parts_of_numbers[0],
            position_tensor,
            tuple(sampled),
            parts_of_numbers[2],
            parts_of_numbers[3],
            tuple(score_requests),
            tuple(shown),
            media,
        )

    @classmethod
    def _of_decoding(cls, plan: StepPlan, device: torch.device) -> Batch:
        """For a plan whose rows all decode: the common case, with little to compute."""
        rows = plan.rows
        numbers = [row.tokens[0] for row in rows] + [row.position + row.shift for row in rows]
        ids, positions = to_device(torch.frombuffer(array("q", numbers), dtype=torch.int64), device).chunk(2)
        return cls(plan, ids, positions, tuple(range(len(rows))), None, ids[:0], (), (0,) * len(rows))


def of_rows(segments: Iterable[Segment], index: Mapping[int, int]) -> tuple[Segment, ...]:
    """The segments of the rows in `index`, with their numbers there."""
    return tuple(
        replace(one, rows=rows)
        for one in segments
        if (rows := tuple([index[row] for row in one.rows if row in index]))
    )


def decodes(row: Row) -> bool:
    """Whether the row computes one token, only to sample from."""
    one = row.sample and len(row.tokens) == 1
    return one and not row.scores and row.hidden == "none" and not row.media


def _with_media(
    rows: tuple[Row, ...], positions: Tensor, images: ImageStore
) -> tuple[Tensor, tuple[Tensor, tuple[MediaSpan, ...]]]:
    """The positions as three numbers, and Batch.media."""
    positions_3d, first = positions.cpu().expand(3, -1).clone(), 0
    which: list[int] = []
    for row in rows:
        if row.media:
            positions_3d[:, first : first + len(row.tokens)] = images.positions(row)
        for span in row.media:
            which += range(first + span.first, first + span.first + span.length)
        first += len(row.tokens)
    spans = tuple([span for row in rows for span in row.media])
    device = positions.device
    return positions_3d.to(device), (torch.tensor(which, dtype=torch.int64).to(device), spans)


def check(
    plan: StepPlan,
    vocab_size: int,
    slots: int,
    adapters: Container[int] = (),
    images: ImageStore | None = None,
) -> None:
    """Raise InternalFault, naming the row, for a plan that would read or write the wrong memory: ids beyond
    the vocabulary, slots beyond the pool, KV that does not match the row's position, an adapter not in
    `adapters`, an image not in `images`. The cost grows with tokens to compute, rows and segments; not with
    the context."""
    if not plan.rows:
        raise InternalFault("the plan has no rows", where="step plan")
    covered = [0] * len(plan.rows)
    for segment in plan.segments:
        length = 0
        for start, size in segment.runs:
            if start < 0 or size < 1 or start + size > slots:
                raise InternalFault(
                    f"a segment of rows {segment.rows} leaves the pool of {slots} slots", where="step plan"
                )
            length += size
        for user in segment.rows:
            if not 0 <= user < len(plan.rows):
                raise InternalFault(f"a segment names row {user} of {len(plan.rows)}", where="step plan")
            covered[user] += length
    for index, (row, length) in enumerate(zip(plan.rows, covered)):
        if length == row.position and _usual(row, vocab_size, slots):
            continue
        wrong = _wrong(row, length, vocab_size, slots, adapters) or _wrong_media(row, images)
        if wrong:
            raise InternalFault(wrong, where=f"step plan, row {index} (sequence {row.seq})")


def _usual(row: Row, vocab_size: int, slots: int) -> bool:
    """Whether the row decodes one token, and is valid."""
    if len(row.tokens) != 1 or len(row.slots) != 1 or row.drafts:
        return False
    start, size = row.slots[0]
    plain = not (row.scores or row.adapter or row.media or row.token_ids)
    return plain and size == 1 and 0 <= start < slots and 0 <= row.tokens[0] < vocab_size


def _wrong(row: Row, length: int, vocab_size: int, slots: int, adapters: Container[int]) -> str:
    """How the row is invalid; "" = it is not. length: tokens in its segments."""
    count = len(row.tokens)
    if not count:
        return "the row has no tokens"
    if length != row.position:
        return f"its segments hold {length} tokens, its position is {row.position}"
    if sum(run.length for run in row.slots) != count:
        return f"slots {row.slots} do not fit its {count} tokens"
    if any(run.start < 0 or run.start + run.length > slots for run in row.slots):
        return f"slots {row.slots} leave the pool of {slots} slots"
    if min(row.tokens) < 0 or max(row.tokens) >= vocab_size:
        return f"an input id is outside the vocabulary of {vocab_size}"
    if any(not 0 <= token < count or not 0 <= target < vocab_size for token, target in row.scores):
        return f"scores {row.scores} point outside its tokens or the vocabulary"
    if not 0 <= row.drafts < count or (row.drafts and not row.sample):
        return f"{row.drafts} of its {count} tokens are drafts"
    if row.adapter and row.adapter not in adapters:
        return f"the adapter {row.adapter} is not loaded"
    if row.token_ids and not (min(row.token_ids) >= 0 and max(row.token_ids) < vocab_size):
        return f"token_ids {row.token_ids} leave the vocabulary of {vocab_size}"
    return ""


def _wrong_media(row: Row, images: ImageStore | None) -> str:
    if not row.media:
        return ""
    if images is None:
        return "the model takes no media"
    at = 0
    for span in row.media:
        if span.item not in images:
            return f"the picture {span.item} is not loaded"
        whole = images.tokens(span.item)
        within = span.offset >= 0 and span.length > 0 and span.offset + span.length <= whole
        if not within or span.first < at or span.first + span.length > len(row.tokens):
            return f"{span} does not fit the row, or the picture's {whole} tokens"
        at = span.first + span.length
    return ""


_NO_SCORES: tuple[tuple[float, ...], tuple[Pairs, ...], tuple[tuple[float, ...], ...]] = ((), (), ())


def parts_of(
    batch: Batch, hidden: Tensor, logits: Callable[[Tensor], Tensor], vocab: int, scaled: bool
) -> tuple[Tensor, Scores, Tensor, Tensor]:
    """Split the hidden states of the batch's output_indices [output_indices, hidden_size]: those to sample
    from, the scores, those to return, and those to sample from after drafts. scaled: scores of output tokens
    use their row's temperature."""
    count = len(batch.sampled)
    if batch.output_indices is None:
        nothing = hidden[:0]
        return hidden, Scores(nothing, [], []), nothing, nothing
    scored = count + batch.targets.shape[0]
    shown = scored + sum(batch.shown)
    scales = scaled and batch.score_requests
    temperatures = temperatures_of_scores(batch.plan.rows, hidden.device) if scales else None
    scores = Scores(hidden.new_empty(0, dtype=torch.float32), [], [])
    if requests := batch.score_requests:
        scores = scores_of(hidden[count:scored], batch.targets, requests, logits, vocab, temperatures)
    return hidden[:count], scores, hidden[scored:shown].float(), hidden[shown:]


def results_of(
    batch: Batch, sampled: Sequence[tuple[Sample, ...] | str], scores_of_rows: Scores, hidden: Tensor
) -> tuple[RowResult, ...]:
    """sampled: of the batch's sampled rows; scores_found, hidden [shown, hidden_size]: the other outputs that
    rows asked for, concatenated by row."""
    by_row = dict(zip(batch.sampled, sampled))
    values = scores_of_rows.values.tolist() if len(scores_of_rows.values) else []  # nothing to wait for
    at, shown, results = 0, 0, []
    for index, row in enumerate(batch.plan.rows):
        samples = by_row.get(index, ())
        error = samples if isinstance(samples, str) else None
        scores, tops, score_ids = _NO_SCORES
        states: list[list[float]] = []
        if row.scores:
            end = at + len(row.scores)
            scores, tops = tuple(values[at:end]), tuple(scores_of_rows.tops[at:end])
            score_ids = tuple(scores_of_rows.ids[at:end])
            if any(value != value for value in scores):
                error = NOT_FINITE
            at = end
        if count := batch.shown[index]:
            mine = hidden[shown : shown + count]
            states = mine.tolist()
            if not mine.isfinite().all():
                error = NOT_FINITE
            shown += count
        if error is not None or isinstance(samples, str):
            results.append(RowResult(error=error))
            continue
        results.append(RowResult(samples, scores, tops, score_ids, tuple(map(tuple, states))))
    return tuple(results)
