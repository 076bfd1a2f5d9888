"""Scores -> one column per row: the best, or one drawn at its temperature within top-k, top-p and min-p.

A draw takes the greatest of score / temperature + Gumbel noise, which has the softmax's distribution (the
Gumbel-max trick, arXiv 1611.01144); noise is a function of the row's key and of the token's id. So it does
not matter in which order or company scores are computed, and rounding changes a draw only where the two best
are as close as rounding, or where the token that wins is itself at the border of top-k, top-p or min-p.

On the CPU a row is looked at alone: its best column; where something is cut, one pass that makes weights of
scores, which are sorted where a share of their sum is asked for, and then, of a peaked distribution, only the
heavy ones; and noise of the columns that are left. On other devices all rows are computed at once
(`pick_at_once`); the same numbers.

It knows no requests, no masks and no seeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from runtime.kernels.gumbel import draw, gumbel, halves
from runtime.protocol.sampling import SamplingParams

Weights: TypeAlias = npt.NDArray[np.float32]

_LIGHT = 1e-4  # columns lighter than this share of the heaviest are looked at only where they can matter
_FEW = 4096  # columns that are weighed faster than they are sifted
_BLOCK = 128  # columns whose weights are summed up before one of them is looked for


def pick(
    scores: Tensor, params: Sequence[SamplingParams], keys: Sequence[int], ids: Tensor | None = None
) -> list[int | None]:
    """scores [rows, columns] float32, -inf = not allowed -> a column per row, None where there is none. Ties
    go to the first column. keys: 64 bits per row, greedy rows ignore theirs. ids [rows, columns] int64, on
    the CPU: the token of each column, ascending; None: its own number."""
    if scores.device.type != "cpu":
        return pick_at_once(scores, params, keys, ids)
    if scores.stride(1) != 1:
        scores = scores.contiguous()
    table = scores.numpy()
    picked: list[int | None] = []
    for number, (row, mine, key) in enumerate(zip(table, params, keys, strict=True)):
        column = int(row.argmax())
        if row[column] == -math.inf:
            picked.append(None)
        elif mine.greedy:
            picked.append(column)
        else:
            own = None if ids is None else ids[number]
            picked.append(_drawn(scores[number], column, mine, key, own))
    return picked


def _drawn(scores: Tensor, best: int, mine: SamplingParams, key: int, ids: Tensor | None) -> int:
    """Of one row, whose first best column is known."""
    if not (0 < mine.top_k < len(scores) or mine.top_p < 1.0 or mine.min_p > 0.0):
        return draw(scores, mine.temperature, key, best, ids)
    columns = None
    if (floor := _floor(scores.numpy(), float(scores[best]), mine)) > -math.inf:
        columns = np.flatnonzero(scores.numpy() >= floor)
        own = torch.from_numpy(columns)
        scores, ids, best = scores[own], own if ids is None else ids[own], int(columns.searchsorted(best))
    # Relative to the best: the most probable column weighs exactly 1. By the nearest float32, as the same
    # division of all rows at once.
    weights = scores.sub(scores[best]).div_(float(np.float32(mine.temperature))).exp_()
    least = max(least_weight(weights.numpy(), mine.top_k, mine.top_p), np.float32(mine.min_p))
    place = draw(scores, mine.temperature, key, best, ids, weights, float(least))
    return place if columns is None else int(columns[place])


def _floor(row: Weights, best: float, mine: SamplingParams) -> float:
    """A score that those of all columns that stay reach, however weights are rounded; -inf where to look for
    it would not pay."""
    floor, size, k = -math.inf, len(row), mine.top_k
    if size < _FEW:
        return floor
    if 0 < k < size:
        # Of so many blocks each has a column that reaches it: quicker than to look for the k-th best.
        most = row[: size // _BLOCK * _BLOCK].reshape(-1, _BLOCK).max(1) if size >= k * _BLOCK else row
        floor = float(np.partition(most, len(most) - k)[len(most) - k])
    if mine.min_p > 0.0 and mine.top_p >= 1.0:  # else what is lighter counts as a part of the whole
        floor = max(floor, best + mine.temperature * math.log(mine.min_p))
    return floor - 1e-3 * mine.temperature - 1e-6 * abs(floor)


def _sums_before(weights: Weights) -> npt.NDArray[np.float64]:
    """[blocks + 1]: what the columns before each block weigh together; the last: all."""
    sums = np.zeros(-(-len(weights) // _BLOCK) + 1)
    np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK), dtype=np.float64).cumsum(out=sums[1:])
    return sums


def least_weight(weights: Weights, k: int, p: float) -> np.float32:
    """The lightest weight that is kept of the k heaviest columns (k < 1 = all) and, of those, of the heaviest
    that together hold the share p of their weight (nucleus sampling, arXiv 1904.09751). Ties are kept. The
    heaviest column weighs 1."""
    size = len(weights)
    least = np.float32(0.0)
    if 0 < k < size:
        least = np.partition(weights, size - k)[size - k]
    if p >= 1.0:
        return least
    if least > 0.0:
        heavy = _descending(weights[weights >= least])
        starts = _sums_before(heavy)
        needed = p * starts[-1]
    else:
        needed = p * weights.sum(dtype=np.float64)
        some = weights >= _LIGHT
        heavy = _descending(weights[some] if 2 * np.count_nonzero(some) < size else weights)
        starts = _sums_before(heavy)
        if needed > starts[-1] and len(heavy) < size:
            heavy = _descending(weights)
            starts = _sums_before(heavy)
    # The last column before which less than needed lies.
    block = max(0, int(starts[:-1].searchsorted(needed)) - 1)
    inside = heavy[block * _BLOCK : (block + 1) * _BLOCK]
    before = starts[block] + inside.cumsum(dtype=np.float64) - inside
    return max(least, inside[max(1, int((before < needed).sum())) - 1])


def _descending(values: Weights) -> Weights:
    return np.sort(values)[::-1]


def pick_at_once(
    scores: Tensor, params: Sequence[SamplingParams], keys: Sequence[int], ids: Tensor | None = None
) -> list[int | None]:
    """pick() in operations on all rows, with one word from the device to the host for the best columns and
    one for those that are drawn."""
    best, column = scores.max(-1)
    picked = column.tolist()
    drawn = [index for index, mine in enumerate(params) if not mine.greedy]
    if drawn:
        own = torch.arange(scores.shape[1]) if ids is None else ids[drawn]
        mine = torch.from_numpy(halves([keys[index] for index in drawn]))
        noise = gumbel(mine.to(scores.device), own.to(scores.device, torch.int32))
        chosen = _draw_at_once(scores[drawn], best[drawn], [params[index] for index in drawn], noise)
        for index, value in zip(drawn, chosen):
            picked[index] = value
    return [value if possible else None for value, possible in zip(picked, (best > -math.inf).tolist())]


def _draw_at_once(scores: Tensor, best: Tensor, params: Sequence[SamplingParams], noise: Tensor) -> list[int]:
    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=scores.device)[:, None]

    relative = scores.sub(best[:, None]).div_(column([mine.temperature for mine in params]))
    cut = [index for index, mine in enumerate(params) if mine.top_k > 0 or mine.top_p < 1.0]
    least = column([mine.min_p for mine in params])
    if cut:
        weights = relative[cut].exp_().nan_to_num_(0.0)
        of_cut = _least_at_once(weights, [params[at].top_k for at in cut], [params[at].top_p for at in cut])
        least[cut] = torch.maximum(least[cut], of_cut)
    if cut or any(mine.min_p > 0.0 for mine in params):
        relative.masked_fill_(relative.exp() < least, -math.inf)
    return relative.add_(noise).max(-1).indices.tolist()


def _least_at_once(weights: Tensor, ks: Sequence[int], ps: Sequence[float]) -> Tensor:
    """least_weight() of all rows [rows, 1], without a word between device and host."""
    width = weights.shape[1]
    heavy = weights.sort(-1, descending=True).values
    up_to = heavy.cumsum(-1, dtype=torch.float64)
    last = [min(k, width) - 1 if k > 0 else width - 1 for k in ks]
    least = heavy.gather(1, torch.tensor(last, device=weights.device)[:, None])
    total = up_to.gather(1, (heavy >= least).sum(-1, keepdim=True) - 1)
    needed = torch.tensor(ps, dtype=torch.float64, device=weights.device)[:, None] * total
    kept = (up_to - heavy < needed).sum(-1, keepdim=True).clamp_(min=1)
    return torch.maximum(least, heavy.gather(1, kept - 1))
