"""Attention of tiles: a few queries against a range of keys that lie in any slots of the pool.

One kernel serves decoding (one token against a split of its context, as in Flash-Decoding), extending, and
shared prefixes (tokens of many rows against the same keys). Which queries meet which keys is data, computed
once per pass (runtime.attention.tiles). The query heads of one key head are packed into a tile's rows, so
that keys are read once; results of several tiles are merged by log-sum-exp (merge_states.py). Online softmax
as in FlashAttention (arXiv 2205.14135), in float32.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.device import INTERPRETED, power_of_two

FIELDS = 6
"""int32 fields of a tile: the start and count of its queries in Tiles.queries; the start and count of its
keys in Tiles.slots and the first one's position; the index of its first partial result, or -1 if it writes
the result itself."""
LOG2_E = math.log2(math.e)


class Tiles(NamedTuple):
    """fields [tiles, FIELDS]; queries: token indices; positions: of each token; slots: of keys. All int32. A
    tile without queries does nothing."""

    fields: Tensor
    queries: Tensor
    positions: Tensor
    slots: Tensor


class Form(NamedTuple):
    """scores = (q k) * scale, then cap * tanh(scores / cap) if there is a softcap. Keys `window` or more
    positions back are not seen. sinks: [heads] float32 logits that take part in each softmax and add no
    value; applied here by tiles that write the result itself."""

    scale: float
    softcap: float | None = None
    window: int | None = None
    sinks: Tensor | None = None


class States(NamedTuple):
    """Partial results [partials, heads, head_dim] and their log-sum-exp in base 2 [partials, heads];
    float32."""

    values: Tensor
    sums: Tensor

    @classmethod
    def empty(cls, partials: int, heads: int, head_dim: int, device: torch.device) -> States:
        values = torch.empty(partials, heads, head_dim, dtype=torch.float32, device=device)
        return cls(values, torch.empty(partials, heads, dtype=torch.float32, device=device))


class Shape(NamedTuple):
    """How the rows of a program are used: query heads per key head, and rows of narrow and of wide tiles.
    Wide heads (latent attention: one key head of 576 numbers for 128 query heads) leave space for few."""

    heads: int
    narrow: int
    wide: int

    @classmethod
    def of(cls, group: int, head_dim: int) -> Shape:
        heads = group if head_dim <= 256 else min(group, 16)
        least = max(16, power_of_two(heads))
        return cls(heads, least, least if head_dim > 256 else max(64, least))


class Launch(NamedTuple):
    """Keys per iteration, warps, and the number of load stages."""

    keys: int
    warps: int
    stages: int

    @classmethod
    def of(cls, rows: int, head_dim: int, dtype: torch.dtype) -> Launch:
        """The settings that are fastest on an H100 and fit into its shared memory."""
        block = max(16, power_of_two(head_dim))
        if dtype == torch.float32:  # no tensor cores: products are unrolled, and slow to compile
            return cls(32 if rows <= 16 else 16, 8 if rows * block >= 1 << 13 else 4, 1)
        keys = 64 if block <= 128 else max(16, 8192 // block)
        if rows == 16 and block <= 128:  # decoding one token: only memory bandwidth counts
            keys = 128
        return cls(keys, 8 if rows * block >= 1 << 14 else 4, 2 if block <= 256 else 1)


def attend_tiles(
    qkv: Tensor, pool: Tensor, tiles: Tiles, form: Form, out: Tensor, states: States, rows: int
) -> None:
    """qkv [tokens, heads + 2 * kv_heads, head_dim], query heads first; pool [slots, 2 * kv_heads, head_dim],
    key heads first; the numbers of a token are contiguous in both. Fills out [tokens, heads, head_dim] or
    `states`, as each tile's fields say. rows: of these tiles, narrow or wide as in Shape; a tile has at most
    rows / Shape.heads queries."""
    kv_heads, dim = pool.shape[1] // 2, pool.shape[2]
    heads = qkv.shape[1] - 2 * kv_heads
    part = Shape.of(heads // kv_heads, dim).heads
    launch = Launch.of(rows, dim, qkv.dtype)
    _attend[(tiles.fields.shape[0], kv_heads * triton.cdiv(heads // kv_heads, part))](
        qkv, pool, out, states.values, states.sums, form.sinks, *tiles,
        qkv.stride(0), pool.stride(0), form.scale, form.softcap or 1.0, form.window or 0,
        HEADS=heads, KV_HEADS=kv_heads, PART=part, DIM=dim, ROWS=rows,
        KEYS=launch.keys, BLOCK_D=max(16, power_of_two(dim)),
        CAPPED=form.softcap is not None, WINDOWED=form.window is not None, SINKS=form.sinks is not None,
        WIDEN=INTERPRETED or qkv.dtype == torch.float32,
        num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip


@triton.jit
def _see(
    most, total, acc, q, at, pool, slots, start, key_count, first_position, slot_stride, scale, softcap,
    window, KV_HEADS: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr, BLOCK_D: tl.constexpr,
    CAPPED: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the keys from `start` on to the online softmax: the greatest score, the sum of weights and the
    weighted values of each row."""
    key, d = start + tl.arange(0, KEYS), tl.arange(0, BLOCK_D)
    there, in_head = key < key_count, d < DIM
    if MASKED:
        slot = tl.load(slots + key, mask=there, other=0).to(tl.int64)
    else:
        slot = tl.load(slots + key).to(tl.int64)
    row_pointer = pool + slot * slot_stride
    k_pointer, v_pointer = (
        row_pointer[None, :] + d[:, None],
        row_pointer[:, None] + KV_HEADS * DIM + d[None, :],
    )
    if MASKED or DIM < BLOCK_D:
        k = tl.load(k_pointer, mask=there[None, :] & in_head[:, None], other=0.0)
        v = tl.load(v_pointer, mask=there[:, None] & in_head[None, :], other=0.0)
    else:
        k, v = tl.load(k_pointer), tl.load(v_pointer)
    scores = tl.dot(q, k.to(q.dtype), input_precision="ieee")
    if CAPPED:
        # tanh; exact at both ends, where exp gives 0 or infinity.
        scores = softcap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * scale * scores / softcap)))
        scores *= 1.4426950408889634
    else:
        scores *= scale * 1.4426950408889634
    if MASKED:
        of = first_position + key
        seen = there[None, :] & (of[None, :] <= at[:, None])
        if WINDOWED:
            seen = seen & (of[None, :] > at[:, None] - window)
        scores = tl.where(seen, scores, -float("inf"))
    now = tl.maximum(most, tl.max(scores, 1))
    # A row that has seen no key yet: any finite number will do.
    base = tl.where(now == -float("inf"), 0.0, now) if MASKED else now
    weights = tl.exp2(scores - base[:, None])
    kept = tl.exp2(most - base)
    total = total * kept + tl.sum(weights, 1)
    acc = acc * kept[:, None] + tl.dot(weights.to(q.dtype), v.to(q.dtype), input_precision="ieee")
    return now, total, acc


