"""GLM 4.5 and 4.6 (arXiv 2508.06471): half of each head is turned; DeepSeek-V3's router. Data only."""

from __future__ import annotations

from runtime.config.family import Family, Names, Rope, Traits, full_attention
from runtime.config.fields import Fields
from runtime.config.parts.experts import SHARED_EXPERTS, sigmoid_experts


def _traits(fields: Fields, layers: int) -> Traits:
    return Traits(
        windows=full_attention(layers),
        qkv_bias=fields.flag("attention_bias", False),
        qk_norm=fields.flag("use_qk_norm", False),
        further_layers=fields.integer("num_nextn_predict_layers", 0, minimum=0),
        experts=sigmoid_experts(fields, layers),
    )


FAMILY = Family(_traits, Names(experts=SHARED_EXPERTS), rope=Rope(theta=10000.0, partial=0.5))
