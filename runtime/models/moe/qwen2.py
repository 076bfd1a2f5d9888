"""Qwen 1.5 and 2 with experts (Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B): Qwen 2's attention; one expert is shared,
behind a gate. Data only."""

from __future__ import annotations

from runtime.config.family import Family, Traits, layered_windows
from runtime.config.fields import Fields
from runtime.config.parts.experts import ExpertsSpec, RouterSpec, checked, expert_count, sparse_layers


def _traits(fields: Fields, layers: int) -> Traits:
    return Traits(
        windows=layered_windows(fields, layers),
        qkv_bias=fields.flag("qkv_bias", True),
        experts=checked(
            fields,
            ExpertsSpec(
                sparse_layers(fields, layers),
                count=expert_count(fields),
                width=fields.integer("moe_intermediate_size"),
                router=RouterSpec(
                    fields.integer("num_experts_per_tok"), renormalise=fields.flag("norm_topk_prob", False)
                ),
                shared_width=fields.integer("shared_expert_intermediate_size"),
                shared_gate=True,
            ),
        ),
    )


FAMILY = Family(_traits, kv_heads_default=True)
