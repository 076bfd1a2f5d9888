"""Mixture of experts: each token times the matrices of its few experts, in one launch over blocks of
entries (an entry is a token at one of its experts). The device itself finds the entries of each block."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.device import INTERPRETED, shared_memory, stages
from runtime.kernels.elementwise import plain_silu_mul, silu_mul

LARGE_TILES = 160 << 10  # of shared memory: three stages of 128 rows and 256 columns


class Blocks(NamedTuple):
    """entries int32 [blocks * size]: token * top_k + the expert's index among the token's experts. The
    entries of an expert are adjacent and padded to whole blocks with -1. experts int32 [blocks]; -1 for an
    empty block."""

    entries: Tensor
    experts: Tensor

    @property
    def size(self) -> int:
        return len(self.entries) // len(self.experts)


def group_by_expert(experts: Tensor, count: int, size: int) -> Blocks:
    """Group experts [tokens, top_k], each in 0 .. count - 1, into blocks of `size` entries."""
    flat = experts.flatten().long()
    total, device = len(flat), flat.device
    blocks = triton.cdiv(total, size) + min(count, total)  # each expert has at most one partial block
    of_expert, order = flat.sort(stable=True)
    counts = torch.zeros(count, dtype=torch.int64, device=device).scatter_add_(0, flat, torch.ones_like(flat))
    padded = (counts + size - 1) // size * size
    ends = padded.cumsum(0)
    shift = (ends - padded) - (counts.cumsum(0) - counts)
    position = torch.arange(total, device=device) + shift[of_expert]
    entries = torch.full((blocks * size,), -1, dtype=torch.int32, device=device)
    entries.scatter_(0, position, order.to(torch.int32))
    starts = torch.arange(blocks, device=device) * size
    block_experts = torch.searchsorted(ends, starts, right=True)
    return Blocks(entries, torch.where(block_experts < count, block_experts, -1).to(torch.int32))


def grouped_matmul(
    x: Tensor, weight: Tensor, blocks: Blocks, top_k: int, scales: Tensor | None = None
) -> Tensor:
    """x [tokens, inputs], or with top_k = 1 one row per entry [tokens * top_k, inputs]; rows contiguous.
    weight [experts, outputs, inputs], contiguous. scales [entries] float32 multiply the results. Returns
    [entries, outputs]."""
    outputs, inputs = weight.shape[1:]
    out = torch.empty(x.shape[0] * top_k, outputs, dtype=x.dtype, device=x.device)
    columns, depth, warps = _launch(blocks.size, outputs, inputs)
    loads = (blocks.size + columns) * depth * x.element_size()
    _grouped_matmul[(len(blocks.experts), triton.cdiv(outputs, columns))](
        x, weight, blocks.entries, blocks.experts, scales, out, x.stride(0), top_k, outputs, inputs,
        ROWS=blocks.size, COLUMNS=columns, DEPTH=depth, SCALED=scales is not None,
        WIDEN=INTERPRETED or x.dtype == torch.float32, num_warps=warps,
        num_stages=stages(3, loads, 0, x.device),
    )  # fmt: skip
    return out


def _launch(rows: int, outputs: int, inputs: int) -> tuple[int, int, int]:
    """Columns and depth of a tile with `rows` rows, and warps."""
    if outputs < 128 or inputs < 128:
        return 32, 64 if inputs >= 64 else 16, 4
    if rows <= 16:
        return 64, 128, 4
    return (256 if rows > 64 and outputs >= 256 else 128), 64, 8


def _block(rows: int, shared: int) -> int:
    """The block size if an expert has `rows` rows on average; padding of a block is computed for nothing.
    shared: bytes of shared memory of a thread block, which limit the tiles."""
    return min(128 if shared >= LARGE_TILES else 64, max(16, triton.next_power_of_2(rows)))


def plain_grouped_matmul(
    x: Tensor, weight: Tensor, blocks: Blocks, top_k: int, scales: Tensor | None = None
) -> Tensor:
    out = torch.empty(x.shape[0] * top_k, weight.shape[1], dtype=x.dtype, device=x.device)
    for entries, expert in zip(blocks.entries.view(-1, blocks.size), blocks.experts.tolist()):
        mine = entries[entries >= 0].long()
        product = x[mine // top_k].float() @ weight[expert].float().T
        out[mine] = (product if scales is None else product * scales[mine, None]).to(x.dtype)
    return out


Biases: TypeAlias = tuple[Tensor | None, Tensor | None]
"""The biases of gate_up [experts, 2 * ffn] and of down [experts, hidden], or None."""


def fused_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    experts: Tensor,
    weights: Tensor,
    activate: Callable[[Tensor], Tensor] = silu_mul,
    biases: Biases = (None, None),
) -> Tensor:
    """The weighted sum of each token's experts, [tokens, hidden].

    x [tokens, hidden]; gate_up [experts, 2 * ffn, hidden], gate first; down [experts, hidden, ffn]; experts
    and weights [tokens, top_k]. activate: [entries, 2 * ffn] -> [entries, ffn].
    """
    tokens, top_k = experts.shape
    if not tokens:  # a pass without outputs
        return torch.empty_like(x)
    blocks = group_by_expert(
        experts, gate_up.shape[0], _block(tokens * top_k // gate_up.shape[0], shared_memory(x.device))
    )
    of_entry, scales = experts.flatten(), weights.flatten().float()
    both = grouped_matmul(x, gate_up, blocks, top_k)
    if biases[0] is not None:
        both += biases[0][of_entry]
    result = grouped_matmul(activate(both), down, blocks, 1, scales)
    if biases[1] is not None:
        result += biases[1][of_entry] * scales[:, None].to(result.dtype)
    return result.view(tokens, top_k, x.shape[1]).sum(1)


def plain_fused_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    experts: Tensor,
    weights: Tensor,
    activate: Callable[[Tensor], Tensor] = plain_silu_mul,
    biases: Biases = (None, None),
) -> Tensor:
    """Token by token."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for token, row in enumerate(x.float()):
        for expert, weight in zip(experts[token].tolist(), weights[token].float()):
            both = row[None] @ gate_up[expert].float().T
            if biases[0] is not None:
                both += biases[0][expert].float()
            result = (activate(both) @ down[expert].float().T)[0]
            if biases[1] is not None:
                result += biases[1][expert].float()
            out[token] += weight * result
    return out.to(x.dtype)


