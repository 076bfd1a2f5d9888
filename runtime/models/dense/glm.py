"""GLM-4: half of each head is turned, neighbours together; gate and up in one tensor. GLM-4-0414 (Glm4) adds
norms after each half of a layer. Data only."""

from __future__ import annotations

from runtime.config.family import Family, Names, Rope, Traits, full_attention
from runtime.config.fields import Fields


def _traits(fields: Fields, layers: int) -> Traits:
    return Traits(windows=full_attention(layers), qkv_bias=fields.flag("attention_bias", True))


_LAYER = "model.layers.{layer}."
_GATE_UP = _LAYER + "mlp.gate_up_proj"
_ROPE = Rope(theta=10000.0, partial=0.5, pairs="neighbours")

GLM = Family(_traits, Names(gate=_GATE_UP, up=_GATE_UP), rope=_ROPE)
GLM4 = Family(
    _traits,
    Names(
        gate=_GATE_UP,
        up=_GATE_UP,
        attention_post_norm=_LAYER + "post_self_attn_layernorm.weight",
        mlp_post_norm=_LAYER + "post_mlp_layernorm.weight",
    ),
    rope=_ROPE,
)
