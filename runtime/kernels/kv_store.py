"""New keys and values of one layer into their slots of the pool, and from slot to slot."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.device import power_of_two, warps


def store_kv(kv: Tensor, pool: Tensor, slots: Tensor, places: Tensor) -> None:
    """kv [tokens, heads, head_dim], a token's numbers side by side; pool [slots, heads, head_dim], likewise;
    of another type where it keeps fewer bits. Token t goes to slot slots[places[t]]; nowhere if places[t] <
    0. `slots` and `places` int32."""
    size = kv.shape[1] * kv.shape[2]
    block = power_of_two(size)
    _store[(kv.shape[0],)](
        kv, pool, slots, places, kv.stride(0), pool.stride(0), size, BLOCK=block, num_warps=warps(block)
    )


def plain_store_kv(kv: Tensor, pool: Tensor, slots: Tensor, places: Tensor) -> None:
    real = places >= 0
    pool[slots[places[real].long()].long()] = kv[real].to(pool.dtype)


def move_kv(pool: Tensor, sources: Tensor, targets: Tensor) -> None:
    """pool [layers, slots, ...], a token's numbers side by side: of all layers, what is in slot sources[i]
    into slot targets[i]; int32, none of them twice."""
    size = pool[0, 0].numel()
    block = power_of_two(size)
    _move[(len(sources), len(pool))](
        pool, sources, targets, pool.stride(0), pool.stride(1), size, BLOCK=block, num_warps=warps(block)
    )


def plain_move_kv(pool: Tensor, sources: Tensor, targets: Tensor) -> None:
    pool[:, targets.long()] = pool[:, sources.long()]


@triton.jit
def _move(pool, sources, targets, layer_stride, slot_stride, size, BLOCK: tl.constexpr):
    source = tl.load(sources + tl.program_id(0)).to(tl.int64)
    target = tl.load(targets + tl.program_id(0)).to(tl.int64)
    at = tl.arange(0, BLOCK)
    layer = pool + tl.program_id(1).to(tl.int64) * layer_stride + at
    numbers = tl.load(layer + source * slot_stride, mask=at < size, other=0.0)
    tl.store(layer + target * slot_stride, numbers, mask=at < size)


@triton.jit
def _store(kv, pool, slots, places, kv_stride, slot_stride, size, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(places + token)
    if place >= 0:
        slot = tl.load(slots + place).to(tl.int64)
        at = tl.arange(0, BLOCK)
        numbers = tl.load(kv + token * kv_stride + at, mask=at < size, other=0.0)
        tl.store(pool + slot * slot_stride + at, numbers.to(pool.dtype.element_ty), mask=at < size)
