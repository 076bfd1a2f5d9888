"""Feed-forward networks: gated ones (GLU variants, arXiv 2002.05202) and plain ones; activations by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.kernels.native.layers import takes
from runtime.kernels.table import kernel
from runtime.layers.linear import Linear

Activation: TypeAlias = Callable[[Tensor], Tensor]


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


ACTIVATION: dict[str, Activation] = {
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
}


FeedForward: TypeAlias = Callable[[Tensor], Tensor]
"""[tokens, hidden] -> [tokens, hidden]."""


class GatedMLP:
    """down(activation(gate(x)) * up(x)), with gate and up in one product. `gate_up`: both projections, gate
    first."""

    __slots__ = ("_activation", "down", "gate_up", "silu")

    def __init__(self, gate_up: Linear, down: Linear, activation: str = "silu") -> None:
        self.gate_up, self.down, self._activation = gate_up, down, ACTIVATION[activation]
        self.silu = activation == "silu"

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.activate(self.gate_up(x)))

    def activate(self, both: Tensor) -> Tensor:
        """[tokens, 2 * ffn], gate first -> [tokens, ffn]."""
        fused = kernel("silu_mul", both.device) if self.silu else None
        if fused is not None and both.stride(-1) == 1 and takes(both, both.shape[-1] // 2):
            result: Tensor = fused(both)
            return result
        gate, up = both.chunk(2, -1)
        return self._activation(gate).mul_(up)


class PlainMLP:
    """down(activation(up(x)))."""

    __slots__ = ("_activation", "down", "up")

    def __init__(self, up: Linear, down: Linear, activation: str) -> None:
        self.up, self.down, self._activation = up, down, ACTIVATION[activation]

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self._activation(self.up(x)))
