"""Scores -> one column per row: the best, or one drawn at its temperature within top-k, top-p and min-p.

A draw takes the highest score / temperature + Gumbel noise, which has the softmax's distribution (the
Gumbel-max trick, arXiv 1611.01144). The noise is a function of the row's key and the token's id, so neither
order nor batch matter. Each row is processed alone, on the CPU; GPUs have a kernel for all rows (fused.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from runtime.kernels.gumbel import draw
from runtime.protocol.sampling import SamplingParams

Weights: TypeAlias = npt.NDArray[np.float32]

_LIGHT = 1e-4  # columns lighter than this share of the heaviest are skipped if they cannot matter
_FEW = 4096  # up to this many columns, weighing all is faster than filtering
_BLOCK = 128  # columns whose weights are summed before the search for one of them


def pick(
    scores: Tensor, params: Sequence[SamplingParams], keys: Sequence[int], ids: Tensor | None = None
) -> list[int | None]:
    """scores [rows, columns] float32, -inf = not allowed -> a column per row, None if there is none. Ties go
    to the first column. keys: 64 bits per row, ignored for greedy rows. ids [rows, columns] int64, on the
    CPU: the token of each column, ascending; None: the column's index."""
    scores = scores.cpu().contiguous()
    table = scores.numpy()
    picked: list[int | None] = []
    for number, (row, mine, key) in enumerate(zip(table, params, keys, strict=True)):
        column = int(row.argmax())
        if row[column] == -math.inf:
            picked.append(None)
        elif mine.greedy:
            picked.append(column)
        else:
            row_ids = None if ids is None else ids[number]
            picked.append(_drawn(scores[number], column, mine, key, row_ids))
    return picked


def _drawn(scores: Tensor, best: int, mine: SamplingParams, key: int, ids: Tensor | None) -> int:
    """Draw for one row with the given first best column."""
    if not (0 < mine.top_k < len(scores) or mine.top_p < 1.0 or mine.min_p > 0.0):
        return draw(scores, mine.temperature, key, best, ids)
    columns = None
    if (floor := _floor(scores.numpy(), float(scores[best]), mine)) > -math.inf:
        columns = np.flatnonzero(scores.numpy() >= floor)
        index = torch.from_numpy(columns)
        scores, ids = scores[index], index if ids is None else ids[index]
        best = int(columns.searchsorted(best))
    # Relative to the best: the most probable column weighs exactly 1. The temperature is rounded to float32,
    # as when all rows are divided at once.
    weights = scores.sub(scores[best]).div_(float(np.float32(mine.temperature))).exp_()
    least = max(least_weight(weights.numpy(), mine.top_k, mine.top_p), np.float32(mine.min_p))
    column = draw(scores, mine.temperature, key, best, ids, weights, float(least))
    return column if columns is None else int(columns[column])


def _floor(row: Weights, best: float, mine: SamplingParams) -> float:
    """A score that all columns which stay reach, however weights are rounded; -inf if searching it would not
    pay."""
    floor, size, k = -math.inf, len(row), mine.top_k
    if size < _FEW:
        return floor
    if 0 < k < size:
        # The k-th best block maximum is a lower bound, and faster to find than the k-th best column.
        most = row[: size // _BLOCK * _BLOCK].reshape(-1, _BLOCK).max(1) if size >= k * _BLOCK else row
        floor = float(np.partition(most, len(most) - k)[len(most) - k])
    if mine.min_p > 0.0 and mine.top_p >= 1.0:  # else lighter columns count for top-p's total
        floor = max(floor, best + mine.temperature * math.log(mine.min_p))
    return floor - 1e-3 * mine.temperature - 1e-6 * abs(floor)


def _sums_before(weights: Weights) -> npt.NDArray[np.float64]:
    """[blocks + 1]: the sum of the weights before each block; the last: of all."""
    sums = np.zeros(-(-len(weights) // _BLOCK) + 1)
    np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK), dtype=np.float64).cumsum(out=sums[1:])
    return sums


def least_weight(weights: Weights, k: int, p: float) -> np.float32:
    """The lightest weight kept of the k heaviest columns (k < 1 = all) and, of those, of the heaviest that
    together hold the share p of their weight (nucleus sampling, arXiv 1904.09751). Ties are kept. The
    heaviest column weighs 1."""
    size = len(weights)
    least = np.float32(0.0)
    if 0 < k < size:
        least = np.partition(weights, size - k)[size - k]
    if p >= 1.0:
        return least
    if least > 0.0:
        heavy = np.sort(weights[weights >= least])[::-1]
        starts = _sums_before(heavy)
        needed = p * starts[-1]
    else:
        needed = p * weights.sum(dtype=np.float64)
        some = weights >= _LIGHT
        heavy = np.sort(weights[some] if 2 * np.count_nonzero(some) < size else weights)[::-1]
        starts = _sums_before(heavy)
        if needed > starts[-1] and len(heavy) < size:
            heavy = np.sort(weights)[::-1]
            starts = _sums_before(heavy)
    # The last column for which the sum before it is less than needed.
    block = max(0, int(starts[:-1].searchsorted(needed)) - 1)
    inside = heavy[block * _BLOCK : (block + 1) * _BLOCK]
    before = starts[block] + inside.cumsum(dtype=np.float64) - inside
    return max(least, inside[max(1, int((before < needed).sum())) - 1])
