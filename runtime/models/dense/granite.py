"""Granite 3 (dense): Llama's layers with factors for the embedding, the scores, what each half of a layer
adds, and the logits. Data only."""

from __future__ import annotations

from runtime.config.family import Family, Rope, Traits, full_attention
from runtime.config.fields import Fields


def _traits(fields: Fields, layers: int) -> Traits:
    bias = fields.flag("attention_bias", False)
    return Traits(
        windows=full_attention(layers),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
        attention_scale=fields.number("attention_multiplier", 1.0),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        logit_scale=1 / fields.number("logits_scaling", 1.0),
    )


FAMILY = Family(_traits, rope=Rope(theta=10000.0), kv_heads_default=True)
