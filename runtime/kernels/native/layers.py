"""Calls of the library's kernels between two attentions, except products (runtime.layers.dense), with the
names and arguments of the Triton kernels. Only for types and sizes that `takes` accepts; for others the
caller uses torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from runtime.kernels.native.library import DIM_STEP, TYPES, Library, library

SHARED = 32_768
"""An operation on at least this many numbers uses several threads, as torch's operations do."""


def takes(x: Tensor, size: int) -> bool:
    """Whether the kernels can compute x, of which `size` numbers are contiguous. On GPUs always."""
    return x.device.type != "cpu" or (x.dtype in TYPES and size % DIM_STEP == 0)


def kernel(name: str) -> Callable[..., Any] | None:
    """rms_norm, rotate or silu_mul."""
    native = library() if name in _KERNELS else None
    return None if native is None else _kernel(name, native)


@functools.cache
def _kernel(name: str, native: Library) -> Callable[..., Any]:
    return functools.partial(_KERNELS[name], native)


def _threads(numbers: int) -> int:
    return torch.get_num_threads() if numbers >= SHARED else 1


def _rms_norm(
    native: Library,
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    *,
    wide: bool = False,
) -> Tensor:
    size = weight.shape[-1]
    rows = weight.numel() // size
    out = torch.empty(x.shape, dtype=x.dtype)
    to, stride = (None, 0) if residual is None else (residual.data_ptr(), residual.stride(0))
    native.rms_norm(
        x.data_ptr(), weight.data_ptr(), to, out.data_ptr(), x.shape[0], rows, size, x.stride(0), stride, eps,
        rows > 1, x.dtype == torch.bfloat16, weight.dtype == torch.bfloat16, wide, native.parallel,
        _threads(out.numel()),
    )  # fmt: skip
    return out


def _rotate(native: Library, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    tokens, heads, dim = x.shape
    native.rotate(
        x.data_ptr(), cos.data_ptr(), sin.data_ptr(), tokens, heads, dim, cos.shape[-1], x.stride(0),
        x.dtype == torch.bfloat16, native.parallel, _threads(tokens * heads * dim),
    )  # fmt: skip


def _silu_mul(native: Library, gate_up: Tensor) -> Tensor:
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    native.silu_mul(
        gate_up.data_ptr(), out.data_ptr(), rows, size, gate_up.stride(0), gate_up.dtype == torch.bfloat16,
        native.parallel, _threads(out.numel()),
    )  # fmt: skip
    return out


_KERNELS: dict[str, Callable[..., Any]] = {
    "rms_norm": _rms_norm,
    "rotate": _rotate,
    "silu_mul": _silu_mul,
}
