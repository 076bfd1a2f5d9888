"""Layer: the parts of one layer of a decoder."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from runtime.layers.latent import LatentHeads, LatentOutput
from runtime.layers.linear import Linear
from runtime.layers.mlp import FeedForward
from runtime.layers.norm import Norm


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """A norm that is None is skipped. The `_post_` norms apply to the value that is added to the residual.
    sinks [own heads] float32."""

    attention_norm: Norm | None
    qkv: Linear | LatentHeads
    qk_norm: Norm | None
    output: Linear | LatentOutput
    attention_post_norm: Norm | None
    mlp_norm: Norm | None
    mlp: FeedForward
    mlp_post_norm: Norm | None
    sinks: Tensor | None = None
