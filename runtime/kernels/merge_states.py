"""Merge a token's partial attention results from several tiles by log-sum-exp (cascade attention's merge,
arXiv 2501.01005)."""

from __future__ import annotations

import math
from itertools import pairwise

import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.device import power_of_two, warps
from runtime.kernels.paged_attention import LOG2_E, States

AT_ONCE = 8  # partial results


def merge_states(states: States, of: Tensor, ends: Tensor, out: Tensor, sinks: Tensor | None = None) -> None:
    """Fill out [tokens, heads, head_dim] for every token with partial results.

    of int32: indices of partial results, grouped by token in order. ends int32 [tokens + 1]: the index at
    which each token's group begins, and the end of the last one. sinks: [heads] float32 logits that take part
    in each softmax and add no value.
    """
    heads, dim = out.shape[1:]
    block_d = power_of_two(dim)
    _merge[(out.shape[0], heads)](
        states.values, states.sums, of, ends, out, sinks, heads, dim,
        SINKS=sinks is not None, PARTS=AT_ONCE, BLOCK_D=block_d, num_warps=warps(AT_ONCE * block_d),
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
    SINKS: tl.constexpr, PARTS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0), tl.program_id(1)
    first, last = tl.load(ends + token), tl.load(ends + token + 1)
    if last > first:
        d = tl.arange(0, BLOCK_D)
        most, total = tl.max(tl.full([2], -float("inf"), tl.float32), 0), tl.sum(tl.zeros([2], tl.float32), 0)
        if SINKS:
            most = tl.load(sinks + head) * 1.4426950408889634
            total += 1.0
        acc = tl.zeros([BLOCK_D], tl.float32)
        for begin in range(first, last, PARTS):
            index = begin + tl.arange(0, PARTS)
            real = index < last
            state = tl.load(of + index, mask=real, other=0).to(tl.int64) * heads + head
            part = tl.load(sums + state, mask=real, other=-float("inf"))
            both = real[:, None] & (d < dim)[None, :]
            value = tl.load(values + state[:, None] * dim + d[None, :], mask=both, other=0.0)
            now = tl.maximum(most, tl.max(part, 0))
            base = tl.where(now == -float("inf"), 0.0, now)
            kept, weight = tl.exp2(most - base), tl.exp2(part - base)
            total = total * kept + tl.sum(weight, 0)
            acc = acc * kept + tl.sum(value * weight[:, None], 0)
            most = now
        acc = acc / tl.where(total == 0.0, 1.0, total)
        target = out + (token.to(tl.int64) * heads + head) * dim + d
        tl.store(target, acc.to(out.dtype.element_ty), mask=d < dim)