@triton.jit
def _attend(
    qkv, pool, out, values, sums, sinks, fields, queries, positions, slots,
    qkv_stride, slot_stride, scale, softcap, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PART: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, BLOCK_D: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
    SINKS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    GROUP: tl.constexpr = HEADS // KV_HEADS
    tile = fields + tl.program_id(0) * 6
    PARTS: tl.constexpr = (GROUP + PART - 1) // PART
    kv_head, first_head = tl.program_id(1) // PARTS, tl.program_id(1) % PARTS * PART
    count = tl.load(tile + 1)
    if count > 0:
        first_query, first_key, key_count = tl.load(tile), tl.load(tile + 2), tl.load(tile + 3)
        first_position, target = tl.load(tile + 4), tl.load(tile + 5)
        row, d = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
        mine, in_group = row // PART, first_head + row % PART
        head = kv_head * GROUP + in_group
        real, in_head = (mine < count) & (in_group < GROUP), d < DIM
        token = tl.load(queries + first_query + mine, mask=real, other=0).to(tl.int64)
        at = tl.load(positions + token, mask=real, other=0)
        q_pointer = qkv + token[:, None] * qkv_stride + (head * DIM)[:, None] + d[None, :]
        q = tl.load(q_pointer, mask=real[:, None] & in_head[None, :], other=0.0)
        if WIDEN:
            q = q.to(tl.float32)
        most = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
        pool += kv_head * DIM
        first_slot = slots + first_key
        whole = 0
        if ROWS > 16 and not (WINDOWED or WIDEN):
            # Up to `whole` every row sees every key: no mask is needed.
            lowest = tl.min(tl.where(real, at, 2147483647), 0)
            whole = tl.maximum(tl.minimum(lowest + 1 - first_position, key_count), 0) // KEYS * KEYS
            for start in range(0, whole, KEYS):
                most, total, acc = _see(
                    most, total, acc, q, at, pool, first_slot, start, key_count, first_position, slot_stride,
                    scale, softcap, window, KV_HEADS, DIM, KEYS, BLOCK_D, CAPPED, WINDOWED, False,
                )  # fmt: skip
        for start in range(whole, key_count, KEYS):
            most, total, acc = _see(
                most, total, acc, q, at, pool, first_slot, start, key_count, first_position, slot_stride,
                scale, softcap, window, KV_HEADS, DIM, KEYS, BLOCK_D, CAPPED, WINDOWED, True,
            )  # fmt: skip
        if SINKS and target < 0:
            sink = tl.load(sinks + head, mask=real, other=0.0) * 1.4426950408889634
            now = tl.maximum(most, sink)
            kept = tl.exp2(most - now)
            total, acc, most = total * kept + tl.exp2(sink - now), acc * kept[:, None], now
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        write = real[:, None] & in_head[None, :]
        if target < 0:
            result = out + (token * HEADS + head)[:, None] * DIM + d[None, :]
            tl.store(result, acc.to(out.dtype.element_ty), mask=write)
        else:
            state = (target + mine).to(tl.int64) * HEADS + head
            tl.store(values + state[:, None] * DIM + d[None, :], acc, mask=write)
            tl.store(sums + state, most + tl.log2(total), mask=real)


def plain_attend_tiles(
    qkv: Tensor, pool: Tensor, tiles: Tiles, form: Form, out: Tensor, states: States, rows: int
) -> None:
    """Tile by tile, in float32."""
    kv_heads = pool.shape[1] // 2
    heads = qkv.shape[1] - 2 * kv_heads
    for first, count, first_key, keys, position, target in tiles.fields.tolist():
        if not count:
            continue
        tokens = tiles.queries[first : first + count].long()
        kv = pool[tiles.slots[first_key : first_key + keys].long()].float()
        k, v = kv.repeat_interleave(heads // kv_heads, 1).chunk(2, 1)
        scores = torch.einsum("qhd,khd->qhk", qkv[tokens, :heads].float(), k) * form.scale
        if form.softcap is not None:
            scores = form.softcap * torch.tanh(scores / form.softcap)
        at = tiles.positions[tokens].long()[:, None]
        of = position + torch.arange(keys, device=qkv.device)[None]
        seen = of <= at
        if form.window is not None:
            seen &= of > at - form.window
        scores = scores.masked_fill(~seen[:, None], -math.inf)
        if form.sinks is not None and target < 0:
            extra = form.sinks[None, :, None].expand(count, -1, 1)
            total = torch.cat((scores, extra), -1).logsumexp(-1, keepdim=True)
        else:
            total = scores.logsumexp(-1, keepdim=True)
        result = torch.einsum("qhk,khd->qhd", (scores - total).exp().nan_to_num(0.0), v)
        if target < 0:
            out[tokens] = result.to(out.dtype)
        else:
            states.values[target : target + count] = result
            states.sums[target : target + count] = total.squeeze(-1) * LOG2_E