@triton.jit
def _grouped_matmul(
    x, weight, entries, experts, scales, out, x_stride, top_k, outputs, inputs,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SCALED: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    expert = tl.load(experts + block).to(tl.int64)
    if expert >= 0:
        entry = tl.load(entries + block * ROWS + tl.arange(0, ROWS))
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        real, in_outputs = entry >= 0, column < outputs
        token = tl.maximum(entry, 0).to(tl.int64) // top_k
        matrix = weight + expert * outputs * inputs
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for first in range(0, inputs, DEPTH):
            depth = first + tl.arange(0, DEPTH)
            inside = depth < inputs
            left = tl.load(
                x + token[:, None] * x_stride + depth[None, :],
                mask=real[:, None] & inside[None, :],
                other=0.0,
            )
            right = tl.load(
                matrix + column[None, :].to(tl.int64) * inputs + depth[:, None],
                mask=inside[:, None] & in_outputs[None, :], other=0.0,
            )  # fmt: skip
            if WIDEN:
                left, right = left.to(tl.float32), right.to(tl.float32)
            acc += tl.dot(left, right, input_precision="ieee")
        if SCALED:
            acc *= tl.load(scales + tl.maximum(entry, 0), mask=real, other=0.0)[:, None]
        target = out + tl.maximum(entry, 0).to(tl.int64)[:, None] * outputs + column[None, :]
        tl.store(target, acc.to(out.dtype.element_ty), mask=real[:, None] & in_outputs[None, :])
