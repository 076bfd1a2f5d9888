"""Write new keys and values of one layer into their slots of the pool, and move them between slots."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.device import power_of_two, warps


def store_kv(kv: Tensor, pool: Tensor, slots: Tensor, slot_indices: Tensor) -> None:
    """Write kv [tokens, heads, head_dim] into pool [slots, heads, head_dim].

    The numbers of a token are contiguous in both. The pool may have a dtype of fewer bits. Token t goes to
    slot slots[slot_indices[t]], or nowhere if slot_indices[t] < 0. `slots` and `slot_indices` are int32.
    """
    size = kv.shape[1] * kv.shape[2]
    block = power_of_two(size)
    _store[(kv.shape[0],)](
        kv, pool, slots, slot_indices, kv.stride(0), pool.stride(0), size, BLOCK=block, num_warps=warps(block)
    )


def plain_store_kv(kv: Tensor, pool: Tensor, slots: Tensor, slot_indices: Tensor) -> None:
    real = slot_indices >= 0
    pool[slots[slot_indices[real].long()].long()] = kv[real].to(pool.dtype)


def move_kv(pool: Tensor, sources: Tensor, targets: Tensor) -> None:
    """In all layers, move slot sources[i] to slot targets[i].

    pool [layers, slots, ...], the numbers of a token contiguous; sources and targets int32, all of them
    different.
    """
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
def _store(kv, pool, slots, slot_indices, kv_stride, slot_stride, size, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    slot_index = tl.load(slot_indices + token)
    if slot_index >= 0:
        slot = tl.load(slots + slot_index).to(tl.int64)
        at = tl.arange(0, BLOCK)
        numbers = tl.load(kv + token * kv_stride + at, mask=at < size, other=0.0)
        tl.store(pool + slot * slot_stride + at, numbers.to(pool.dtype.element_ty), mask=at < size)
