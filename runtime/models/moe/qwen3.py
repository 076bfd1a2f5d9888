"""Qwen 3 with experts (Qwen3-30B-A3B, Qwen3-235B-A22B): Qwen 3's attention. Data only."""

from __future__ import annotations

from runtime.config.family import Family, Traits
from runtime.config.fields import Fields
from runtime.config.parts.experts import ExpertsSpec, RouterSpec, checked, expert_count, sparse_layers


def _traits(fields: Fields, layers: int) -> Traits:
    # Unlike in Qwen 3 without experts, a window is all layers'.
    window = fields.integer("sliding_window") if fields.flag("use_sliding_window", False) else None
    bias = fields.flag("attention_bias", False)
    return Traits(
        windows=(window,) * layers,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        experts=checked(
            fields,
            ExpertsSpec(
                sparse_layers(fields, layers),
                count=expert_count(fields),
                width=fields.integer("moe_intermediate_size"),
                router=RouterSpec(
                    fields.integer("num_experts_per_tok"), renormalise=fields.flag("norm_topk_prob", False)
                ),
            ),
        ),
    )


FAMILY = Family(_traits)
