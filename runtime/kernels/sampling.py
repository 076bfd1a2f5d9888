"""Sampling in one launch: mask, temperature, top-k, top-p, min-p and the draw, or the best id; and penalties.

One program per row, in groups of 32 columns. No sort: the cut of top-k and top-p is found by a search for the
least weight that stays, on its bits (which order floats above zero). The greatest weights of the groups and
their sums tell which columns may stay; these are packed and searched, or the whole row if they do not fit.
The result is exact; ties at a cut are kept. A draw adds the noise of gumbel.py, without fused multiply-add.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.device import power_of_two
from runtime.kernels.gumbel import FACTORS, ID_FACTOR, LN2, NEAR, SERIES, SQRT_HALF, gumbel

BLOCK = 4096  # columns at once
CAP = 8192  # packed columns at most
CHUNK = 1024  # packed columns at once
FEW = 256  # up to this many packed columns, all pairs are compared
_ID_FACTOR, _LN2, _NEAR, _SQRT_HALF = map(tl.constexpr, (ID_FACTOR, LN2, NEAR, SQRT_HALF))
_FACTORS, _SERIES = tl.constexpr(FACTORS), tl.constexpr(SERIES)
_FACTORS_COUNT, _SERIES_COUNT = tl.constexpr(len(FACTORS)), tl.constexpr(len(SERIES))


class Draws(NamedTuple):
    """One entry per row.

    temperatures float32: 0 takes the best id. top_k int32: below 1 keeps all. top_p, min_p float32. keys
    [rows, 2] int32. mask_of int32: the row's index in `masks`, or -1. masks [masks, words] int32: bit i of
    word w allows id 32 * w + i; ids beyond the words are forbidden.
    """

    temperatures: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    keys: Tensor
    mask_of: Tensor
    masks: Tensor


class Changes(NamedTuple):
    """Changes of single scores, each at most once. rows, columns int32; factors, costs float32. A score above
    0 is divided by its factor, another one multiplied with it; then the cost is subtracted."""

    rows: Tensor
    columns: Tensor
    factors: Tensor
    costs: Tensor


def sample(scores: Tensor, draws: Draws, *, check: bool = False) -> Tensor:
    """scores [rows, vocab] float32, rows contiguous -> [rows] int32: the id drawn, or -1 if none is allowed.
    NaN is never drawn. check: -2 for a row with a score that is NaN or infinite, allowed or not."""
    rows, vocab = scores.shape
    groups = power_of_two(max(1, -(-vocab // 32)))
    cap = min(CAP, 32 * groups)

    def scratch(columns: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(rows, columns, dtype=dtype, device=scores.device)

    out = scratch(1, torch.int32).view(rows)
    _sample[(rows,)](
        scores, *draws, out, scratch(groups + cap, torch.float32), scratch(groups + cap, torch.int32),
        scratch(groups, torch.float64), scores.stride(0), draws.masks.shape[1], vocab, CHECK=check,
        ROWS=min(BLOCK // 32, groups), GROUPS=groups, CAP=cap, CHUNK=min(CHUNK, cap), FEW=min(FEW, cap),
        num_warps=16, maxnreg=64, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def plain_sample(scores: Tensor, draws: Draws, *, check: bool = False) -> Tensor:
    """By sorting."""
    out = torch.full((scores.shape[0],), -1, dtype=torch.int32, device=scores.device)
    for row, row_scores in enumerate(scores):
        if check and not row_scores.isfinite().all():
            out[row] = -2
            continue
        mine = row_scores.masked_fill(row_scores.isnan(), -math.inf)
        if (mask := int(draws.mask_of[row])) >= 0:
            ids = torch.arange(len(mine), device=mine.device)
            words = draws.masks[mask][(ids // 32).clamp(max=draws.masks.shape[1] - 1)].long()
            allowed = ((words >> ids % 32) & 1).bool() & (ids < 32 * draws.masks.shape[1])
            mine = mine.masked_fill(~allowed, -math.inf)
        best, column = mine.max(-1)
        if best == -math.inf:
            continue
        out[row] = column
        if (temperature := draws.temperatures[row]) == 0 or best == math.inf:
            continue
        weights = ((mine - best) / temperature).exp().nan_to_num_(0.0)
        heavy = weights.sort(descending=True).values
        least = draws.min_p[row]
        if 1 <= (k := int(draws.top_k[row])) < len(heavy):
            least = torch.maximum(least, heavy[k - 1])
            weights = weights.masked_fill(weights < heavy[k - 1], 0.0)
        if (p := draws.top_p[row]) < 1.0:
            # Keep a weight if the sum of those before it is below p.
            up_to = heavy.double().cumsum(-1)
            kept = (up_to - heavy.double() < p.double() * weights.double().sum()).sum().clamp(min=1)
            least = torch.maximum(least, heavy[kept - 1])
        noise = gumbel(
            draws.keys[row : row + 1], torch.arange(len(mine), dtype=torch.int32, device=mine.device)
        )
        drawn = ((mine - best) / temperature + noise[0]).masked_fill(weights < least, -math.inf)
        out[row] = drawn.max(-1).indices
    return out


def change(scores: Tensor, changes: Changes) -> None:
    """Apply the changes in place to scores [rows, vocab] float32."""
    count = len(changes.rows)
    if count:
        _change[(triton.cdiv(count, 256),)](scores, *changes, scores.stride(0), count, BLOCK=256)


def plain_change(scores: Tensor, changes: Changes) -> None:
    at = changes.rows.long(), changes.columns.long()
    old = scores[at]
    scores[at] = torch.where(old > 0, old / changes.factors, old * changes.factors) - changes.costs


@triton.jit(do_not_specialize=["count"])
def _change(scores, rows, columns, factors, costs, stride, count, BLOCK: tl.constexpr):
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = entry < count
    target = tl.load(rows + entry, mask=real, other=0).to(tl.int64) * stride
    target += tl.load(columns + entry, mask=real, other=0)
    factor = tl.load(factors + entry, mask=real, other=1.0)
    old = tl.load(scores + target, mask=real, other=0.0)
    new = tl.where(old > 0, old / factor, old * factor) - tl.load(costs + entry, mask=real, other=0.0)
    tl.store(scores + target, new, mask=real)


@triton.jit
def _scores(scores, mask, missing, words, vocab, group):
    """Two arrays [groups, 32]: the scores with -inf for ids that are forbidden or NaN; and the raw scores,
    with 0 beyond the vocabulary."""
    lane = tl.arange(0, 32)[None, :]
    real = group[:, None] * 32 + lane < vocab
    values = tl.load(scores + group[:, None] * 32 + lane, mask=real, other=0.0)
    word = tl.load(mask + group, mask=group < words, other=missing)
    allowed = (((word[:, None] >> lane) & 1) > 0) & real
    return tl.where(allowed & (values == values), values, -float("inf")), values


@triton.jit
def _weights(mine, group):
    """Weights relative to the best column, which weighs 1."""
    scores, mask, missing, words, vocab, best, temperature = mine
    return tl.exp((_scores(scores, mask, missing, words, vocab, group)[0] - best) / temperature)


@triton.jit
def _sums(mine, sums, least, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """The sum of the weights of `least` or more, per group."""
    vocab, group = mine[4], tl.arange(0, GROUPS)
    tl.store(sums + group, tl.zeros([GROUPS], tl.float64), mask=group * 32 >= vocab)
    for first in tl.range(0, vocab, 32 * ROWS, num_stages=3):
        some = first // 32 + tl.arange(0, ROWS)
        weights = _weights(mine, some)
        tl.store(sums + some, tl.sum(tl.where(weights >= least, weights, 0.0).to(tl.float64), 1))
    tl.debug_barrier()
    return tl.load(sums + group)


@triton.jit
def _bound(heaviest, sums, target, COUNTED: tl.constexpr):
    """The bits of a lower bound of the least weight that stays.

    COUNTED: at least `target` groups hold a weight of this size. Otherwise all lighter weights sum to
    `target` at most. A group whose heaviest weight is lighter counts with its sum; in another group the
    lighter ones are at most its sum without the heaviest, and at most 31 times the bound.
    """
    low = tl.zeros([], tl.int32)
    for step in range(12):  # the exponent and the first bits of the fraction
        middle = low + (1 << (29 - step))
        number = middle.to(tl.float32, bitcast=True)
        if COUNTED:
            fits = tl.sum((heaviest >= number).to(tl.int32), 0) >= target
        else:
            others = tl.minimum(sums - heaviest, 31.0 * number)
            fits = tl.sum(tl.where(heaviest < number, sums, others), 0) <= target
        low = tl.where(fits, middle, low)
    return low


@triton.jit
def _pack(mine, packed, low, high, ROWS: tl.constexpr, GROUPS: tl.constexpr, CAP: tl.constexpr):
    """Pack the weights from `low` to below `high` (bits) and their ids, in order of ids. Returns how many
    there are; at most CAP of them are stored. Groups without one are not read."""
    maxima, groups, heavy, ids = packed
    tl.debug_barrier()  # all threads have read the old contents
    heaviest = tl.exp((tl.load(maxima + tl.arange(0, GROUPS)) - mine[5]) / mine[6])
    # A little below `low`: with rounding, exp of a lower score may be slightly greater.
    selected = heaviest >= 0.9999 * low.to(tl.float32, bitcast=True)
    up_to = tl.cumsum(selected.to(tl.int32), 0)
    tl.store(groups + up_to - 1, tl.arange(0, GROUPS), mask=selected)
    listed, count = tl.max(up_to, 0), 0
    tl.debug_barrier()
    for first in range(0, listed, ROWS):
        number = first + tl.arange(0, ROWS)
        some = tl.load(groups + number, mask=number < listed, other=mine[4])  # behind the end
        bits = tl.reshape(_weights(mine, some).to(tl.int32, bitcast=True), [32 * ROWS])
        column = tl.reshape(some[:, None] * 32 + tl.arange(0, 32)[None, :], [32 * ROWS])
        inside = (bits >= low) & (bits < high)
        target = count + tl.cumsum(inside.to(tl.int32), 0) - 1
        tl.store(heavy + target, bits.to(tl.float32, bitcast=True), mask=inside & (target < CAP))
        tl.store(ids + target, column, mask=inside & (target < CAP))
        count += tl.sum(inside.to(tl.int32), 0)
    tl.debug_barrier()
    return count


@triton.jit
def _between(mine, low, high, ROWS: tl.constexpr):
    """The number of columns with a weight from `low` to below `high` (bits), and the sum of these weights."""
    count, total = tl.zeros([ROWS, 32], tl.int32), tl.zeros([ROWS, 32], tl.float64)
    for first in tl.range(0, mine[4], 32 * ROWS, num_stages=3):
        weights = _weights(mine, first // 32 + tl.arange(0, ROWS))
        bits = weights.to(tl.int32, bitcast=True)
        inside = (bits >= low) & (bits < high)
        count += inside.to(tl.int32)
        total += tl.where(inside, weights, 0.0).to(tl.float64)
    return tl.sum(tl.sum(count, 1), 0), tl.sum(tl.sum(total, 1), 0)


@triton.jit
def _from(heavy, count, low, counted, CHUNK: tl.constexpr):
    """The number of packed weights of `low` (bits) or more, or their sum."""
    counts = tl.zeros([CHUNK], tl.float64)
    for first in range(0, count, CHUNK):
        at = first + tl.arange(0, CHUNK)
        weights = tl.load(heavy + at, mask=at < count, other=0.0)
        inside = weights.to(tl.int32, bitcast=True) >= low
        counts += tl.where(inside, tl.where(counted, 1.0, weights), 0.0).to(tl.float64)
    return tl.sum(counts, 0)


@triton.jit
def _least(
    mine, packed, count, low, target, counted, ROWS: tl.constexpr, GROUPS: tl.constexpr, CAP: tl.constexpr,
    CHUNK: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """The bits of the least weight that stays: the greatest number such that the weights from it on count or
    sum to `target` or more. It is known to be at least `low`. `count`: the number of candidates, which are
    packed if there are at most CAP."""
    high, above = 0x3F800001, tl.zeros([], tl.float64)  # nothing weighs more than 1.0, 0x3F800000
    heavy, crowded = packed[2], count > CAP
    while (count > CAP) & (high - low > 1):
        middle = low + (high - low) // 2
        number, total = _between(mine, middle, high, ROWS)
        reached = above + tl.where(counted, number.to(tl.float64), total)
        fits = reached >= target
        count = tl.where(fits, number, count - number)
        above = tl.where(fits, above, reached)
        low, high = tl.where(fits, middle, low), tl.where(fits, high, middle)
    if crowded:
        count = _pack(mine, packed, low, high, ROWS, GROUPS, CAP)
    if count <= FEW:  # all pairs
        each = tl.arange(0, FEW)
        bits = tl.load(heavy + each, mask=each < count, other=0.0).to(tl.int32, bitcast=True)
        sums = tl.zeros([FEW], tl.float64) + above
        for first in range(0, count, 16):
            at = first + tl.arange(0, 16)
            weights = tl.load(heavy + at, mask=at < count, other=0.0)
            inside = (at < count)[None, :] & (weights.to(tl.int32, bitcast=True)[None, :] >= bits[:, None])
            amount = tl.where(counted, 1.0, weights)[None, :]
            sums += tl.sum(tl.where(inside, amount, 0.0).to(tl.float64), 1)
        low = tl.maximum(low, tl.max(tl.where(sums >= target, bits, 0), 0))
    else:
        while high - low > 1:
            middle = low + (high - low) // 2
            fits = above + _from(heavy, count, middle, counted, CHUNK) >= target
            low, high = tl.where(fits, middle, low), tl.where(fits, high, middle)
    return low


@triton.jit
def _parts(x):
    """x = (1 + fraction) * 2^power."""
    bits = x.to(tl.int32, bitcast=True)
    power = (bits - _SQRT_HALF) >> 23
    return (bits - (power << 23)).to(tl.float32, bitcast=True) - 1.0, power.to(tl.float32)


@triton.jit
def _minus_log(fraction, power):
    total = fraction * _SERIES[0] + _SERIES[1]
    for turn in tl.static_range(2, _SERIES_COUNT):
        total = total * fraction + _SERIES[turn]
    return -(power * _LN2 + (fraction * fraction * total + fraction))


@triton.jit
def _gumbel(column, lower, upper):
    """As gumbel.py defines it. lower, upper: the halves of the key, uint32."""
    x = column.to(tl.uint32) * _ID_FACTOR + lower
    for turn in tl.static_range(_FACTORS_COUNT):
        if turn == 2:
            x += upper
        x = (x ^ (x >> _FACTORS[turn][0])) * _FACTORS[turn][1]
    number = ((x ^ (x >> 15)) >> 1).to(tl.int32)
    share = (number.to(tl.float32) + 0.5) * 4.656612873077392578125e-10  # 2^-31
    fraction, power = _parts(((0x7FFFFFFF - number).to(tl.float32) + 0.5) * 4.656612873077392578125e-10)
    near = share < _NEAR
    exponential = _minus_log(tl.where(near, -share, fraction), tl.where(near, 0.0, power))
    fraction, power = _parts(exponential)
    return _minus_log(fraction, power)


@triton.jit
def _draw_packed(mine, packed, count, least, lower, upper, CHUNK: tl.constexpr):
    """Draw among the packed columns that weigh `least` (bits) or more."""
    top, hit = tl.full([], -float("inf"), tl.float32), tl.zeros([], tl.int32)
    for first in range(0, count, CHUNK):
        at = first + tl.arange(0, CHUNK)
        inside = tl.load(packed[2] + at, mask=at < count, other=0.0).to(tl.int32, bitcast=True) >= least
        inside &= at < count
        column = tl.load(packed[3] + at, mask=inside, other=0)
        values = tl.load(mine[0] + column, mask=inside, other=-float("inf"))
        value = tl.div_rn(values - mine[5], tl.zeros_like(values) + mine[6]) + _gumbel(column, lower, upper)
        most = tl.max(value, 0)
        chosen = tl.min(tl.where(inside & (value == most), column, 0x7FFFFFFF), 0)
        hit, top = tl.where(most > top, chosen, hit), tl.maximum(most, top)
    return hit


@triton.jit
def _draw(mine, least, lower, upper, ROWS: tl.constexpr):
    """Draw among all columns that weigh `least` or more."""
    scores, mask, missing, words, vocab, best, temperature = mine
    lane = tl.arange(0, 32)[None, :]
    top, hit = tl.full([], -float("inf"), tl.float32), tl.zeros([], tl.int32)
    for first in tl.range(0, vocab, 32 * ROWS, num_stages=3):
        group = first // 32 + tl.arange(0, ROWS)
        relative = _scores(scores, mask, missing, words, vocab, group)[0] - best
        weighs = tl.exp(relative / temperature) >= least
        column = group[:, None] * 32 + lane
        value = tl.div_rn(relative, tl.zeros_like(relative) + temperature) + _gumbel(column, lower, upper)
        value = tl.where(weighs, value, -float("inf"))
        most = tl.max(tl.max(value, 1), 0)
        chosen = tl.min(tl.min(tl.where(value == most, column, 0x7FFFFFFF), 1), 0)
        hit, top = tl.where(most > top, chosen, hit), tl.maximum(most, top)
    return hit


@triton.jit(do_not_specialize=["words"])
def _sample(
    scores, temperatures, top_ks, top_ps, min_ps, keys, mask_of, masks, out, floats, ints, sums, stride,
    words, vocab, CHECK: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, CAP: tl.constexpr,
    CHUNK: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    scores += row * stride
    number = tl.load(mask_of + row)
    mask = masks + tl.maximum(number, 0).to(tl.int64) * words
    # A row without a mask has no words; ids beyond the words are allowed then.
    missing, words = tl.where(number >= 0, 0, -1), tl.where(number >= 0, words, 0)
    maxima, groups, sums = floats + row * (GROUPS + CAP), ints + row * (GROUPS + CAP), sums + row * GROUPS
    packed = (maxima, groups, maxima + GROUPS, groups + GROUPS)
    group, lane = tl.arange(0, GROUPS), tl.arange(0, 32)[None, :]
    tl.store(maxima + group, tl.full([GROUPS], -float("inf"), tl.float32), mask=group * 32 >= vocab)
    odd = tl.zeros([ROWS, 32], tl.float32)
    for first in tl.range(0, vocab, 32 * ROWS, num_stages=3):
        some = first // 32 + tl.arange(0, ROWS)
        allowed_scores, raw_scores = _scores(scores, mask, missing, words, vocab, some)
        if CHECK:
            odd += raw_scores * 0.0  # NaN of what is not finite
        tl.store(maxima + some, tl.max(allowed_scores, 1))
    tl.debug_barrier()
    tops = tl.load(maxima + group)
    best = tl.max(tops, 0)
    # The first column of the first group that has it.
    chosen = tl.min(tl.where(tops == best, group, GROUPS - 1), 0)
    allowed_scores, raw_scores = _scores(
        scores, mask, missing, words, vocab, chosen + tl.zeros([1], tl.int32)
    )
    answer = chosen * 32 + tl.min(tl.min(tl.where(allowed_scores == best, lane, 31), 1), 0)
    answer = tl.where(best == -float("inf"), -1, answer)
    if CHECK:
        whole = tl.sum(tl.sum(odd, 1), 0)
        answer = tl.where(whole == whole, answer, -2)
    temperature = tl.load(temperatures + row)
    if (temperature > 0) & (answer >= 0) & (best < float("inf")):
        mine = (scores, mask, missing, words, vocab, best, temperature)
        least = tl.minimum(tl.load(min_ps + row), 1.0)
        lower = tl.load(keys + 2 * row).to(tl.uint32, bitcast=True)
        upper = tl.load(keys + 2 * row + 1).to(tl.uint32, bitcast=True)
        k, p = tl.load(top_ks + row), tl.load(top_ps + row).to(tl.float64)
        few, share = (k > 0) & (k < vocab), p < 1.0
        count = CAP + 1
        if few | share | (least > 0.0):
            heaviest = tl.exp((tl.load(maxima + group) - best) / temperature)
            low, total = tl.zeros([], tl.int32), tl.zeros([], tl.float64)
            if few:
                low = _bound(heaviest, heaviest, k, True)
            elif share:
                each = _sums(mine, sums, 0.0, ROWS, GROUPS)
                total = tl.sum(each, 0)
                low = _bound(heaviest, each, (1.0 - p) * total * 0.999, False)
            # Slack, as rounding differs. The sum for top-p includes the columns that min-p removes from those
            # that top-k keeps.
            bound = tl.maximum(0.9999 * low.to(tl.float32, bitcast=True), tl.where(few & share, 0.0, least))
            low = tl.maximum(bound.to(tl.int32, bitcast=True), 1)
            count = _pack(mine, packed, low, 0x3F800001, ROWS, GROUPS, CAP)
            for turn in range(2):  # top-k; then top-p of the rest
                if tl.where(turn == 0, few, share):
                    if (turn > 0) & few:
                        if count <= CAP:
                            total = _from(packed[2], count, low, False, CHUNK)
                        else:
                            total = _between(mine, low, 0x3F800001, ROWS)[1]
                    # At p = 0 the best stays.
                    target = tl.where(turn == 0, k.to(tl.float64), tl.maximum(p * total, 1e-300))
                    low = _least(mine, packed, count, low, target, turn == 0, ROWS, GROUPS, CAP, CHUNK, FEW)
            least = tl.maximum(least, low.to(tl.float32, bitcast=True))
        if count <= CAP:
            answer = _draw_packed(mine, packed, count, least.to(tl.int32, bitcast=True), lower, upper, CHUNK)
        else:
            answer = _draw(mine, least, lower, upper, ROWS)
    tl.store(out + row, answer)
