"""Scores -> one column per row: the best, or one drawn at its temperature within top-k, top-p and min-p.

On the CPU a row is looked at alone, in numpy, while it is in the cache: its best column, one pass that makes
weights of scores, sums of blocks of these. They are sorted where a share of their sum is asked for, and then,
of a peaked distribution, only the heavy ones. On other devices all rows are computed at once
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

from runtime.protocol.sampling import SamplingParams

Weights: TypeAlias = npt.NDArray[np.float32]

_LIGHT = 1e-4  # columns lighter than this share of the heaviest are looked at only where they can matter
_BLOCK = 128  # columns whose weights are summed up before one of them is looked for


def pick(scores: Tensor, params: Sequence[SamplingParams], draws: Sequence[float]) -> list[int | None]:
    """scores [rows, columns] float32, -inf = not allowed -> a column per row, None where there is none. Ties
    go to the first column. draws: one number in [0, 1) per row; greedy rows ignore theirs."""
    if scores.device.type != "cpu":
        return pick_at_once(scores, params, draws)
    table = scores.numpy()
    buffer: Tensor | None = None
    picked: list[int | None] = []
    for number, (row, mine, draw) in enumerate(zip(table, params, draws, strict=True)):
        column = int(row.argmax())
        best = float(row[column])
        if best == -math.inf:
            picked.append(None)
        elif mine.greedy:
            picked.append(column)
        else:
            buffer = scores.new_empty(scores.shape[1]) if buffer is None else buffer
            # Relative to the best: the most probable column weighs exactly 1.
            torch.sub(scores[number], best, out=buffer)
            if mine.temperature != 1.0:
                # By the nearest float32, as the same division of all rows at once.
                buffer.div_(float(np.float32(mine.temperature)))
            weights: Weights = buffer.exp_().numpy()
            least = max(least_weight(weights, mine.top_k, mine.top_p), np.float32(mine.min_p))
            if least > 0.0:  # nothing below it: what is not above the number before it becomes 0
                torch.threshold_(buffer, float(np.nextafter(least, np.float32(-1.0))), 0.0)
            picked.append(_drawn(weights, draw))
    return picked


def _drawn(weights: Weights, draw: float) -> int:
    """The column at the share `draw` of the cumulative weight."""
    starts = _sums_before(weights)
    total = starts[-1]
    target = min(draw * total, np.nextafter(total, 0.0))
    block = int(starts.searchsorted(target, side="right")) - 1
    first = block * _BLOCK
    inside = weights[first : first + _BLOCK]
    place = int((starts[block] + inside.cumsum(dtype=np.float64)).searchsorted(target, side="right"))
    # Rounding may leave the target behind the block's last column: then it is the last that has a weight.
    return first + (place if place < len(inside) else int(np.flatnonzero(inside)[-1]))


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
    scores: Tensor, params: Sequence[SamplingParams], draws: Sequence[float]
) -> list[int | None]:
    """pick() in operations on all rows, with one word from the device to the host for the best columns and
    one for those that are drawn."""
    best, column = scores.max(-1)
    picked = column.tolist()
    drawn = [index for index, mine in enumerate(params) if not mine.greedy]
    if drawn:
        chosen = _draw_at_once(
            scores[drawn], best[drawn], [params[index] for index in drawn], [draws[index] for index in drawn]
        )
        for index, value in zip(drawn, chosen):
            picked[index] = value
    return [value if possible else None for value, possible in zip(picked, (best > -math.inf).tolist())]


def _draw_at_once(
    scores: Tensor, best: Tensor, params: Sequence[SamplingParams], draws: Sequence[float]
) -> list[int]:
    def column(values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=scores.device)[:, None]

    weights = (
        scores.sub(best[:, None]).div_(column([mine.temperature for mine in params])).exp_().nan_to_num_(0.0)
    )
    cut = [index for index, mine in enumerate(params) if mine.top_k > 0 or mine.top_p < 1.0]
    if cut:
        mine = weights[cut]
        least = _least_at_once(mine, [params[index].top_k for index in cut], [params[at].top_p for at in cut])
        weights[cut] = mine.masked_fill_(mine < least, 0.0)
    if any(mine.min_p > 0.0 for mine in params):
        weights.masked_fill_(weights < column([mine.min_p for mine in params]), 0.0)
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    target = torch.minimum(
        column(draws, torch.float64) * total, torch.nextafter(total, torch.zeros_like(total))
    )
    return torch.searchsorted(cumulative, target, right=True).flatten().tolist()


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
