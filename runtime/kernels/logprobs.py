"""Log-probabilities of single ids, without the [rows, vocab] table of all of them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.device import power_of_two

BLOCK = 4096


def gather_logprobs(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """logits [rows, vocab] float32, a row's numbers side by side; ids [rows, wanted] -> log p of each id
    [rows, wanted], and log-sum-exp [rows], float32; NaN where a row has NaN or infinity."""
    rows, vocab = logits.shape
    wanted = ids.shape[1]
    out = torch.empty(rows, wanted, dtype=torch.float32, device=logits.device)
    total = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _gather[(rows,)](
        logits, ids.contiguous(), out, total, logits.stride(0), vocab, wanted,
        BLOCK=min(BLOCK, power_of_two(vocab)), WANTED=power_of_two(max(1, wanted)), num_warps=16,
    )  # fmt: skip
    return out, total


def plain_gather_logprobs(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    total = torch.where(logits.sum(-1).isfinite(), logits.logsumexp(-1), torch.nan)
    return logits.gather(1, ids.long()) - total[:, None], total


@triton.jit
def _gather(logits, ids, out, totals, stride, vocab, wanted, BLOCK: tl.constexpr, WANTED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    lane = tl.arange(0, BLOCK)
    most = tl.full([BLOCK], -3.4028234663852886e38, tl.float32)  # the lowest that is finite
    total, least = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, vocab, BLOCK, num_stages=3):
        at = first + lane
        found = tl.load(logits + at, mask=at < vocab, other=-3.4028234663852886e38)
        # One exp for each: either what is there counts less from now on, or what is found does.
        more = found - most
        share = tl.exp(-tl.abs(more))
        total = tl.where(more > 0, total * share + 1.0, total + share)
        most, least = tl.maximum(most, found), tl.minimum(least, found)
    best = tl.max(most, 0)
    whole = best + tl.log(tl.sum(total * tl.exp(most - best), 0))  # NaN of NaN and of infinity above
    whole = tl.where(tl.min(least, 0) == -float("inf"), float("nan"), whole)
    place = tl.arange(0, WANTED)
    token = tl.load(ids + row * wanted + place, mask=place < wanted, other=0)
    picked = tl.load(logits + token, mask=place < wanted, other=0.0)
    tl.store(out + row * wanted + place, picked - whole, mask=place < wanted)
    tl.store(totals + row, whole)
