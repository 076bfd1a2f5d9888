"""DeepSeek V3 and R1 (arXiv 2412.19437), and what is published in their shape: latent attention; experts in
groups, chosen by sigmoids with a correction. Data only."""

from __future__ import annotations

from runtime.config.family import Family, Names, Rope, Traits, full_attention
from runtime.config.fields import Fields
from runtime.config.parts.experts import SHARED_EXPERTS, sigmoid_experts
from runtime.config.parts.latent import latent_scale, latent_spec


def _traits(fields: Fields, layers: int) -> Traits:
    if not fields.flag("rope_interleave", True):
        raise fields.fail("'rope_interleave' false is not supported")
    if (method := fields.text("topk_method", "noaux_tc")) != "noaux_tc":
        raise fields.fail(f"'topk_method' {method!r} is not supported; known: noaux_tc")
    latent = latent_spec(fields)
    return Traits(
        windows=full_attention(layers),
        latent=latent,
        attention_scale=latent_scale(fields, latent),
        further_layers=fields.integer("num_nextn_predict_layers", 0, minimum=0),
        experts=sigmoid_experts(fields, layers),
    )


FAMILY = Family(_traits, Names(experts=SHARED_EXPERTS), rope=Rope(theta=10000.0, pairs="neighbours"))
