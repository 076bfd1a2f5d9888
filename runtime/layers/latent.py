"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), computed on the latents: q (K c) as (q K)
c, and the sum of w V c over tokens as V times the sum of w c. So attention sees one key head, the latent
and the rotated key, that many query heads read."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.config.parts.latent import LatentSpec
from runtime.layers.linear import Linear
from runtime.layers.norm import RMSNorm

NORM_EPS = 1e-6  # of the latents' norms, whatever eps the model's other norms have


class LatentHeads:
    """The projections before attention, for the rank's query heads.

    down: hidden state -> latent and rotary key [rank + turned], after the query's latent if there is one,
    else after the queries themselves [heads * query].
    query_norm, query_up: the query's latent -> [heads * query], or None.
    keys: [heads, plain, rank].
    """

    __slots__ = ("_down", "_keys", "_norm", "_query_norm", "_query_up", "_spec")

    def __init__(
        self,
        spec: LatentSpec,
        down: Linear,
        norm: RMSNorm,
        query_norm: RMSNorm | None,
        query_up: Linear | None,
        keys: Tensor,
    ) -> None:
        self._spec, self._down, self._norm, self._keys = spec, down, norm, keys
        self._query_norm, self._query_up = query_norm, query_up

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] -> [tokens, (heads + 2) * (turned + rank)]: queries, one key and one value, as
        attention takes them. The first `turned` numbers of queries and keys are not rotated yet; those of the
        value are zeros."""
        spec = self._spec
        projected = self._down(x)
        queries, latent, turned = projected.split(
            (projected.shape[-1] - spec.rank - spec.turned, spec.rank, spec.turned), -1
        )
        if self._query_norm is not None and self._query_up is not None:
            queries = self._query_up(self._query_norm(queries))
        queries = queries.unflatten(-1, (self._keys.shape[0], spec.query))
        plain = torch.bmm(queries[..., : spec.plain].transpose(0, 1), self._keys).transpose(0, 1)
        latent = self._norm(latent)[:, None]
        key, value = torch.cat((turned[:, None], latent), -1), F.pad(latent, (spec.turned, 0))
        heads = torch.cat((queries[..., spec.plain :], plain), -1)
        return torch.cat((heads, key, value), 1).flatten(1)


class LatentOutput:
    """The projections after attention. values: [heads, rank, value]. output: [heads * value] -> hidden."""

    __slots__ = ("_output", "_spec", "_values")

    def __init__(self, spec: LatentSpec, values: Tensor, output: Linear) -> None:
        self._spec, self._values, self._output = spec, values, output

    def __call__(self, attended: Tensor) -> Tensor:
        """attended [tokens, heads * (turned + rank)] -> [tokens, hidden]."""
        heads = attended.unflatten(-1, (self._values.shape[0], self._spec.kept))
        summed = heads[..., self._spec.turned :].transpose(0, 1)
        return self._output(torch.bmm(summed, self._values).transpose(0, 1).flatten(1))
