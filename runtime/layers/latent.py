"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), computed on the latents: q (K c) as (q K)
c, and the sum of w V c over tokens as V times the sum of w c. So attention sees one key head, the latent
and the rotated key, that many query heads read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.config.parts.latent import LatentSpec
from runtime.layers.linear import Linear
from runtime.layers.norm import RMSNorm

NORM_EPS = 1e-6  # of the latents' norms, whatever eps the model's other norms have


@dataclass(frozen=True, slots=True, eq=False)
class LatentHeads:
    """The projections before attention, for the rank's query heads.

    down: hidden state -> latent and rotary key [rank + turned], after the query's latent if there is one,
    else after the queries themselves [heads * query].
    query_norm, query_up: the query's latent -> [heads * query], or None.
    keys: [heads, plain, rank].
    """

    spec: LatentSpec
    down: Linear
    norm: RMSNorm
    query_norm: RMSNorm | None
    query_up: Linear | None
    keys: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] -> [tokens, (heads + 2) * (turned + rank)]: queries, one key and one value, as
        attention takes them. The first `turned` numbers of queries and keys are not rotated yet; those of the
        value are zeros."""
        spec = self.spec
        projected = self.down(x)
        queries, latent, turned = projected.split(
            (projected.shape[-1] - spec.rank - spec.turned, spec.rank, spec.turned), -1
        )
        if self.query_norm is not None and self.query_up is not None:
            queries = self.query_up(self.query_norm(queries))
        queries = queries.unflatten(-1, (self.keys.shape[0], spec.query))
        plain = torch.bmm(queries[..., : spec.plain].transpose(0, 1), self.keys).transpose(0, 1)
        latent = self.norm(latent)[:, None]
        key, value = torch.cat((turned[:, None], latent), -1), F.pad(latent, (spec.turned, 0))
        heads = torch.cat((queries[..., spec.plain :], plain), -1)
        return torch.cat((heads, key, value), 1).flatten(1)


@dataclass(frozen=True, slots=True, eq=False)
class LatentOutput:
    """The projections after attention. values: [heads, rank, value]. output: [heads * value] -> hidden."""

    spec: LatentSpec
    values: Tensor
    output: Linear

    def __call__(self, attended: Tensor) -> Tensor:
        """attended [tokens, heads * (turned + rank)] -> [tokens, hidden]."""
        heads = attended.unflatten(-1, (self.values.shape[0], self.spec.kept))
        summed = heads[..., self.spec.turned :].transpose(0, 1)
        return self.output(torch.bmm(summed, self.values).transpose(0, 1).flatten(1))
