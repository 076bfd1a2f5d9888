"""The activation of a gated feed-forward (arXiv 2002.05202): act(gate) * up, gate and up side by side."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def silu_mul(gate_up: Tensor) -> Tensor:
    """[rows, 2 * size], gate then up, rows contiguous -> silu(gate) * up [rows, size]."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    _silu_mul[(rows, triton.cdiv(size, BLOCK))](gate_up, out, gate_up.stride(0), size, BLOCK=BLOCK)
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
