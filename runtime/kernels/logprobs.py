"""Log-probabilities of single ids, without the whole [rows, vocab] table."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.device import power_of_two

BLOCK = 4096


def gather_logprobs(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """logits [rows, vocab] float32 with contiguous rows, ids [rows, columns] -> log-probabilities [rows,
    columns] and log-sum-exp [rows], both float32. They are NaN for a row with NaN or infinity."""
    rows, vocab = logits.shape
    columns = ids.shape[1]
    out = torch.empty(rows, columns, dtype=torch.float32, device=logits.device)
    total = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _gather[(rows,)](
        logits, ids.contiguous(), out, total, logits.stride(0), vocab, columns,
        BLOCK=min(BLOCK, power_of_two(vocab)), COLUMNS=power_of_two(max(1, columns)), num_warps=16,
    )  # fmt: skip
    return out, total


def plain_gather_logprobs(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    total = torch.where(logits.sum(-1).isfinite(), logits.logsumexp(-1), torch.nan)
    return logits.gather(1, ids.long()) - total[:, None], total


@triton.jit
def _gather(logits, ids, out, totals, stride, vocab, columns, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    lane = tl.arange(0, BLOCK)
    most = tl.full([BLOCK], -3.4028234663852886e38, tl.float32)  # the lowest that is finite
    total, least = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, vocab, BLOCK, num_stages=3):
        at = first + lane
        values = tl.load(logits + at, mask=at < vocab, other=-3.4028234663852886e38)
        # One exp for each: it scales down either the sum so far or the new value.
        more = values - most
        share = tl.exp(-tl.abs(more))
        total = tl.where(more > 0, total * share + 1.0, total + share)
        most, least = tl.maximum(most, values), tl.minimum(least, values)
    best = tl.max(most, 0)
    whole = best + tl.log(tl.sum(total * tl.exp(most - best), 0))  # NaN of NaN and of infinity above
    whole = tl.where(tl.min(least, 0) == -float("inf"), float("nan"), whole)
    column = tl.arange(0, COLUMNS)
    token = tl.load(ids + row * columns + column, mask=column < columns, other=0)
    picked = tl.load(logits + token, mask=column < columns, other=0.0)
    tl.store(out + row * columns + column, picked - whole, mask=column < columns)
    tl.store(totals + row, whole)
