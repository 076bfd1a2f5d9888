"""LatentLoader: fills a layer's latent attention from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.config.parts.latent import LatentNames, LatentSpec
from runtime.layers.latent import NORM_EPS, LatentHeads
from runtime.layers.linear import LinearMethod, Projection
from runtime.layers.norm import RMSNorm
from runtime.layers.weights import Weights


@dataclass(frozen=True, slots=True)
class LatentLoader:
    """heads: of the model. local: those of this rank; every rank has the latents. query: the name of the
    query projection if queries have no latent. coded: whether the checkpoint is quantised."""

    weights: Weights
    spec: LatentSpec
    names: LatentNames
    query: str
    hidden: int
    heads: int
    local: range
    method: LinearMethod
    coded: bool

    def layer(self, number: int) -> tuple[LatentHeads, Tensor]:
        """The projections before attention, and the value matrices [own heads, rank, value] after it."""
        spec, names = self.spec, self.names
        query_norm, query_up = None, None
        if spec.query_rank is None:
            first = self._queries(self.query.format(layer=number))
        else:
            first = Projection(names.query_down.format(layer=number), spec.query_rank)
            query_norm = self._norm(names.query_norm.format(layer=number), spec.query_rank)
            second = self._queries(names.query_up.format(layer=number))
            query_up = self.method.load(self.weights, (second,), spec.query_rank, bias=False)
        latent = Projection(names.down.format(layer=number), spec.rank + spec.turned)
        down = self.method.load(self.weights, (first, latent), self.hidden, bias=False)
        norm = self._norm(names.norm.format(layer=number), spec.rank)
        each = spec.plain + spec.value
        up = Projection(
            names.up.format(layer=number),
            self.heads * each,
            range(self.local.start * each, self.local.stop * each),
        )
        keys, values = (
            self._numbers(up).unflatten(0, (len(self.local), each)).split((spec.plain, spec.value), 1)
        )
        heads = LatentHeads(spec, down, norm, query_norm, query_up, keys.contiguous())
        return heads, values.transpose(1, 2).contiguous()

    def _numbers(self, part: Projection) -> Tensor:
        """The matrix [own outputs, rank]. A quantised one is computed as its product with each unit
        vector."""
        weights, rank = self.weights, self.spec.rank
        if not self.coded:
            return weights.tensor(f"{part.name}.weight", (part.outputs, rank), part.local)
        linear = self.method.of_some_tokens().load(weights, (part,), rank, bias=False)
        return linear(torch.eye(rank, dtype=weights.dtype, device=weights.device)).t()

    def _queries(self, name: str) -> Projection:
        size = self.spec.query
        return Projection(name, self.heads * size, range(self.local.start * size, self.local.stop * size))

    def _norm(self, name: str, size: int) -> RMSNorm:
        return RMSNorm(self.weights.tensor(name, (size,)), NORM_EPS)
