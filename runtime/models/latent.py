"""LatentLoader: fills a layer's latent attention from a checkpoint."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.config.parts.latent import LatentSpec
from runtime.layers.latent import NORM_EPS, LatentHeads
from runtime.layers.linear import Projection
from runtime.layers.norm import RMSNorm
from runtime.models.layer import Source


class LatentLoader(Source):
    def latent_layer(self, number: int, spec: LatentSpec) -> tuple[LatentHeads, Tensor]:
        """The projections before attention, and the value matrices [own heads, rank, value] after it. Every
        rank has the latents."""
        names, local, query_norm, query_up = self.names.latent, self.shard.heads(self.spec), None, None

        def heads(name: str, each: int) -> Projection:
            part = range(local.start * each, local.stop * each)
            return Projection(name.format(layer=number), self.spec.num_heads * each, part)

        def norm(name: str, size: int) -> RMSNorm:
            return RMSNorm(self.weights.tensor(name.format(layer=number), (size,)), NORM_EPS)

        if spec.query_rank is None:
            first = heads(self.names.query, spec.query)
        else:
            first = Projection(names.query_down.format(layer=number), spec.query_rank)
            query_norm = norm(names.query_norm, spec.query_rank)
            second = (heads(names.query_up, spec.query),)
            query_up = self.method.load(self.weights, second, spec.query_rank, bias=False)
        latent = Projection(names.down.format(layer=number), spec.rank + spec.turned)
        down = self.method.load(self.weights, (first, latent), self.spec.hidden_size, bias=False)
        each = spec.plain + spec.value
        up = self._numbers(heads(names.up, each), spec.rank).unflatten(0, (len(local), each))
        keys, values = up.split((spec.plain, spec.value), 1)
        latent_norm = norm(names.norm, spec.rank)
        projections = LatentHeads(spec, down, latent_norm, query_norm, query_up, keys.contiguous())
        return projections, values.transpose(1, 2).contiguous()

    def _numbers(self, part: Projection, rank: int) -> Tensor:
        """The matrix [own outputs, rank]. A quantised one is computed as its product with each unit
        vector."""
        weights = self.weights
        if self.spec.quantization is None:
            return weights.tensor(f"{part.name}.weight", (part.outputs, rank), part.local)
        linear = self.method.of_some_tokens().load(weights, (part,), rank, bias=False)
        return linear(torch.eye(rank, dtype=weights.dtype, device=weights.device)).t()
