"""ExpertsLoader: fills a layer's mixture of experts from a checkpoint, one matrix at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from runtime.config.parts.experts import ExpertNames, ExpertsSpec
from runtime.config.shards import Shard
from runtime.kernels.table import kernel
from runtime.layers.dense import Dense
from runtime.layers.linear import Linear, LinearMethod, Projection
from runtime.layers.mlp import GatedMLP
from runtime.layers.moe import ClampedMLP, Experts, OneByOne, Router, SharedExpert, Stacked
from runtime.layers.stacked import ExpertMatrix, StackedExperts, Which
from runtime.layers.weights import Weights
from runtime.parallel import Group


@dataclass(frozen=True, slots=True)
class ExpertsLoader:
    """A rank reads its part of the width of each expert. The method loads the experts' matrices like those of
    any feed-forward; the router is small and stays in float32."""

    weights: Weights
    spec: ExpertsSpec
    names: ExpertNames
    hidden: int
    activation: str
    method: LinearMethod
    group: Group
    shard: Shard

    def layer(self, number: int) -> Experts:
        spec, names = self.spec, self.names
        named = [
            [name.format(layer=number, expert=expert) for name in (names.gate, names.up, names.down)]
            for expert in range(spec.count)
        ]
        weights = self._stacked(number, named)
        experts = (self._expert(weights, *three) for three in named)
        run = kernel("fused_experts", self.weights.device)
        plain = isinstance(self.method.of_some_tokens(), Dense)
        routed = OneByOne(experts) if run is None or not plain else Stacked(experts, spec.count, run)
        shared = self._shared(number) if spec.shared_width else None
        weighs_inputs = spec.router.weighs_inputs
        return Experts(self._router(number), routed, shared, self.group, weighs_inputs=weighs_inputs)

    def _router(self, number: int) -> Router:
        spec, name = self.spec, self.names.router.format(layer=number)
        weight = self._exact(f"{name}.weight", self.spec.count, self.hidden)
        bias = self._exact(f"{name}.bias", spec.count) if spec.router.bias else None
        correction = None
        if spec.router.correction:
            correction = self._exact(self.names.correction.format(layer=number), spec.count)
        return Router(spec.router, weight, bias, correction)

    def _shared(self, number: int) -> SharedExpert:
        names = self.names
        three = [
            name.format(layer=number) for name in (names.shared_gate, names.shared_up, names.shared_down)
        ]
        both = self._projections(self.weights, self.method, three, self.spec.shared_width)
        mlp = GatedMLP(*both, self.activation)
        if not self.spec.shared_gate:
            return SharedExpert(mlp, None)
        return SharedExpert(
            mlp, self._exact(f"{names.shared_router.format(layer=number)}.weight", 1, self.hidden)
        )

    def _stacked(self, number: int, named: Sequence[Sequence[str]]) -> Weights:
        """If the checkpoint has all experts in one tensor: the weights as if each expert had its own."""
        stack = self.names.stack
        if stack is None:
            return self.weights
        names = replace(
            stack, gate_up=stack.gate_up.format(layer=number), down=stack.down.format(layer=number)
        )
        kept = [f"{name}{end}" for name in (names.gate_up, names.down) for end in ("", "_blocks")]
        if not any(name in self.weights for name in kept):
            return self.weights
        whose: tuple[Which, ...] = ("gate", "up", "down")
        matrices = {
            name: ExpertMatrix(expert, which)
            for expert, three in enumerate(named)
            for name, which in zip(three, whose, strict=True)
        }
        return StackedExperts(self.weights, names, matrices, self.spec.count)

    def _expert(self, weights: Weights, gate: str, up: str, down: str) -> GatedMLP:
        method, spec = self.method.of_some_tokens(), self.spec
        gate_up, back = self._projections(weights, method, (gate, up, down), spec.width, bias=spec.bias)
        if spec.clamp is not None:
            return ClampedMLP(gate_up, back, spec.clamp)
        return GatedMLP(gate_up, back, self.activation)

    def _projections(
        self, weights: Weights, method: LinearMethod, names: Sequence[str], width: int, *, bias: bool = False
    ) -> tuple[Linear, Linear]:
        """This rank's part; the ranks' results are not summed here. Only one rank adds the bias of their
        sum."""
        local = self.shard.part(width) if self.group.size > 1 else None
        gate, up, down = names
        into = (Projection(gate, width, local), Projection(up, width, local))
        gate_up = method.load(weights, into, self.hidden, bias=bias)
        first = self.group.rank == 0
        if bias and not first:
            weights.take(f"{down}.bias", (self.hidden,))
        back = (Projection(down, self.hidden),)
        return gate_up, method.load(weights, back, width, bias=bias and first, local=local)

    def _exact(self, name: str, *shape: int) -> Tensor:
        return self.weights.take(name, shape).to(self.weights.device, torch.float32, copy=True)
