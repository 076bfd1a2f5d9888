"""A mixture of experts: each token times the matrices of its few experts, tokens of one expert together.

The product is one launch over blocks of entries (a token at one of its experts); which entries and which
expert a block has is found on the device, without a word to the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.device import INTERPRETED, shared_memory, stages
from runtime.kernels.silu_mul import plain_silu_mul, silu_mul

LARGE_TILES = 160 << 10  # of shared memory: three stages of 128 rows and 256 columns


class Blocks(NamedTuple):
    """entries int32 [blocks * size]: token * top_k + place of the expert among the token's, those of an
    expert side by side, filled up with -1 to whole blocks; experts int32 [blocks], -1 for a block of
    none."""

    entries: Tensor
    experts: Tensor

    @property
    def size(self) -> int:
        return len(self.entries) // len(self.experts)


def group_by_expert(experts: Tensor, count: int, size: int) -> Blocks:
    """experts [tokens, top_k], each in 0 .. count - 1, in blocks of `size`."""
    flat = experts.flatten().long()
    total, device = len(flat), flat.device
    blocks = triton.cdiv(total, size) + min(count, total)  # each expert has one that is not full, at most
    of_expert, order = flat.sort(stable=True)
    counts = torch.zeros(count, dtype=torch.int64, device=device).scatter_add_(0, flat, torch.ones_like(flat))
    padded = (counts + size - 1) // size * size
    ends = padded.cumsum(0)
    shift = (ends - padded) - (counts.cumsum(0) - counts)
    place = torch.arange(total, device=device) + shift[of_expert]
    entries = torch.full((blocks * size,), -1, dtype=torch.int32, device=device)
    entries.scatter_(0, place, order.to(torch.int32))
    starts = torch.arange(blocks, device=device) * size
    found = torch.searchsorted(ends, starts, right=True)
    return Blocks(entries, torch.where(found < count, found, -1).to(torch.int32))


def grouped_matmul(
    x: Tensor, weight: Tensor, blocks: Blocks, top_k: int, scales: Tensor | None = None
) -> Tensor:
    """x [tokens, inputs], or of each entry [tokens * top_k, inputs] where top_k is 1, a row's numbers side
    by side; weight [experts, outputs, inputs] without gaps; scales [entries] float32, multiplied with the
    results. Gives [entries, outputs]."""
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
    """Columns and depth of a tile of so many rows, and warps."""
    if outputs < 128 or inputs < 128:
        return 32, 64 if inputs >= 64 else 16, 4
    if rows <= 16:
        return 64, 128, 4
    return (256 if rows > 64 and outputs >= 256 else 128), 64, 8


def _block(rows: int, shared: int) -> int:
    """The size of blocks where an expert has so many rows on average: what a block lacks is computed for
    nothing. shared: bytes that a block of threads can have, as large tiles need."""
    return min(128 if shared >= LARGE_TILES else 64, max(16, triton.next_power_of_2(rows)))


def plain_grouped_matmul(
    x: Tensor, weight: Tensor, blocks: Blocks, top_k: int, scales: Tensor | None = None
) -> Tensor:
    out = torch.empty(x.shape[0] * top_k, weight.shape[1], dtype=x.dtype, device=x.device)
    for entries, expert in zip(blocks.entries.view(-1, blocks.size), blocks.experts.tolist()):
        mine = entries[entries >= 0].long()
        made = x[mine // top_k].float() @ weight[expert].float().T
        out[mine] = (made if scales is None else made * scales[mine, None]).to(x.dtype)
    return out


Biases: TypeAlias = tuple[Tensor | None, Tensor | None]
"""Of gate_up [experts, 2 * ffn], of down [experts, hidden]; None: there is none."""


def fused_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    experts: Tensor,
    weights: Tensor,
    activate: Callable[[Tensor], Tensor] = silu_mul,
    biases: Biases = (None, None),
) -> Tensor:
    """x [tokens, hidden]; gate_up [experts, 2 * ffn, hidden], gate first; down [experts, hidden, ffn];
    experts, weights [tokens, top_k] -> the weighted sum of each token's experts [tokens, hidden].
    activate: [entries, 2 * ffn] -> [entries, ffn]."""
    tokens, top_k = experts.shape
    if not tokens:  # as in a pass of which nothing is wanted
        return torch.empty_like(x)
    blocks = group_by_expert(
        experts, gate_up.shape[0], _block(tokens * top_k // gate_up.shape[0], shared_memory(x.device))
    )
    of_entry, scales = experts.flatten(), weights.flatten().float()
    both = grouped_matmul(x, gate_up, blocks, top_k)
    if biases[0] is not None:
        both += biases[0][of_entry]
    made = grouped_matmul(activate(both), down, blocks, 1, scales)
    if biases[1] is not None:
        made += biases[1][of_entry] * scales[:, None].to(made.dtype)
    return made.view(tokens, top_k, x.shape[1]).sum(1)


def plain_fused_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    experts: Tensor,
    weights: Tensor,
    activate: Callable[[Tensor], Tensor] = plain_silu_mul,
    biases: Biases = (None, None),
) -> Tensor:
    """One token after the other."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for token, row in enumerate(x.float()):
        for expert, weight in zip(experts[token].tolist(), weights[token].float()):
            both = row[None] @ gate_up[expert].float().T
            if biases[0] is not None:
                both += biases[0][expert].float()
            made = (activate(both) @ down[expert].float().T)[0]
            if biases[1] is not None:
                made += biases[1][expert].float()
            out[token] += weight * made
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
        made = tl.zeros([ROWS, COLUMNS], tl.float32)
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
            made += tl.dot(left, right, input_precision="ieee")
        if SCALED:
            made *= tl.load(scales + tl.maximum(entry, 0), mask=real, other=0.0)[:, None]
        place = out + tl.maximum(entry, 0).to(tl.int64)[:, None] * outputs + column[None, :]
        tl.store(place, made.to(out.dtype.element_ty), mask=real[:, None] & in_outputs[None, :])
