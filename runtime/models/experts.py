"""ExpertsLoader: fills a layer's mixture of experts from a checkpoint, one matrix at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from runtime.config.parts.experts import ExpertsSpec
from runtime.kernels.table import kernel
from runtime.layers.dense import Dense
from runtime.layers.linear import Linear, LinearMethod, Projection
from runtime.layers.mlp import GatedMLP
from runtime.layers.moe import ClampedMLP, Experts, OneByOne, Router, SharedExpert, Stacked
from runtime.layers.stacked import ExpertMatrix, StackedExperts, Which
from runtime.layers.weights import Weights
from runtime.models.layer import Source


class ExpertsLoader(Source):
    """A rank reads its part of the width of each expert. The method loads the experts' matrices like those of
    any feed-forward; the router is small and stays in float32."""

    def experts_layer(self, number: int, spec: ExpertsSpec) -> Experts:
        names = self.names.experts
        named = [
            [name.format(layer=number, expert=expert) for name in (names.gate, names.up, names.down)]
            for expert in range(spec.count)
        ]
        weights = self._stacked(number, named)
        experts = (self._expert(weights, spec, *three) for three in named)
        run = kernel("fused_experts", self.weights.device)
        plain = isinstance(self.method.of_some_tokens(), Dense)
        routed = OneByOne(experts) if run is None or not plain else Stacked(experts, spec.count, run)
        shared = self._shared(number, spec) if spec.shared_width else None
        weighs_inputs = spec.router.weighs_inputs
        return Experts(self._router(number, spec), routed, shared, self.group, weighs_inputs=weighs_inputs)

    def _router(self, number: int, spec: ExpertsSpec) -> Router:
        name = self.names.experts.router.format(layer=number)
        weight = self._exact(f"{name}.weight", spec.count, self.spec.hidden_size)
        bias = self._exact(f"{name}.bias", spec.count) if spec.router.bias else None
        correction = None
        if spec.router.correction:
            correction = self._exact(self.names.experts.correction.format(layer=number), spec.count)
        return Router(spec.router, weight, bias, correction)

    def _shared(self, number: int, spec: ExpertsSpec) -> SharedExpert:
        names = self.names.experts
        three = [
            name.format(layer=number) for name in (names.shared_gate, names.shared_up, names.shared_down)
        ]
        both = self._projections(self.weights, self.method, three, spec.shared_width)
        gate = None
        if spec.shared_gate:
            name = names.shared_router.format(layer=number)
            gate = self._exact(f"{name}.weight", 1, self.spec.hidden_size)
        return SharedExpert(GatedMLP(*both, self.spec.activation), gate)

    def _stacked(self, number: int, named: Sequence[Sequence[str]]) -> Weights:
        """If the checkpoint has all experts in one tensor: the weights as if each expert had its own."""
        stack = self.names.experts.stack
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
        return StackedExperts(self.weights, names, matrices, len(named))

    def _expert(self, weights: Weights, spec: ExpertsSpec, gate: str, up: str, down: str) -> GatedMLP:
        method = self.method.of_some_tokens()
        gate_up, back = self._projections(weights, method, (gate, up, down), spec.width, bias=spec.bias)
        if spec.clamp is not None:
            return ClampedMLP(gate_up, back, spec.clamp)
        return GatedMLP(gate_up, back, self.spec.activation)

    def _projections(
        self, weights: Weights, method: LinearMethod, names: Sequence[str], width: int, *, bias: bool = False
    ) -> tuple[Linear, Linear]:
        """This rank's part; the ranks' results are not summed here. Only one rank adds the bias of their
        sum."""
        local, hidden = self.part(self.shard.part(width)), self.spec.hidden_size
        gate, up, down = names
        into = (Projection(gate, width, local), Projection(up, width, local))
        gate_up = method.load(weights, into, hidden, bias=bias)
        first = self.group.rank == 0
        if bias and not first:
            weights.take(f"{down}.bias", (hidden,))
        back = (Projection(down, hidden),)
        return gate_up, method.load(weights, back, width, bias=bias and first, local=local)

    def _exact(self, name: str, *shape: int) -> Tensor:
        return self.weights.take(name, shape).to(self.weights.device, torch.float32, copy=True)
