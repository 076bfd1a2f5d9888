"""Phi 1 to 2 (arXiv 2306.11644): LayerNorm, attention and feed-forward in parallel after one norm, a head
with biases. Phi 3, 3.5 and 4: Llama's layers, with queries, keys and values in one tensor, and gate and up in
another. Data only."""

from __future__ import annotations

from runtime.config.family import Family, Names, Rope, Traits, full_attention
from runtime.config.fields import Fields


def _phi(fields: Fields, layers: int) -> Traits:
    if fields.flag("qk_layernorm", False):
        raise fields.fail("'qk_layernorm' is not supported")
    return Traits(
        windows=full_attention(layers),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        head_bias=True,
        norm="layer",
        norm_bias=True,
        gated=False,
        parallel=True,
    )


def _phi3(fields: Fields, layers: int) -> Traits:
    window = fields.integer("sliding_window") if fields.has("sliding_window") else None
    return Traits(windows=(window,) * layers)


_LAYER = "model.layers.{layer}."
_QKV = _LAYER + "self_attn.qkv_proj"
_GATE_UP = _LAYER + "mlp.gate_up_proj"

PHI = Family(
    _phi,
    Names(
        final_norm="model.final_layernorm.weight",
        mlp_norm=_LAYER + "input_layernorm.weight",
        output=_LAYER + "self_attn.dense",
        up=_LAYER + "mlp.fc1",
        down=_LAYER + "mlp.fc2",
    ),
    rope=Rope(theta=10000.0, partial=0.5),
    renamed={"rms_norm_eps": "layer_norm_eps"},
    kv_heads_default=True,
    defaults={"hidden_act": "gelu_new"},
)
PHI3 = Family(
    _phi3,
    Names(query=_QKV, key=_QKV, value=_QKV, gate=_GATE_UP, up=_GATE_UP),
    rope=Rope(theta=10000.0, partial=1.0),
    kv_heads_default=True,
)
