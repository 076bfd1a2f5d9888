"""Log-probabilities under the model's own distribution: natural log, temperature 1, no mask, no penalty."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

CHUNK_BYTES = 64 << 20  # of logits at once: a long scored prompt must not need prompt x vocabulary of memory


def scores_of(hidden: Tensor, targets: Tensor, logits: Callable[[Tensor], Tensor], vocab: int) -> Tensor:
    """hidden [n, hidden_size], targets [n] -> log p(target) [n] float32; NaN where a row's logits are not
    finite."""
    rows = max(1, CHUNK_BYTES // (4 * vocab))
    parts = []
    for first in range(0, targets.shape[0], rows):
        some = logits(hidden[first : first + rows])
        picked = some.gather(1, targets[first : first + rows, None]).squeeze(1)
        parts.append(torch.where(finite(some), picked - some.logsumexp(-1), torch.nan))
    return torch.cat(parts) if parts else hidden.new_empty(0, dtype=torch.float32)


def finite(logits: Tensor) -> Tensor:
    """[rows] bool: whether all of a row's logits are finite (one pass: a sum is finite only if its terms
    are)."""
    return logits.sum(-1).isfinite()


def top_of(logits: Tensor, total: Tensor, counts: Sequence[int]) -> list[tuple[tuple[int, float], ...]]:
    """logits [rows, vocab], total = their log-sum-exp [rows] -> per row its `count` best (id, log p), best
    first."""
    most = min(max(counts, default=0), logits.shape[1])
    if most == 0:
        return [()] * len(counts)
    rows = [index for index, count in enumerate(counts) if count > 0]
    values, ids = logits[rows].topk(most)
    values = values - total[rows][:, None]
    found: list[tuple[tuple[int, float], ...]] = [()] * len(counts)
    for index, mine, their in zip(rows, ids.tolist(), values.tolist()):
        found[index] = tuple(zip(mine, their))[: counts[index]]
    return found
