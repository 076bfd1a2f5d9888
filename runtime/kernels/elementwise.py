"""Kernels between products: RMS norm (arXiv 1910.07467), fused with the addition of the residual before it;
the rotary embedding (arXiv 2104.09864) in place; the activation of a gated feed-forward (2002.05202)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.device import power_of_two, warps

SILU_BLOCK = 1024


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, *, wide: bool = False
) -> Tensor:
    """x [tokens, ..., size] -> its norm, in x's dtype and contiguous per token.

    `weight` [..., size] has the dimensions of x after the first. x is contiguous within a token. residual
    [tokens, size]: x is added to it in place, and the norm of the sum is returned. wide: multiply with the
    weight in float32 (Gemma), else in x's dtype (Llama).
    """
    size, rows = weight.shape[-1], weight.numel() // weight.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = power_of_two(size)
    _rms_norm[(x.shape[0] * rows,)](
        x, residual, weight, out, x.stride(0), 0 if residual is None else residual.stride(0), rows, size, eps,
        ADD=residual is not None, WIDE=wide, BLOCK=block, num_warps=warps(block),
    )  # fmt: skip
    return out


def plain_rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, *, wide: bool = False
) -> Tensor:
    if residual is not None:
        x = residual.add_(x)
    numbers = x.float()
    normed = numbers * torch.rsqrt(numbers.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.float()).to(x.dtype) if wide else normed.to(x.dtype) * weight


@triton.jit
def _rms_norm(
    x, residual, weight, out, x_stride, residual_stride, rows, size, eps,
    ADD: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    token, row = (program // rows).to(tl.int64), program % rows
    at = tl.arange(0, BLOCK)
    real = at < size
    values = tl.load(x + token * x_stride + row * size + at, mask=real, other=0.0)
    if ADD:
        target = residual + token * residual_stride + at
        # Rounded to the residual's dtype, so that the norm is that of the stored numbers.
        values = (values.to(tl.float32) + tl.load(target, mask=real, other=0.0).to(tl.float32)).to(
            values.dtype
        )
        tl.store(target, values, mask=real)
    numbers = values.to(tl.float32)
    normed = numbers * tl.rsqrt(tl.sum(numbers * numbers, 0) / size + eps)
    if not WIDE:
        normed = normed.to(values.dtype).to(tl.float32)
    scaled = normed * tl.load(weight + row * size + at, mask=real, other=0.0).to(tl.float32)
    tl.store(out + (token * rows + row) * size + at, scaled.to(values.dtype), mask=real)


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


def silu_mul(gate_up: Tensor) -> Tensor:
    """[rows, 2 * size], gate then up, rows contiguous -> silu(gate) * up [rows, size]."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    _silu_mul[(rows, triton.cdiv(size, SILU_BLOCK))](gate_up, out, gate_up.stride(0), size, BLOCK=SILU_BLOCK)
    return out


def plain_silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


@triton.jit
def _silu_mul(gate_up, out, stride, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = at < size
    gate = tl.load(gate_up + row * stride + at, mask=real, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + size + at, mask=real, other=0.0).to(tl.float32)
    # The gate is rounded before the product, as with two separate operations.
    gate = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * size + at, (gate * up).to(out.dtype.element_ty), mask=real)
