"""What a token got from several tiles, made one by log-sum-exp (cascade attention's merge, arXiv
2501.01005)."""

from __future__ import annotations

import math
from itertools import pairwise

import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.device import power_of_two, warps
from runtime.kernels.paged_attention import LOG2_E, States

NUMBERS = 4096  # of a program


def merge_states(states: States, of: Tensor, ends: Tensor, out: Tensor, sinks: Tensor | None = None) -> None:
    """of int32: indices of partial results, those of a token side by side, the first token's first; ends
    int32 [tokens + 1]: where each token's begin, and the last one's end. out [tokens, heads, head_dim] is
    filled where a token has any. sinks: [heads] float32 logits that join each softmax and add nothing."""
    heads, dim = out.shape[1:]
    block_d = power_of_two(dim)
    block_h = min(power_of_two(heads), max(1, NUMBERS // block_d))
    _merge[(out.shape[0], triton.cdiv(heads, block_h))](
        states.values, states.sums, of, ends, out, sinks, heads, dim,
        SINKS=sinks is not None, BLOCK_H=block_h, BLOCK_D=block_d, num_warps=max(4, warps(block_h * block_d)),
    )  # fmt: skip


def plain_merge_states(
    states: States, of: Tensor, ends: Tensor, out: Tensor, sinks: Tensor | None = None
) -> None:
    limits = ends.tolist()
    for token, (first, last) in enumerate(pairwise(limits)):
        if first == last:
            continue
        mine = of[first:last].long()
        total = states.sums[mine] / LOG2_E
        whole = total.logsumexp(0)
        if sinks is not None:
            whole = whole.logaddexp(sinks)
        weights = (total - whole).exp().masked_fill(total == -math.inf, 0.0)
        out[token] = (states.values[mine] * weights[:, :, None]).sum(0).to(out.dtype)


@triton.jit
def _merge(
    values, sums, of, ends, out, sinks, heads, dim,
    SINKS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    first, last = tl.load(ends + token), tl.load(ends + token + 1)
    if last > first:
        head, d = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
        real = head < heads
        both = real[:, None] & (d < dim)[None, :]
        most = tl.full([BLOCK_H], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK_H], tl.float32)
        if SINKS:
            most = tl.load(sinks + head, mask=real, other=0.0) * 1.4426950408889634
            total += 1.0
        made = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
        for index in range(first, last):
            state = tl.load(of + index).to(tl.int64) * heads + head
            sum_ = tl.load(sums + state, mask=real, other=-float("inf"))
            now = tl.maximum(most, sum_)
            base = tl.where(now == -float("inf"), 0.0, now)
            kept, weight = tl.exp2(most - base), tl.exp2(sum_ - base)
            value = tl.load(values + state[:, None] * dim + d[None, :], mask=both, other=0.0)
            total = total * kept + weight
            made = made * kept[:, None] + value * weight[:, None]
            most = now
        made = made / tl.where(total == 0.0, 1.0, total)[:, None]
        place = out + (token.to(tl.int64) * heads + head)[:, None] * dim + d[None, :]
        tl.store(place, made.to(out.dtype.element_ty), mask=both)
