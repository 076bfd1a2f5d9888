"""Sampling in one launch: mask, temperature, top-k, top-p, min-p and the draw, or the best id; and penalties.

A row is one program's. No sort: where top-k and top-p cut is found by a search for the least weight that
stays, on the bits of the weights (which order floats above zero), four bits a pass over the row. The result
is exact, whatever the numbers; ties at a cut-off are kept. The draw is looked up in the cumulative
distribution in order of ids, as runtime.engine.sampling does it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.device import power_of_two

BLOCK = 1024


class Draws(NamedTuple):
    """Per row. temperatures float32: 0 takes the best id; top_k int32: below 1 keeps all; top_p, min_p
    float32; draws float64 in [0, 1). mask_of int32: which row of `masks` is this row's, -1: none. masks
    [masks, words] int32: bit i of word w set = id 32 * w + i is allowed; ids beyond the words are not."""

    temperatures: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    draws: Tensor
    mask_of: Tensor
    masks: Tensor


class Changes(NamedTuple):
    """Of single scores, each at most once: rows, columns int32; factors, costs float32: a score above 0 is
    divided by its factor, another one multiplied with it; then its cost is taken from it."""

    rows: Tensor
    columns: Tensor
    factors: Tensor
    costs: Tensor


def sample(scores: Tensor, draws: Draws) -> Tensor:
    """scores [rows, vocab] float32, a row's numbers side by side -> [rows] int32: an id each, -1 where none
    is allowed. NaN is never taken."""
    rows, vocab = scores.shape
    out = torch.empty(rows, dtype=torch.int32, device=scores.device)
    block = min(BLOCK, power_of_two(vocab))
    _sample[(rows,)](
        scores, *draws, out, scores.stride(0), draws.masks.shape[1], vocab, BLOCK=block, num_warps=16
    )
    return out


def plain_sample(scores: Tensor, draws: Draws) -> Tensor:
    """By sorting."""
    out = torch.full((scores.shape[0],), -1, dtype=torch.int32, device=scores.device)
    for row, given in enumerate(scores):
        mine = given.masked_fill(given.isnan(), -math.inf)
        if (mask := int(draws.mask_of[row])) >= 0:
            ids = torch.arange(len(mine), device=mine.device)
            words = draws.masks[mask][(ids // 32).clamp(max=draws.masks.shape[1] - 1)].long()
            allowed = ((words >> ids % 32) & 1).bool() & (ids < 32 * draws.masks.shape[1])
            mine = mine.masked_fill(~allowed, -math.inf)
        best, column = mine.max(-1)
        if best == -math.inf:
            continue
        out[row] = column
        if (temperature := draws.temperatures[row]) == 0:
            continue
        weights = ((mine - best) / temperature).exp().nan_to_num_(0.0)
        heavy = weights.sort(descending=True).values
        least = draws.min_p[row]
        if 1 <= (k := int(draws.top_k[row])) < len(heavy):
            least = torch.maximum(least, heavy[k - 1])
            weights = weights.masked_fill(weights < heavy[k - 1], 0.0)
        if (p := draws.top_p[row]) < 1.0:
            # Kept: whatever is not outweighed by those before it.
            up_to = heavy.double().cumsum(-1)
            kept = (up_to - heavy.double() < p.double() * weights.double().sum()).sum().clamp(min=1)
            least = torch.maximum(least, heavy[kept - 1])
        cumulative = weights.masked_fill(weights < least, 0.0).double().cumsum(-1)
        total = cumulative[-1]
        target = torch.minimum(draws.draws[row] * total, torch.nextafter(total, torch.zeros_like(total)))
        out[row] = torch.searchsorted(cumulative, target, right=True)
    return out


def change(scores: Tensor, changes: Changes) -> None:
    """In place, on scores [rows, vocab] float32."""
    count = len(changes.rows)
    if count:
        _change[(triton.cdiv(count, 256),)](scores, *changes, scores.stride(0), count, BLOCK=256)


def plain_change(scores: Tensor, changes: Changes) -> None:
    at = changes.rows.long(), changes.columns.long()
    old = scores[at]
    scores[at] = torch.where(old > 0, old / changes.factors, old * changes.factors) - changes.costs


@triton.jit
def _change(scores, rows, columns, factors, costs, stride, count, BLOCK: tl.constexpr):
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = entry < count
    place = tl.load(rows + entry, mask=real, other=0).to(tl.int64) * stride
    place += tl.load(columns + entry, mask=real, other=0)
    factor = tl.load(factors + entry, mask=real, other=1.0)
    old = tl.load(scores + place, mask=real, other=0.0)
    new = tl.where(old > 0, old / factor, old * factor) - tl.load(costs + entry, mask=real, other=0.0)
    tl.store(scores + place, new, mask=real)


@triton.jit
def _scores(scores, mask, missing, words, vocab, at):
    """Those at `at`, -inf where an id is forbidden or its score is NaN."""
    found = tl.load(scores + at, mask=at < vocab, other=-float("inf"))
    word = tl.load(mask + at // 32, mask=at // 32 < words, other=missing)
    allowed = ((word >> (at % 32)) & 1) > 0
    return tl.where(allowed & (found == found), found, -float("inf"))


@triton.jit
def _weights(scores, mask, missing, words, vocab, at, best, temperature):
    """Relative to the best, which weighs 1."""
    return tl.exp((_scores(scores, mask, missing, words, vocab, at) - best) / temperature)


@triton.jit
def _sum_above(
    scores, mask, missing, words, vocab, best, temperature, limits, COUNTED: tl.constexpr, BLOCK: tl.constexpr
):
    """Per limit the weight of what weighs more, or how many do. Limits are bits of floats."""
    found = tl.zeros([16], tl.float64)
    for first in range(0, vocab, BLOCK):
        at = first + tl.arange(0, BLOCK)
        weights = _weights(scores, mask, missing, words, vocab, at, best, temperature)
        heavier = weights.to(tl.int32, bitcast=True)[:, None] > limits[None, :]
        if COUNTED:
            found += tl.sum(heavier.to(tl.int32), 0).to(tl.float64)
        else:
            found += tl.sum(tl.where(heavier, weights[:, None], 0.0), 0).to(tl.float64)
    return found


@triton.jit
def _least(
    scores, mask, missing, words, vocab, best, temperature, wanted, COUNTED: tl.constexpr, BLOCK: tl.constexpr
):
    """The bits of the least weight that stays: the least number above which lies less than `wanted`."""
    low, failing = 0, 0
    digit = tl.arange(0, 16)
    for step in range(8):
        limits = low + (digit << (28 - 4 * step))
        # Numbers above 1.0 (0x3f800000) have nothing above them; those that left the range neither.
        limits = tl.where(limits < 0, 0x7FFFFFFF, limits)
        above = _sum_above(scores, mask, missing, words, vocab, best, temperature, limits, COUNTED, BLOCK)
        # Digits that leave too much above them; the sought number lies behind the last of them.
        failing = tl.sum((above >= wanted).to(tl.int32), 0)
        low += tl.maximum(failing - 1, 0) << (28 - 4 * step)
    return low + tl.minimum(failing, 1)


@triton.jit
def _sample(
    scores, temperatures, top_ks, top_ps, min_ps, draws, mask_of, masks, out, stride, words, vocab,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    scores += row.to(tl.int64) * stride
    number = tl.load(mask_of + row)
    mask = masks + tl.maximum(number, 0).to(tl.int64) * words
    # A row without a mask has no words, and all that is missing is allowed.
    missing, words = tl.where(number >= 0, 0, -1), tl.where(number >= 0, words, 0)
    best, column = tl.max(tl.full([2], -float("inf"), tl.float32), 0), 0
    for first in range(0, vocab, BLOCK):
        found, index = tl.max(
            _scores(scores, mask, missing, words, vocab, first + tl.arange(0, BLOCK)), 0, return_indices=True
        )
        column = tl.where(found > best, first + index, column)
        best = tl.maximum(best, found)
    temperature = tl.load(temperatures + row)
    answer = tl.where(best == -float("inf"), -1, column)
    if (temperature > 0) & (best > -float("inf")):
        least = tl.load(min_ps + row)
        k, p = tl.load(top_ks + row), tl.load(top_ps + row).to(tl.float64)
        top = tl.zeros([1], tl.float32)
        if (k > 0) & (k < vocab):
            bits = _least(
                scores, mask, missing, words, vocab, best, temperature, k.to(tl.float64), True, BLOCK
            )
            top += bits.to(tl.float32, bitcast=True)
        kept = tl.max(top, 0)
        least = tl.maximum(least, kept)
        if p < 1.0:
            total = tl.sum(tl.zeros([2], tl.float64), 0)
            for first in range(0, vocab, BLOCK):
                weights = _weights(
                    scores, mask, missing, words, vocab, first + tl.arange(0, BLOCK), best, temperature
                )
                total += tl.sum(tl.where(weights >= kept, weights, 0.0).to(tl.float64), 0)
            # At p = 0 the best stays.
            wanted = tl.maximum(p * total, 1e-300)
            bits = _least(scores, mask, missing, words, vocab, best, temperature, wanted, False, BLOCK)
            least = tl.maximum(least, bits.to(tl.float32, bitcast=True))
        least = tl.minimum(least, 1.0)
        total = tl.sum(tl.zeros([2], tl.float64), 0)
        for first in range(0, vocab, BLOCK):
            weights = _weights(
                scores, mask, missing, words, vocab, first + tl.arange(0, BLOCK), best, temperature
            )
            total += tl.sum(tl.where(weights >= least, weights, 0.0).to(tl.float64), 0)
        target = tl.load(draws + row) * total
        before, hit, last = tl.sum(tl.zeros([2], tl.float64), 0), vocab, 0
        for first in range(0, vocab, BLOCK):
            at = first + tl.arange(0, BLOCK)
            weights = _weights(scores, mask, missing, words, vocab, at, best, temperature)
            weights = tl.where(weights >= least, weights, 0.0).to(tl.float64)
            reached = (tl.cumsum(weights, 0) + before > target) & (weights > 0.0)
            hit = tl.minimum(hit, tl.min(tl.where(reached, at, vocab), 0))
            last = tl.maximum(last, tl.max(tl.where(weights > 0.0, at, 0), 0))
            before += tl.sum(weights, 0)
        # A draw close to 1 may lie behind the last sum, by rounding.
        answer = tl.where(hit < vocab, hit, last)
    tl.store(out + row, answer)
