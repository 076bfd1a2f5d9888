"""Log-probabilities under the model's own distribution: natural log, without mask, penalty and bias; at
temperature 1, unless output tokens are to use their row's. Computed in chunks of limited size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from runtime.kernels.table import kernel
from runtime.plan import Row
from runtime.protocol.sampling import GREEDY_BELOW

NOT_FINITE = "the model's numbers are not finite"
CHUNK_BYTES = 32 << 20  # of logits at once

Pairs: TypeAlias = tuple[tuple[int, float], ...]


class ScoreRequest(NamedTuple):
    """A row's request for `length` consecutive positions: the targets' log-probabilities, the `top` best
    pairs of each, and those of `ids`."""

    length: int
    top: int
    ids: tuple[int, ...]


class Scores(NamedTuple):
    """values: log p(target) [positions] float32, NaN if a position's logits are not finite. tops, ids: one
    entry per position, empty if none were requested."""

    values: Tensor
    tops: list[Pairs]
    ids: list[tuple[float, ...]]


class Logits(NamedTuple):
    """Logits of sampled rows, [rows, vocab] float32; the same as used for log-probabilities, and their
    log-sum-exp (None if no row needs it)."""

    logits: Tensor
    scaled: Tensor
    total: Tensor | None


def scores_of(
    hidden: Tensor,
    targets: Tensor,
    requests: Sequence[ScoreRequest],
    logits: Callable[[Tensor], Tensor],
    vocab: int,
    temperatures: Tensor | None = None,
) -> Scores:
    """hidden [n, hidden_size], targets [n]; the lengths of the requests, at least one, add up to n.
    temperatures [n, 1]; None: 1."""
    size = max(1, CHUNK_BYTES // (4 * vocab))
    values: list[Tensor] = []
    tops: list[Pairs] = []
    ids: list[tuple[float, ...]] = []
    counts = [want.top for want in requests for _ in range(want.length)]
    token_ids = [want.ids for want in requests for _ in range(want.length)]
    for first in range(0, targets.shape[0], size):
        some = logits(hidden[first : first + size])
        if temperatures is not None:
            some = some / temperatures[first : first + size]
        if (fused := kernel("gather_logprobs", some.device)) is not None:
            value, total = fused(some, targets[first : first + size, None])
            values.append(value.squeeze(1))
        else:
            total = some.logsumexp(-1)
            picked = some.gather(1, targets[first : first + size, None]).squeeze(1)
            values.append(torch.where(finite(some), picked - total, torch.nan))
        tops += top_of(some, total, counts[first : first + size])
        ids += ids_of(some, total, token_ids[first : first + size])
    return Scores(torch.cat(values), tops, ids)


def temperatures_of(rows: Sequence[Row], device: torch.device) -> Tensor:
    """[rows, 1]: the sampling temperature of each row; 1 for greedy rows."""
    return torch.tensor([_temperature(row) for row in rows], device=device)[:, None]


def temperatures_of_scores(rows: Sequence[Row], device: torch.device) -> Tensor:
    """[scores of all rows, 1]: an output token's is its row's, a prompt token's is 1."""
    temperatures = [
        _temperature(row) if row.position + index + 1 >= row.start else 1.0
        for row in rows
        for index, _ in row.scores
    ]
    return torch.tensor(temperatures, device=device)[:, None]


def _temperature(row: Row) -> float:
    return row.sampling.temperature if row.sampling.temperature >= GREEDY_BELOW else 1.0


def finite(logits: Tensor) -> Tensor:
    """[rows] bool: whether all logits of a row are finite (in one pass: a sum is finite only if its terms
    are)."""
    return logits.sum(-1).isfinite()


def top_of(logits: Tensor, total: Tensor, counts: Sequence[int]) -> list[Pairs]:
    """logits [rows, vocab], total = their log-sum-exp [rows] -> per row its `count` best (id, log p), best
    first."""
    most = min(max(counts, default=0), logits.shape[1])
    tops: list[Pairs] = [()] * len(counts)
    if most == 0:
        return tops
    rows = [index for index, count in enumerate(counts) if count > 0]
    mine = logits if len(rows) == len(counts) else logits[rows]
    values, ids = mine.topk(most)
    values = values - total[rows][:, None]
    for index, best, logprobs in zip(rows, ids.tolist(), values.tolist()):
        tops[index] = tuple(zip(best, logprobs))[: counts[index]]
    return tops


def ids_of(logits: Tensor, total: Tensor, token_ids: Sequence[tuple[int, ...]]) -> list[tuple[float, ...]]:
    """logits [rows, vocab], total as in top_of -> per row the log-probabilities of its token ids."""
    sizes = [len(ids) for ids in token_ids]
    if not any(sizes):
        return [()] * len(token_ids)
    device = logits.device
    rows = torch.repeat_interleave(torch.tensor(sizes, device=device))
    columns = torch.tensor([token for ids in token_ids for token in ids], dtype=torch.int64, device=device)
    values = (logits[rows, columns] - total[rows]).tolist()
    logprobs, first = [], 0
    for size in sizes:
        logprobs.append(tuple(values[first : first + size]))
        first += size
    return logprobs
