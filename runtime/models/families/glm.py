"""GLM-4, GLM-4-0414 (Glm4), and GLM 4.5 and 4.6 (arXiv 2508.06471). Data only.

Half of each head is rotated. GLM-4 rotates neighbouring dimensions together and has gate and up in one
tensor; GLM-4-0414 adds norms after each half of a layer. GLM 4.5 has experts with DeepSeek-V3's router."""

from __future__ import annotations

from runtime.config.family import Family, Names, Rope, Traits, full_attention
from runtime.config.fields import Fields
from runtime.config.parts.experts import SHARED_EXPERTS, sigmoid_experts


def _glm(fields: Fields, layers: int) -> Traits:
    return Traits(windows=full_attention(layers), qkv_bias=fields.flag("attention_bias", True))


_LAYER = "model.layers.{layer}."
_GATE_UP = _LAYER + "mlp.gate_up_proj"
_ROPE = Rope(theta=10000.0, partial=0.5, pairs="neighbours")

GLM = Family(_glm, Names(gate=_GATE_UP, up=_GATE_UP), rope=_ROPE)
GLM4 = Family(
    _glm,
    Names(
        gate=_GATE_UP,
        up=_GATE_UP,
        attention_post_norm=_LAYER + "post_self_attn_layernorm.weight",
        mlp_post_norm=_LAYER + "post_mlp_layernorm.weight",
    ),
    rope=_ROPE,
)


def _glm4_moe(fields: Fields, layers: int) -> Traits:
    return Traits(
        windows=full_attention(layers),
        qkv_bias=fields.flag("attention_bias", False),
        qk_norm=fields.flag("use_qk_norm", False),
        further_layers=fields.integer("num_nextn_predict_layers", 0, minimum=0),
        experts=sigmoid_experts(fields, layers),
    )


GLM4_MOE = Family(_glm4_moe, Names(experts=SHARED_EXPERTS), rope=Rope(theta=10000.0, partial=0.5))
