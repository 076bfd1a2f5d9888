"""Sampling: logits -> the next token of each row. Greedy, temperature, top-k, top-p, min-p, penalties, masks.

A row's draw depends on its logits, its seed and its step only, never on the batch it is in: one uniform
number per (seed, step), looked up in the cumulative distribution in order of ids. It knows no requests and no
grammar.

Order: repetition, frequency and presence penalty; mask; temperature; top-k; top-p; min-p. Ties at a cut-off
are kept.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from runtime.plan import Row, TokenMask
from runtime.protocol.sampling import SamplingParams

ROWS_AT_ONCE = 16  # what is computed at once stays in the cache


def uniform(seed: int, step: int) -> float:
    """A number in [0, 1) with 53 random bits, a pure function of (seed, step)."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed, step), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def penalised(params: SamplingParams) -> bool:
    return bool(params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1.0)


def sample(
    logits: Tensor, rows: Sequence[Row], masks: Mapping[int, TokenMask], draws: Sequence[float]
) -> list[int | None]:
    """logits [len(rows), vocab] float32, finite -> one id per row; None where the mask leaves none.

    masks: index into rows -> mask. draws: one number in [0, 1) per row; greedy rows ignore theirs.
    """
    tokens: list[int | None] = [None] * len(rows)
    plain, sparse, dense = [], [], []
    for index, row in enumerate(rows):
        mask = masks.get(index)
        if penalised(row.sampling) or (mask is not None and mask.allowed is None):
            dense.append(index)
        elif mask is not None:
            sparse.append(index)
        else:
            plain.append(index)
    groups = ((plain, _plain), (dense, _dense), (sparse, _sparse))
    for group, candidates in groups:
        for first in range(0, len(group), ROWS_AT_ONCE):
            some = group[first : first + ROWS_AT_ONCE]
            scores, ids = candidates(logits, rows, masks, some)
            picked = _pick(scores, [rows[index].sampling for index in some], [draws[index] for index in some])
            for place, (index, column) in enumerate(zip(some, picked)):
                if column is not None:
                    tokens[index] = column if ids is None else int(ids[place, column])
    return tokens


def _plain(
    logits: Tensor, rows: Sequence[Row], masks: Mapping[int, TokenMask], some: list[int]
) -> tuple[Tensor, Tensor | None]:
    return (logits if len(some) == logits.shape[0] else logits[some]), None


def _dense(
    logits: Tensor, rows: Sequence[Row], masks: Mapping[int, TokenMask], some: list[int]
) -> tuple[Tensor, Tensor | None]:
    scores = logits[some]
    for place, index in enumerate(some):
        if penalised(rows[index].sampling):
            _penalise(scores[place], rows[index])
        if index in masks:
            allowed = torch.from_numpy(unpack(masks[index].bits, logits.shape[1])).to(logits.device)
            scores[place].masked_fill_(~allowed, -math.inf)
    return scores, None


def _sparse(
    logits: Tensor, rows: Sequence[Row], masks: Mapping[int, TokenMask], some: list[int]
) -> tuple[Tensor, Tensor | None]:
    """Only the listed ids: scores [rows, most ids], padded with -inf, and the ids in the same places."""
    vocab = logits.shape[1]
    listed = [np.asarray(masks[index].allowed, dtype=np.int64) for index in some]
    listed = [ids[: np.searchsorted(ids, vocab)] for ids in listed]
    widest = max(1, *(len(ids) for ids in listed))
    ids, real = np.zeros((len(some), widest), dtype=np.int64), np.zeros((len(some), widest), dtype=bool)
    for place, mine in enumerate(listed):
        ids[place, : len(mine)], real[place, : len(mine)] = mine, True
    columns = torch.from_numpy(ids).to(logits.device)
    scores = logits[torch.tensor(some, device=logits.device)[:, None], columns]
    return scores.masked_fill_(~torch.from_numpy(real).to(logits.device), -math.inf), columns.cpu()


