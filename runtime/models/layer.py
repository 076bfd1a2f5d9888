"""Layer: the parts of one layer of a decoder; Source: what it is loaded from."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from runtime.config.family import Names
from runtime.config.model import ModelSpec
from runtime.config.shards import Shard
from runtime.layers.latent import LatentHeads, LatentOutput
from runtime.layers.linear import Linear, LinearMethod
from runtime.layers.mlp import FeedForward
from runtime.layers.norm import Norm
from runtime.layers.weights import Weights
from runtime.parallel import Group


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


@dataclass(frozen=True)
class Source:
    """method loads the matrices. If ranks share a tensor, only this rank's part is read."""

    weights: Weights
    spec: ModelSpec
    names: Names
    method: LinearMethod
    group: Group
    shard: Shard

    def part(self, local: range) -> range | None:
        """The range to read of a tensor that the ranks share; None (all) if there is one rank."""
        return local if self.group.size > 1 else None
