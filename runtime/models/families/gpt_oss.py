"""gpt-oss (arXiv 2508.10925): every other layer has a sliding window, every head a sink. Experts with biases
and a clamped activation are stored as one MXFP4 tensor per layer. Data only."""

from __future__ import annotations

from runtime.config.family import Family, Names, Rope, Traits, layer_types, windows_of
from runtime.config.fields import Fields
from runtime.config.parts.experts import (
    Clamp,
    ExpertNames,
    ExpertsSpec,
    RouterSpec,
    StackNames,
    checked,
    expert_count,
)


def _traits(fields: Fields, layers: int) -> Traits:
    bias = fields.flag("attention_bias", True)
    return Traits(
        windows=windows_of(layer_types(fields, layers, every=2), fields.integer("sliding_window")),
        qkv_bias=bias,
        output_bias=bias,
        sinks=True,
        experts=checked(
            fields,
            ExpertsSpec(
                (True,) * layers,
                count=expert_count(fields),
                width=fields.integer("intermediate_size"),
                router=RouterSpec(fields.integer("num_experts_per_tok"), renormalise=True, bias=True),
                bias=True,
                clamp=Clamp(fields.number("swiglu_alpha", 1.702), fields.number("swiglu_limit", 7.0)),
            ),
        ),
    )


_EXPERTS = "model.layers.{layer}.mlp.experts"
NAMES = Names(
    experts=ExpertNames(
        router="model.layers.{layer}.mlp.router",
        stack=StackNames(f"{_EXPERTS}.gate_up_proj", f"{_EXPERTS}.down_proj", alternate=True),
    )
)
FAMILY = Family(_traits, NAMES, rope=Rope(theta=150000.0))
