"""Mixtral: Mistral's shape with experts in every layer (arXiv 2401.04088). Data only."""

from __future__ import annotations

from runtime.config.family import Family, Names, Rope, Traits
from runtime.config.fields import Fields
from runtime.config.parts.experts import ExpertNames, ExpertsSpec, RouterSpec, checked


def _traits(fields: Fields, layers: int) -> Traits:
    # The published configuration says null for "no window"; transformers leaves it out.
    window = fields.integer("sliding_window") if fields.has("sliding_window") else None
    return Traits(
        windows=(window,) * layers,
        experts=checked(
            fields,
            ExpertsSpec(
                (True,) * layers,
                count=fields.integer("num_local_experts"),
                width=fields.integer("intermediate_size"),
                router=RouterSpec(fields.integer("num_experts_per_tok"), renormalise=True),
            ),
        ),
    )


_EXPERT = "model.layers.{layer}.block_sparse_moe.experts.{expert}"
NAMES = Names(
    experts=ExpertNames(
        router="model.layers.{layer}.block_sparse_moe.gate",
        gate=f"{_EXPERT}.w1",
        up=f"{_EXPERT}.w3",
        down=f"{_EXPERT}.w2",
    )
)
FAMILY = Family(_traits, NAMES, rope=Rope(theta=10000.0))
