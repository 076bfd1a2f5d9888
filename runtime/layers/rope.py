"""Rotary position embedding (arXiv 2104.09864) with the scalings of RopeSpec.

Angles are computed in float32 for the positions of the step, so there is no table that grows with the
context.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from runtime.config.model import RopeSpec
from runtime.kernels.native.layers import takes
from runtime.kernels.native.library import DIM_STEP
from runtime.kernels.table import kernel


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """[head_dim / 2] float32: the angle per position of each pair of dimensions."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / (rope.theta**exponents)
    match rope.kind:
        case "default" | "dynamic":
            return plain
        case "linear":
            return plain / rope.factor
        case "llama3":
            return _llama3(plain, rope)
        case "yarn":
            return _yarn(plain, rope, head_dim)
        case "longrope":
            return plain / torch.tensor(rope.factors, dtype=torch.float32)
        case _:
            raise ValueError(f"unknown rope kind {rope.kind!r}")


def _llama3(plain: Tensor, rope: RopeSpec) -> Tensor:
    # Pairs with few rotations within the trained length are stretched, those with many are kept.
    turns = rope.original_positions * plain / (2 * math.pi)
    span = max(rope.high_freq_factor - rope.low_freq_factor, 1e-9)  # if both are equal: a step
    keep = ((turns - rope.low_freq_factor) / span).clamp(0.0, 1.0)
    return (1 - keep) * plain / rope.factor + keep * plain


def _yarn(plain: Tensor, rope: RopeSpec, head_dim: int) -> Tensor:
    def dimension(turns: float) -> float:
        # The (fractional) index of the pair with this many rotations within the trained length.
        stretched = rope.original_positions / (turns * 2 * math.pi)
        return head_dim * math.log(stretched) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = max(high - low, 0.001)
    stretch = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / span).clamp(0.0, 1.0)
    return plain / rope.factor * stretch + plain * (1 - stretch)


class Rotary:
    """Rotates queries and keys. `angles` is computed once per step, `turn_` once per layer."""

    __slots__ = ("_axes", "_dims", "_frequencies", "_kernel", "_neighbours", "_scale", "_whole")

    def __init__(self, rope: RopeSpec, head_dim: int, device: torch.device) -> None:
        self._dims = rope.dims or head_dim
        self._whole = self._dims == head_dim
        self._frequencies = inverse_frequencies(rope, self._dims).to(device)
        self._scale, self._neighbours = rope.attention_factor, rope.pairs == "neighbours"
        axes = [axis for axis, count in enumerate(rope.sections) for _ in range(count)]
        self._axes = torch.tensor(axes, dtype=torch.int64, device=device)
        self._kernel = None if self._neighbours else kernel("rotate", device)

    @property
    def turned(self) -> int:
        """How many numbers of a head the kernel rotates; 0 if it cannot be used."""
        return self._dims if self._kernel is not None and self._dims % (2 * DIM_STEP) == 0 else 0

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions [tokens], or [3, tokens] with time, row and column -> cos and signed sin, each [tokens,
        1, rotated dimensions] in `dtype`."""
        if positions.dim() == 2:
            angle = positions.float()[self._axes].T * self._frequencies
        else:
            angle = positions.float()[:, None] * self._frequencies
        cos, sin = angle.cos() * self._scale, angle.sin() * self._scale
        if self._neighbours:
            cos, sin = cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)
        else:
            cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return cos[:, None].to(dtype), sin[:, None].to(dtype)

    def turn_(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate x [tokens, heads, head_dim] in place."""
        whole = x.stride(2) == 1 and x.stride(1) == x.shape[2]
        if self._kernel is not None and whole and takes(x, self._dims // 2) and cos.dtype == x.dtype:
            self._kernel(x, cos, sin)
            return x
        part = x if self._whole else x[..., : self._dims]
        if self._neighbours:
            swapped = part.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        else:
            swapped = part.roll(self._dims // 2, -1)
        part.mul_(cos).addcmul_(swapped, sin)
        return x
