"""OLMoE (arXiv 2409.02060): Llama's shape with experts in every layer, queries and keys normalised over all
heads at once. Data only."""

from __future__ import annotations

from runtime.config.family import Family, Rope, Traits, full_attention
from runtime.config.fields import Fields
from runtime.config.parts.experts import ExpertsSpec, RouterSpec, checked, expert_count


def _traits(fields: Fields, layers: int) -> Traits:
    if fields.has("clip_qkv"):
        raise fields.fail("'clip_qkv' is not supported")
    bias = fields.flag("attention_bias", False)
    return Traits(
        windows=full_attention(layers),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        qk_norm_over="heads",
        experts=checked(
            fields,
            ExpertsSpec(
                (True,) * layers,
                count=expert_count(fields),
                width=fields.integer("intermediate_size"),
                router=RouterSpec(
                    fields.integer("num_experts_per_tok"), renormalise=fields.flag("norm_topk_prob", False)
                ),
            ),
        ),
    )


FAMILY = Family(_traits, kv_heads_default=True, rope=Rope(theta=10000.0))
