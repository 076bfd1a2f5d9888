"""Llama 1, 2 and 3, and models of nearly the same shape. Data only.

Ernie 4.5 (dense) and Seed-OSS differ in biases and in the pairs of dimensions that rotate. Granite 3 (dense)
has factors for the embedding, the attention scores, the residual and the logits.
"""

from __future__ import annotations

from runtime.config.family import Family, Rope, Traits, full_attention
from runtime.config.fields import Fields


def _llama(fields: Fields, layers: int) -> Traits:
    bias = fields.flag("attention_bias", False)
    return Traits(
        windows=full_attention(layers),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )


def _ernie(fields: Fields, layers: int) -> Traits:
    bias = fields.flag("use_bias", False)
    return Traits(windows=full_attention(layers), qkv_bias=bias, output_bias=bias, mlp_bias=bias)


def _seed(fields: Fields, layers: int) -> Traits:
    return Traits(
        windows=full_attention(layers),
        qkv_bias=fields.flag("attention_bias", True),
        output_bias=fields.flag("attention_out_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
    )


# The first Llama's configurations have neither num_key_value_heads nor rope_theta.
LLAMA = Family(_llama, kv_heads_default=True, rope=Rope(theta=10000.0))
ERNIE = Family(
    _ernie,
    rope=Rope(theta=500000.0, pairs="neighbours"),
    kv_heads_default=True,
    defaults={"tie_word_embeddings": True},
)
SEED_OSS = Family(_seed, rope=Rope(theta=10000.0), kv_heads_default=True)


def _granite(fields: Fields, layers: int) -> Traits:
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


GRANITE = Family(_granite, rope=Rope(theta=10000.0), kv_heads_default=True)
