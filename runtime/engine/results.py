"""Split the outputs of a pass by purpose, and build each row's result."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from runtime.engine.batch import Batch
from runtime.engine.sampling.logprobs import NOT_FINITE, Pairs, Scores, scores_of, temperatures_of_scores
from runtime.plan import RowResult, Sample

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
    temperatures = temperatures_of_scores(batch.plan.rows, hidden.device) if scaled else None
    scores = scores_of(hidden[count:scored], batch.targets, batch.score_requests, logits, vocab, temperatures)
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
