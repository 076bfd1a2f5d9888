"""ExpertsLoader: fills a layer's mixture of experts from a checkpoint, one matrix at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.config.parts.experts import ExpertNames, ExpertsSpec
from runtime.config.shards import Shard
from runtime.layers.linear import LinearMethod, Projection
from runtime.layers.mlp import GatedMLP
from runtime.layers.moe import Experts, Router, SharedExpert
from runtime.layers.weights import Weights
from runtime.parallel import Group


@dataclass(frozen=True, slots=True)
class ExpertsLoader:
    """Of each expert a rank reads its part of the width. The matrices of experts are loaded by the method, as
    those of any feed-forward; what chooses and weighs experts is small and stays in float32."""

    weights: Weights
    spec: ExpertsSpec
    names: ExpertNames
    hidden: int
    method: LinearMethod
    group: Group
    shard: Shard

    def layer(self, number: int) -> Experts:
        spec, names = self.spec, self.names
        experts = [
            self._mlp(
                names.gate.format(layer=number, expert=expert),
                names.up.format(layer=number, expert=expert),
                names.down.format(layer=number, expert=expert),
                spec.width,
            )
            for expert in range(spec.count)
        ]
        shared = self._shared(number) if spec.shared_width else None
        weighs_inputs = spec.router.weighs_inputs
        return Experts(self._router(number), experts, shared, self.group, weighs_inputs=weighs_inputs)

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
        mlp = self._mlp(
            names.shared_gate.format(layer=number),
            names.shared_up.format(layer=number),
            names.shared_down.format(layer=number),
            self.spec.shared_width,
        )
        if not self.spec.shared_gate:
            return SharedExpert(mlp, None)
        return SharedExpert(
            mlp, self._exact(f"{names.shared_router.format(layer=number)}.weight", 1, self.hidden)
        )

    def _mlp(self, gate: str, up: str, down: str, width: int) -> GatedMLP:
        """The part of this rank, whose results are not yet added up."""
        own = self.shard.part(width) if self.group.size > 1 else None
        into = (Projection(gate, width, own), Projection(up, width, own))
        back = (Projection(down, self.hidden),)
        return GatedMLP(
            self.method.load(self.weights, into, self.hidden, bias=False),
            self.method.load(self.weights, back, width, bias=False, own=own),
        )

    def _exact(self, name: str, *shape: int) -> Tensor:
        return self.weights.take(name, shape).to(self.weights.device, torch.float32, copy=True)
