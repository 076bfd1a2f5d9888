"""Norms, computed in float32 whatever the input's dtype."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.kernels.native.layers import takes
from runtime.kernels.native.library import DIM_STEP, TYPES
from runtime.kernels.table import kernel
from runtime.parallel import Group

Norm: TypeAlias = Callable[[Tensor], Tensor]
"""The result has the input's shape and dtype."""


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467). `weight` [..., size] is
    broadcast against the input's last dimensions. A float32 weight is applied before the result is rounded to
    the input's dtype, another one after.

    Computed as x / hypot(|x|, sqrt(size * eps)) * (weight * sqrt(size)): the same number in fewer operations.
    """

    __slots__ = ("_floor", "_kernel", "_scale", "eps", "weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        size = weight.shape[-1]
        self.weight, self.eps = weight, eps
        self._kernel = kernel("rms_norm", weight.device) if weight.is_contiguous() else None
        self._scale = weight * math.sqrt(size) if weight.dtype == torch.float32 else None
        self._floor = torch.tensor(math.sqrt(size * eps), dtype=torch.float32, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        if self._kernel is not None and self._fits(x) and _is_contiguous(x):
            return self._kernel(x, self.weight, self.eps, wide=self._wide(x))
        wide = x.float()
        length = torch.hypot(torch.linalg.vector_norm(wide, dim=-1, keepdim=True), self._floor)
        if self._scale is not None:
            normed = (wide / length).mul_(self._scale)
            return normed if x.dtype == torch.float32 else normed.to(x.dtype)
        return (wide / length * math.sqrt(x.shape[-1])).to(x.dtype) * self.weight

    def of_sum(self, x: Tensor, more: Tensor) -> Tensor:
        """Add `more` to x [tokens, size] in place; the norm of the sum."""
        if self._kernel is not None and self._fits(x) and more.stride(-1) == x.stride(-1) == 1:
            return self._kernel(more, self.weight, self.eps, x, wide=self._wide(x))
        return self(x.add_(more))

    def uses_kernel(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        """Whether the CPU kernel can norm tokens of this shape."""
        weight = self.weight
        known = weight.dtype in (dtype, torch.float32) and weight.shape == shape
        return self._kernel is not None and known and dtype in TYPES and shape[-1] % DIM_STEP == 0

    def _fits(self, x: Tensor) -> bool:
        weight = self.weight
        known = x.dtype == weight.dtype or weight.dtype == torch.float32
        return x.shape[1:] == weight.shape and known and takes(x, x.shape[-1])

    def _wide(self, x: Tensor) -> bool:
        return self.weight.dtype == torch.float32 != x.dtype


def _is_contiguous(x: Tensor) -> bool:
    """Whether the numbers of a token are contiguous."""
    return x.stride(-1) == 1 and (x.dim() < 3 or x.stride(-2) == x.shape[-1])


class LayerNorm:
    """Layer normalisation (arXiv 1607.06450) over the last dimension, in float32 whatever the input's dtype.
    `weight` [..., size] is broadcast against the input's last dimensions; `bias` [size] or None."""

    __slots__ = ("_bias", "_eps", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        self._weight, self._bias, self._eps = weight.float(), None if bias is None else bias.float(), eps

    def __call__(self, x: Tensor) -> Tensor:
        size = (x.shape[-1],)
        if self._weight.dim() == 1:
            return F.layer_norm(x.float(), size, self._weight, self._bias, self._eps).to(x.dtype)
        normed = F.layer_norm(x.float(), size, eps=self._eps).mul_(self._weight)
        return (normed if self._bias is None else normed.add_(self._bias)).to(x.dtype)


class AllHeadsNorm:
    """RMSNorm over all query heads together, and over all key heads together (OLMo 2). `weight` [own heads +
    own key heads, head_dim]. Every rank of the group has the same number of `heads` and of key heads."""

    __slots__ = ("_counts", "_eps", "_group", "_heads", "_which", "weight")

    def __init__(self, weight: Tensor, heads: int, eps: float, group: Group) -> None:
        kv_heads, size = weight.shape[0] - heads, weight.shape[1]
        self.weight, self._heads, self._eps, self._group = weight, heads, eps, group
        numbers = [heads * size * group.size, kv_heads * size * group.size]
        self._counts = torch.tensor(numbers, dtype=torch.float32, device=weight.device)
        self._which = torch.tensor([0] * heads + [1] * kv_heads, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, own heads + own key heads, head_dim]."""
        wide = x.float()
        squares = wide.square().sum(-1)
        sums = torch.stack((squares[:, : self._heads].sum(-1), squares[:, self._heads :].sum(-1)), -1)
        scale = torch.rsqrt(self._group.sum_(sums) / self._counts + self._eps)
        return (wide * scale[:, self._which, None]).to(x.dtype) * self.weight
