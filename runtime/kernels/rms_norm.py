"""RMS norm (arXiv 1910.07467) of rows, fused with the addition of the residual before it: a row is read once
and written twice, instead of three reads and two writes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.device import power_of_two, warps


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
