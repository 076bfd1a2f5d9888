"""GPT-NeoX and Pythia: LayerNorm, attention and feed-forward in parallel, a quarter of each head rotated,
queries, keys and values in one tensor, head by head. Data only."""

from __future__ import annotations

from runtime.config.family import Family, Names, Rope, Traits, full_attention
from runtime.config.fields import Fields


def _traits(fields: Fields, layers: int) -> Traits:
    bias = fields.flag("attention_bias", True)
    return Traits(
        windows=full_attention(layers),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=True,
        norm="layer",
        norm_bias=True,
        gated=False,
        parallel=fields.flag("use_parallel_residual", True),
        qkv_by_head=True,
    )


_LAYER = "gpt_neox.layers.{layer}."
FAMILY = Family(
    _traits,
    Names(
        embedding="gpt_neox.embed_in.weight",
        final_norm="gpt_neox.final_layer_norm.weight",
        head="embed_out",
        attention_norm=_LAYER + "input_layernorm.weight",
        mlp_norm=_LAYER + "post_attention_layernorm.weight",
        query=_LAYER + "attention.query_key_value",
        output=_LAYER + "attention.dense",
        up=_LAYER + "mlp.dense_h_to_4h",
        down=_LAYER + "mlp.dense_4h_to_h",
        ignored=("attention.bias", "attention.masked_bias", "rotary_emb.inv_freq"),
    ),
    rope=Rope(theta=10000.0, partial=0.25),
    renamed={
        "rms_norm_eps": "layer_norm_eps",
        "partial_rotary_factor": "rotary_pct",
        "rope_theta": "rotary_emb_base",
    },
    kv_heads_default=True,
    defaults={"hidden_act": "gelu"},
)
