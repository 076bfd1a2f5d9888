"""GPT-2: LayerNorm, learned positions, a plain feed-forward, matrices stored as [inputs, outputs]. Data
only."""

from __future__ import annotations

from runtime.config.family import Family, Names, Rope, Traits, full_attention
from runtime.config.fields import Fields


def _traits(fields: Fields, layers: int) -> Traits:
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if fields.flag(name, False):
            raise fields.fail(f"{name!r} is not supported")
    return Traits(
        windows=full_attention(layers),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        norm="layer",
        norm_bias=True,
        gated=False,
        learned_positions=True,
        attention_scale=None if fields.flag("scale_attn_weights", True) else 1.0,
    )


def _no_rope(fields: Fields, layers: int) -> tuple[None, ...]:
    return (None,) * layers


_QKV = "h.{layer}.attn.c_attn"
FAMILY = Family(
    _traits,
    Names(
        embedding="wte.weight",
        positions="wpe.weight",
        final_norm="ln_f.weight",
        attention_norm="h.{layer}.ln_1.weight",
        mlp_norm="h.{layer}.ln_2.weight",
        query=_QKV,
        key=_QKV,
        value=_QKV,
        output="h.{layer}.attn.c_proj",
        up="h.{layer}.mlp.c_fc",
        down="h.{layer}.mlp.c_proj",
        prefix="transformer.",
        transposed=("c_attn.weight", "c_proj.weight", "c_fc.weight"),
        ignored=("attn.bias", "attn.masked_bias"),
    ),
    rope=Rope(theta=10000.0, kinds=_no_rope),
    renamed={
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "intermediate_size": "n_inner",
        "rms_norm_eps": "layer_norm_epsilon",
        "hidden_act": "activation_function",
    },
    kv_heads_default=True,
    defaults={"tie_word_embeddings": True, "activation_function": "gelu_new"},
    ffn_default=4,
)
