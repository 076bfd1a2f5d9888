"""Mixture of experts (arXiv 1701.06538): a router, experts that each compute some of the tokens, and a
shared expert that computes all of them. Tokens are sorted by expert, so that each computes its tokens in
one product."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.config.parts.experts import Clamp, RouterSpec
from runtime.layers.dense import DenseLinear
from runtime.layers.linear import Linear
from runtime.layers.mlp import FeedForward, GatedMLP
from runtime.parallel import Group

Routed: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""x [tokens, hidden], its experts [tokens, chosen] int64 and their weights, float32 -> the weighted sum of
the experts' outputs [tokens, hidden]."""


@dataclass(frozen=True, slots=True, eq=False)
class Router:
    """Chooses experts. Computed in float32 whatever the input's dtype: a rounded score might choose another
    expert.

    weight: [experts, hidden] float32. bias, correction: [experts] float32 or None.
    """

    spec: RouterSpec
    weight: Tensor
    bias: Tensor | None
    correction: Tensor | None

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [tokens, hidden] -> experts [tokens, chosen] int64 and their weights, float32."""
        spec = self.spec
        logits = F.linear(x.float(), self.weight, self.bias)
        scores = logits.softmax(-1) if spec.scores == "softmax" else logits.sigmoid()
        ranked = scores if self.correction is None else scores + self.correction
        if spec.groups > 1:
            ranked = self._best_groups(ranked)
        experts = ranked.topk(spec.chosen, -1).indices
        weights = scores.gather(-1, experts)
        if spec.renormalise:
            weights = weights / (weights.sum(-1, keepdim=True) + spec.floor)
        return experts, weights if spec.scale == 1.0 else weights * spec.scale

    def _best_groups(self, ranked: Tensor) -> Tensor:
        """ranked [tokens, experts] with -inf outside each token's best groups."""
        spec = self.spec
        grouped = ranked.unflatten(-1, (spec.groups, -1))  # [tokens, groups, experts of one]
        best = grouped.amax(-1) if spec.group_score == "best" else grouped.topk(2, -1).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool)
        kept.scatter_(-1, best.topk(spec.groups_chosen, -1).indices, True)
        return grouped.masked_fill(~kept[..., None], float("-inf")).flatten(-2)


class ClampedMLP(GatedMLP):
    """A gated feed-forward with clamped gate and up: see Clamp."""

    __slots__ = ("_clamp",)

    def __init__(self, gate_up: Linear, down: Linear, clamp: Clamp) -> None:
        super().__init__(gate_up, down)
        self._clamp = clamp

    def activate(self, both: Tensor) -> Tensor:
        gain, limit = self._clamp.gain, self._clamp.limit
        gate, up = both.chunk(2, -1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (gate * gain).sigmoid_().mul_(gate).mul_(up.add_(1))


@dataclass(frozen=True, slots=True, eq=False)
class SharedExpert:
    """mlp(x), times sigmoid(x gate^T) if there is a `gate` [1, hidden] float32."""

    mlp: FeedForward
    gate: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        y = self.mlp(x)
        if self.gate is None:
            return y
        return y.mul_(F.linear(x.float(), self.gate).sigmoid_().to(y.dtype))


class OneByOne:
    """Each expert computes its tokens in products of its own. On a GPU the host waits for the token
    counts."""

    __slots__ = ("_experts",)

    def __init__(self, experts: Iterable[FeedForward]) -> None:
        self._experts = tuple(experts)

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """See Routed."""
        tokens, each = chosen.shape
        flat = chosen.flatten()
        if tokens == 1:
            return weights.to(x.dtype) @ torch.cat([self._experts[expert](x) for expert in flat.tolist()])
        order = flat.argsort(stable=True)  # indices into [tokens, each], by expert
        inputs = x.index_select(0, order // each)
        outputs = torch.empty_like(inputs)
        first = 0
        for expert, count in enumerate(torch.bincount(flat, minlength=len(self._experts)).tolist()):
            if count:
                outputs[first : first + count] = self._experts[expert](inputs[first : first + count])
                first += count
        parts = torch.empty_like(outputs)
        parts[order] = outputs
        return (weights[:, None].to(x.dtype) @ parts.view(tokens, each, x.shape[1])).squeeze(1)


class Stacked:
    """All experts' matrices stacked, computed in two kernel launches without a synchronisation with the host.
    `run` is runtime.kernels.moe.fused_experts or its reference."""

    __slots__ = ("_activate", "_biases", "_down", "_gate_up", "_run")

    def __init__(self, experts: Iterable[GatedMLP], count: int, run: Callable[..., Tensor]) -> None:
        """Stack `count` equal experts with plain matrices. Each is copied before the next one is loaded."""
        for number, expert in enumerate(experts):
            parts = _plain(expert.gate_up), _plain(expert.down)
            if not number:
                self._run, self._activate = run, expert.activate
                self._gate_up, self._down = (_stack_like(part.weight, count) for part in parts)
                self._biases = [
                    None if part.bias is None else _stack_like(part.bias, count) for part in parts
                ]
            for part, matrices, biases in zip(parts, (self._gate_up, self._down), self._biases, strict=True):
                matrices[number] = part.weight
                if part.bias is not None and biases is not None:
                    biases[number] = part.bias

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """See Routed."""
        return self._run(x, self._gate_up, self._down, chosen, weights, self._activate, tuple(self._biases))


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """The feed-forward of a layer. A rank holds its part of the width of each expert, the shared one too; the
    ranks' results are summed once. weighs_inputs: see RouterSpec."""

    router: Router
    routed: Routed
    shared: FeedForward | None
    group: Group
    weighs_inputs: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]"""
        chosen, weights = self.router(x)
        if self.weighs_inputs:
            weighted = (x[:, None] * weights[..., None].to(x.dtype)).flatten(0, 1)
            y = self.routed(weighted, chosen.view(-1, 1), torch.ones_like(weights).view(-1, 1))
            y = y.view(*chosen.shape, x.shape[1]).sum(1)
        else:
            y = self.routed(x, chosen, weights)
        if self.shared is not None:
            y = y.add_(self.shared(x))
        return self.group.sum_(y)


def _plain(linear: Linear) -> DenseLinear:
    if not isinstance(linear, DenseLinear):
        raise TypeError(f"{type(linear).__name__} has no plain matrix")
    return linear


def _stack_like(like: Tensor, count: int) -> Tensor:
    return like.new_empty(count, *like.shape)
