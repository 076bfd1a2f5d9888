"""Penalties and biases: changes of single logits before masks and temperature.

Repetition (arXiv 1909.05858) uses prompt and output; frequency and presence the output; logit_bias names ids.
Token counts are kept from step to step, so a step costs the number of distinct ids, not the length of the
text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from runtime.plan import Row

Ids: TypeAlias = npt.NDArray[np.int64]
Numbers: TypeAlias = npt.NDArray[Any]
Columns: TypeAlias = Callable[[int, Ids], tuple[Ids, npt.NDArray[np.bool_]]]
"""(index of a row, ids) -> (their columns in the scores, which of them have one)."""

_GROWTH = 64
_COMPARED = 32


class Histogram:
    """The distinct ids of one sequence, in order of appearance, and how often each was output (0: only in the
    prompt)."""

    __slots__ = ("_counts", "_ids", "_index", "_known", "_last", "_size")

    def __init__(self, prompt: Iterable[int] = ()) -> None:
        self._ids: Ids = np.unique(np.fromiter(prompt, dtype=np.int64))
        self._size = len(self._ids)
        self._counts: npt.NDArray[np.float32] = np.zeros(self._size, dtype=np.float32)
        self._index = {token: index for index, token in enumerate(self._ids.tolist())}
        self._known = 0
        self._last: tuple[int, ...] = ()

    @property
    def ids(self) -> Ids:
        return self._ids[: self._size]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        return self._counts[: self._size]

    @property
    def known(self) -> int:
        """The number of output ids counted."""
        return self._known

    def follow(self, output: Sequence[int]) -> None:
        """Count the ids added to `output` since the last call."""
        for token in output[self._known :]:
            index = self._index.setdefault(token, self._size)
            if index == self._size:
                if index == len(self._ids):
                    growth = max(_GROWTH, index)
                    self._ids = np.concatenate((self._ids, np.zeros(growth, dtype=np.int64)))
                    self._counts = np.concatenate((self._counts, np.zeros(growth, dtype=np.float32)))
                self._ids[index] = token
                self._size += 1
            self._counts[index] += 1.0
        self._known = len(output)
        self._last = tuple(output[max(0, self._known - _COMPARED) :])

    def continues(self, output: Sequence[int]) -> bool:
        """Whether `output` extends the counted ids. A text that was cut and continued differently is detected
        by its last ids."""
        known = self._known
        return known <= len(output) and tuple(output[max(0, known - _COMPARED) : known]) == self._last


class Histograms:
    """One Histogram per live sequence that is penalised, in by_seq. A new sequence is counted from its whole
    text."""

    def __init__(self) -> None:
        self.by_seq: dict[int, Histogram] = {}

    def of(self, row: Row) -> Histogram:
        histogram = self.by_seq.get(row.seq)
        if histogram is None or not histogram.continues(row.output):
            histogram = self.by_seq[row.seq] = Histogram(
                row.prompt if row.sampling.repetition_penalty != 1.0 else ()
            )
        histogram.follow(row.output)
        return histogram

    def release(self, handles: Iterable[int]) -> None:
        for handle in handles:
            self.by_seq.pop(handle, None)

    def __len__(self) -> int:
        return len(self.by_seq)


class ScoreChanges(NamedTuple):
    """Changes of single scores: score -> (score / factor if score > 0 else score * factor) - cost. All
    arrays have one length: int32 indices, float32 numbers."""

    rows: Numbers
    columns: Numbers
    factors: Numbers
    costs: Numbers


def changes_of(rows: Sequence[Row], histograms: Histograms, columns: Columns) -> list[ScoreChanges]:
    """The penalties of all rows, then their biases; those without changes are left out."""
    penalties: list[ScoreChanges] = []
    biases: list[ScoreChanges] = []
    for index, row in enumerate(rows):
        params = row.sampling
        if params.penalised:
            histogram = histograms.of(row)
            at, real = columns(index, histogram.ids)
            counts = histogram.counts[real]
            costs = counts * np.float32(params.frequency_penalty)
            costs += np.where(counts > 0, np.float32(params.presence_penalty), np.float32(0.0))
            factors = np.full(len(counts), params.repetition_penalty, dtype=np.float32)
            penalties.append(_of_row(index, at[real], factors, costs))
        if params.logit_bias:
            ids = np.fromiter(params.logit_bias.keys(), dtype=np.int64, count=len(params.logit_bias))
            values = np.fromiter(params.logit_bias.values(), dtype=np.float32, count=len(ids))
            at, real = columns(index, ids)
            biases.append(_of_row(index, at[real], np.ones_like(values[real]), -values[real]))
    return [ScoreChanges(*map(np.concatenate, zip(*parts))) for parts in (penalties, biases) if parts]


def _of_row(row: int, columns: Ids, factors: Numbers, costs: Numbers) -> ScoreChanges:
    return ScoreChanges(np.full(len(columns), row, dtype=np.int32), columns.astype(np.int32), factors, costs)


def adjust(scores: Tensor, rows: Sequence[Row], histograms: Histograms, columns: Columns) -> None:
    """Change scores [rows, columns] in place: repetition penalty, then frequency and presence, then
    biases."""
    for change in changes_of(rows, histograms, columns):
        row_of, column, factors, costs = (torch.from_numpy(part).to(scores.device) for part in change)
        at = row_of.long(), column.long()
        old = scores[at]
        scores[at] = torch.where(old > 0, old / factors, old * factors) - costs


def every(width: int) -> Columns:
    """Scores with a column for each id."""

    def columns(row: int, ids: Ids) -> tuple[Ids, npt.NDArray[np.bool_]]:
        return ids, (ids >= 0) & (ids < width)

    return columns


def listed(lists: Sequence[npt.NDArray[Any]]) -> Columns:
    """For scores of listed tokens only: column i of a row is the token lists[row][i], in ascending order."""

    def columns(row: int, ids: Ids) -> tuple[Ids, npt.NDArray[np.bool_]]:
        mine = lists[row]
        if not len(mine):
            return ids, np.zeros(len(ids), dtype=np.bool_)
        at = np.searchsorted(mine, ids)
        return at, mine[np.minimum(at, len(mine) - 1)] == ids

    return columns
