"""runtime.engine.sampling.draw in another way: all rows at once, in torch, by sorting."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.kernels.gumbel import gumbel, halves
from runtime.protocol.sampling import SamplingParams


def pick_at_once(
    scores: Tensor, params: Sequence[SamplingParams], keys: Sequence[int], ids: Tensor | None = None
) -> list[int | None]:
    """As pick()."""
    best, column = scores.max(-1)
    picked = column.tolist()
    drawn = [index for index, mine in enumerate(params) if not mine.greedy]
    if drawn:
        drawn_ids = torch.arange(scores.shape[1]) if ids is None else ids[drawn]
        mine = torch.from_numpy(halves([keys[index] for index in drawn]))
        noise = gumbel(mine.to(scores.device), drawn_ids.to(scores.device, torch.int32))
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
    """As least_weight(), of all rows: [rows, 1]."""
    width = weights.shape[1]
    heavy = weights.sort(-1, descending=True).values
    up_to = heavy.cumsum(-1, dtype=torch.float64)
    last = [min(k, width) - 1 if k > 0 else width - 1 for k in ks]
    least = heavy.gather(1, torch.tensor(last, device=weights.device)[:, None])
    total = up_to.gather(1, (heavy >= least).sum(-1, keepdim=True) - 1)
    needed = torch.tensor(ps, dtype=torch.float64, device=weights.device)[:, None] * total
    kept = (up_to - heavy < needed).sum(-1, keepdim=True).clamp_(min=1)
    return torch.maximum(least, heavy.gather(1, kept - 1))
