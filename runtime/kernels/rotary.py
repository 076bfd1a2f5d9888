"""Rotary position embedding (arXiv 2104.09864) of query and key heads, in place."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.device import power_of_two, warps


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate the first `turned` dimensions of each head in place; the first half of them pairs with the
    second.

    x [tokens, heads, head_dim], contiguous per token; cos and sin [tokens, 1, turned] in any dtype. The first
    half of `sin` is already negated, as in runtime.layers.rope.
    """
    turned = cos.shape[-1]
    heads, dim = x.shape[1:]
    half = power_of_two(turned // 2)
    block = power_of_two(heads)
    _rotate[(x.shape[0],)](
        x, cos, sin, x.stride(0), cos.stride(0), heads, dim, turned // 2,
        BLOCK_H=block, BLOCK_D=half, num_warps=warps(block * half),
    )  # fmt: skip


def plain_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    part = x[..., : cos.shape[-1]]
    wide = part.float()
    swapped = wide.roll(part.shape[-1] // 2, -1)
    part.copy_(wide * cos.float() + swapped * sin.float())


@triton.jit
def _rotate(
    x, cos, sin, x_stride, angle_stride, heads, dim, half, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    head, at = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_D)[None, :]
    in_half = at < half
    real = (head < heads) & in_half
    first = x + token * x_stride + head * dim + at
    low = tl.load(first, mask=real, other=0.0).to(tl.float32)
    high = tl.load(first + half, mask=real, other=0.0).to(tl.float32)
    angle = token * angle_stride + at
    cos_low = tl.load(cos + angle, mask=in_half, other=0.0).to(tl.float32)
    sin_low = tl.load(sin + angle, mask=in_half, other=0.0).to(tl.float32)
    cos_high = tl.load(cos + angle + half, mask=in_half, other=0.0).to(tl.float32)
    sin_high = tl.load(sin + angle + half, mask=in_half, other=0.0).to(tl.float32)
    tl.store(first, (low * cos_low + high * sin_low).to(x.dtype.element_ty), mask=real)
    tl.store(first + half, (high * cos_high + low * sin_high).to(x.dtype.element_ty), mask=real)