def unpack(bits: np.ndarray, vocab: int) -> np.ndarray:
    """Packed little-endian words -> bool [vocab]; ids beyond the words are not allowed."""
    flat = np.unpackbits(np.ascontiguousarray(bits).view(np.uint8), bitorder="little")[:vocab].view(bool)
    return flat if len(flat) == vocab else np.pad(flat, (0, vocab - len(flat)))


def _penalise(scores: Tensor, row: Row) -> None:
    """In place, on one row [vocab]. Repetition (arXiv 1909.05858) sees prompt and output, the others the
    output."""
    params = row.sampling
    output = np.asarray(row.output, dtype=np.int64)
    if params.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(np.concatenate((np.asarray(row.prompt, dtype=np.int64), output))))
        seen = seen.to(scores.device)
        old = scores[seen]
        factor = params.repetition_penalty
        scores[seen] = torch.where(old > 0, old / factor, old * factor)
    if params.frequency_penalty or params.presence_penalty:
        ids, counts = np.unique(output, return_counts=True)
        cost = torch.from_numpy(counts).to(scores) * params.frequency_penalty + params.presence_penalty
        scores[torch.from_numpy(ids).to(scores.device)] -= cost


def _pick(scores: Tensor, params: Sequence[SamplingParams], draws: Sequence[float]) -> list[int | None]:
    """scores [rows, columns], -inf = not allowed -> a column per row, None where there is none."""
    best, column = scores.max(-1)
    picked = column.tolist()
    drawn = [index for index, mine in enumerate(params) if not mine.greedy]
    if drawn:
        chosen = _draw(
            scores[drawn], best[drawn], [params[index] for index in drawn], [draws[index] for index in drawn]
        )
        for index, value in zip(drawn, chosen):
            picked[index] = value
    return [value if possible else None for value, possible in zip(picked, (best > -math.inf).tolist())]


def _draw(
    scores: Tensor, best: Tensor, params: Sequence[SamplingParams], draws: Sequence[float]
) -> list[int]:
    def column(values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=scores.device)[:, None]

    # Relative to the best: the most probable column weighs exactly 1.
    weights = (
        scores.sub(best[:, None]).div_(column([mine.temperature for mine in params])).exp_().nan_to_num_(0.0)
    )
    cut = [index for index, mine in enumerate(params) if mine.top_k > 0 or mine.top_p < 1.0]
    if cut:
        _cut(weights, cut, [params[index].top_k for index in cut], [params[index].top_p for index in cut])
    if any(mine.min_p > 0.0 for mine in params):
        weights.masked_fill_(weights < column([mine.min_p for mine in params]), 0.0)
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    target = torch.minimum(
        column(draws, torch.float64) * total, torch.nextafter(total, torch.zeros_like(total))
    )
    return torch.searchsorted(cumulative, target, right=True).flatten().tolist()


def _cut(weights: Tensor, rows: Sequence[int], ks: Sequence[int], ps: Sequence[float]) -> None:
    """In place, on `rows` of weights: keep the k heaviest columns (k < 1 = all), then of those the heaviest
    that together hold the share p of their weight (nucleus sampling, arXiv 1904.09751)."""
    mine, width = weights[rows], weights.shape[1]
    heavy = _descending(mine)
    up_to = heavy.cumsum(-1, dtype=torch.float64)
    last = torch.tensor([min(k, width) - 1 if k > 0 else width - 1 for k in ks], device=weights.device)[
        :, None
    ]
    least = heavy.gather(1, last)
    total = up_to.gather(1, (heavy >= least).sum(-1, keepdim=True) - 1)
    needed = torch.tensor(ps, dtype=torch.float64, device=weights.device)[:, None] * total
    kept = (up_to - heavy < needed).sum(-1, keepdim=True).clamp_(min=1)
    least = torch.maximum(least, heavy.gather(1, kept - 1))
    weights[rows] = mine.masked_fill_(mine < least, 0.0)


def _descending(values: Tensor) -> Tensor:
    """Rows sorted, largest first. On CPUs numpy's sort is over ten times as fast as torch's."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.sort(values.numpy(), axis=-1)).flip(-1)
    return values.sort(-1, descending=True).values
