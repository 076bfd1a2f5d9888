"""SwiGLU feed-forward (arXiv 2002.05202): down(silu(gate(x)) * up(x)), gate and up in one product."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from runtime.layers.linear import Linear


class SwiGLU:
    """`gate_up`: both projections, gate first."""

    __slots__ = ("down", "gate_up")

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self.gate_up, self.down = gate_up, down

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate).mul_(up))
