"""Llama 1, 2 and 3, and everything published in their shape. Data only."""

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
    )


# The first Llama's configurations have neither num_key_value_heads nor rope_theta.
FAMILY = Family(_traits, kv_heads_default=True, rope=Rope(theta=10000.0))
