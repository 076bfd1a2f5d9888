"""A matrix times one row. Decoding one sequence reads every weight for a single product, so only memory
bandwidth counts. Libraries split such products and add the parts in a second kernel; this one streams."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def gemv(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [1, inputs], weight [outputs, inputs] with contiguous rows, bias [outputs] or None -> [1, outputs].
    Sums are in float32."""
    outputs, inputs = weight.shape
    out = torch.empty(1, outputs, dtype=x.dtype, device=x.device)
    columns, depth, warps = _launch(outputs, inputs)
    _gemv[(triton.cdiv(outputs, columns),)](
        x, weight, bias, out, weight.stride(0), outputs, inputs, BIAS=bias is not None,
        WHOLE=outputs % columns == 0 and inputs % depth == 0, COLUMNS=columns, DEPTH=depth, num_warps=warps,
    )  # fmt: skip
    return out


def _launch(outputs: int, inputs: int) -> tuple[int, int, int]:
    """Columns and depth of a block, and warps."""
    return (4, 2048, 8) if inputs >= 2048 else (8, 512, 4)  # as fast as any on an H100


def plain_gemv(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = x.float() @ weight.float().T
    return (y if bias is None else y + bias.float()).to(x.dtype)


@triton.jit
def _gemv(
    x, weight, bias, out, stride, outputs, inputs,
    BIAS: tl.constexpr, WHOLE: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    at = tl.arange(0, DEPTH)
    here = weight + column[:, None].to(tl.int64) * stride + at[None, :]
    acc = tl.zeros([COLUMNS, DEPTH], tl.float32)
    for first in range(0, inputs, DEPTH):
        if WHOLE:
            numbers, inputs_part = tl.load(here + first), tl.load(x + first + at)
        else:
            inside = first + at < inputs
            real = (column < outputs)[:, None] & inside[None, :]
            numbers = tl.load(here + first, mask=real, other=0.0)
            inputs_part = tl.load(x + first + at, mask=inside, other=0.0)
        acc += numbers.to(tl.float32) * inputs_part.to(tl.float32)[None, :]
    total = tl.sum(acc, 1)
    if BIAS:
        total += tl.load(bias + column, mask=column < outputs, other=0.0).to(tl.float32)
    tl.store(out + column, total.to(out.dtype.element_ty), mask=column < outputs)
