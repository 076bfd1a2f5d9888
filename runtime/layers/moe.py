"""Mixture of experts (arXiv 1701.06538): a router, experts that each compute some of the tokens, and one that
computes all of them.

Tokens are sorted by expert, so that each expert computes its tokens in one product; the work in Python is
proportional to the experts that a pass uses, not to its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.config.parts.experts import Clamp, RouterSpec
from runtime.layers.linear import Linear
from runtime.layers.mlp import FeedForward
from runtime.parallel import Group


class Router:
    """Chooses experts. Computed in float32 whatever the input's type: a rounded score may choose another
    expert.

    weight: [experts, hidden] float32. bias, correction: [experts] float32 or None.
    """

    __slots__ = ("_bias", "_correction", "_spec", "_weight")

    def __init__(
        self, spec: RouterSpec, weight: Tensor, bias: Tensor | None, correction: Tensor | None
    ) -> None:
        self._spec, self._weight, self._bias, self._correction = spec, weight, bias, correction

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [tokens, hidden] -> experts [tokens, chosen] int64 and their weights, float32."""
        spec = self._spec
        logits = F.linear(x.float(), self._weight, self._bias)
        scores = logits.softmax(-1) if spec.scores == "softmax" else logits.sigmoid()
        ranked = scores if self._correction is None else scores + self._correction
        if spec.groups > 1:
            ranked = self._best_groups(ranked)
        experts = ranked.topk(spec.chosen, -1).indices
        weights = scores.gather(-1, experts)
        if spec.renormalise:
            weights = weights / (weights.sum(-1, keepdim=True) + spec.floor)
        return experts, weights if spec.scale == 1.0 else weights * spec.scale

    def _best_groups(self, ranked: Tensor) -> Tensor:
        """ranked [tokens, experts] with -inf outside of each token's best groups."""
        spec = self._spec
        grouped = ranked.unflatten(-1, (spec.groups, -1))  # [tokens, groups, experts of one]
        best = grouped.amax(-1) if spec.group_score == "best" else grouped.topk(2, -1).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool)
        kept.scatter_(-1, best.topk(spec.groups_chosen, -1).indices, True)
        return grouped.masked_fill(~kept[..., None], float("-inf")).flatten(-2)


class ClampedMLP:
    """A gated feed-forward whose factors are clamped: see Clamp. `gate_up`: both projections, gate first."""

    __slots__ = ("_clamp", "down", "gate_up")

    def __init__(self, gate_up: Linear, down: Linear, clamp: Clamp) -> None:
        self.gate_up, self.down, self._clamp = gate_up, down, clamp

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        gate, up = gate.clamp(max=self._clamp.limit), up.clamp(-self._clamp.limit, self._clamp.limit)
        return self.down((gate * self._clamp.gain).sigmoid_().mul_(gate).mul_(up + 1))


class SharedExpert:
    """mlp(x), times sigmoid(x gate^T) where there is a `gate` [1, hidden] float32."""

    __slots__ = ("_gate", "_mlp")

    def __init__(self, mlp: FeedForward, gate: Tensor | None) -> None:
        self._mlp, self._gate = mlp, gate

    def __call__(self, x: Tensor) -> Tensor:
        y = self._mlp(x)
        if self._gate is None:
            return y
        return y.mul_(F.linear(x.float(), self._gate).sigmoid_().to(y.dtype))


class Experts:
    """A layer's feed-forward. Of each expert, the shared one too, a rank holds its part of the width; the
    ranks' results are added up once."""

    __slots__ = ("_experts", "_group", "_router", "_shared", "_weighs_inputs")

    def __init__(
        self,
        router: Router,
        experts: Sequence[FeedForward],
        shared: FeedForward | None,
        group: Group,
        *,
        weighs_inputs: bool = False,
    ) -> None:
        self._router, self._experts, self._shared = router, tuple(experts), shared
        self._group, self._weighs_inputs = group, weighs_inputs

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]"""
        y = self._routed(x)
        if self._shared is not None:
            y = y.add_(self._shared(x))
        return self._group.sum_(y)

    def _routed(self, x: Tensor) -> Tensor:
        chosen, weights = self._router(x)
        tokens, each = chosen.shape
        weights = weights.to(x.dtype)
        flat = chosen.flatten()
        order = flat.argsort(stable=True)  # places in [tokens, each], by expert
        given = x.index_select(0, order // each)
        if self._weighs_inputs:
            given *= weights.flatten()[order, None]
        made = torch.empty_like(given)
        first = 0
        for expert, count in enumerate(torch.bincount(flat, minlength=len(self._experts)).tolist()):
            if count:
                made[first : first + count] = self._experts[expert](given[first : first + count])
                first += count
        parts = torch.empty_like(made)
        parts[order] = made
        parts = parts.view(tokens, each, x.shape[-1])
        if self._weighs_inputs:
            return parts.sum(1)
        return (weights[:, None] @ parts).squeeze(1)
