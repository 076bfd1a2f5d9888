"""DeepSeek V2 (arXiv 2405.04434), V3 and R1 (arXiv 2412.19437), and models of their shape. Data only.

Latent attention and experts. V2 chooses experts by softmax, the large model only from the best groups; V3
chooses them in groups, by sigmoids with a correction.
"""

from __future__ import annotations

from runtime.config.family import Family, Names, Rope, Traits, full_attention
from runtime.config.fields import Fields
from runtime.config.parts.experts import (
    SHARED_EXPERTS,
    ExpertsSpec,
    RouterSpec,
    checked,
    expert_count,
    layers_after,
    shared_width,
    sigmoid_experts,
)
from runtime.config.parts.latent import latent_scale, latent_spec


def _v2(fields: Fields, layers: int) -> Traits:
    for name in ("norm_topk_prob", "mlp_bias"):
        if fields.flag(name, False):
            raise fields.fail(f"{name!r} true is not supported")
    latent = latent_spec(fields)
    return Traits(
        windows=full_attention(layers),
        latent=latent,
        attention_scale=latent_scale(fields, latent),
        experts=checked(
            fields,
            ExpertsSpec(
                layers_after(fields, layers),
                count=expert_count(fields),
                width=fields.integer("moe_intermediate_size"),
                router=_v2_router(fields),
                shared_width=shared_width(fields),
            ),
        ),
    )


def _v2_router(fields: Fields) -> RouterSpec:
    chosen, scale = fields.integer("num_experts_per_tok"), fields.number("routed_scaling_factor", 1.0)
    match fields.text("topk_method", "greedy"):
        case "greedy":
            return RouterSpec(chosen, scale=scale)
        case "group_limited_greedy":
            groups, best = fields.integer("n_group"), fields.integer("topk_group")
            return RouterSpec(chosen, scale=scale, groups=groups, groups_chosen=best)
        case method:
            raise fields.fail(
                f"'topk_method' {method!r} is not supported; known: greedy, group_limited_greedy"
            )


DEEPSEEK_V2 = Family(
    _v2,
    Names(experts=SHARED_EXPERTS),
    rope=Rope(theta=10000.0, pairs="neighbours"),
    kv_heads_default=True,
)


def _v3(fields: Fields, layers: int) -> Traits:
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


DEEPSEEK_V3 = Family(_v3, Names(experts=SHARED_EXPERTS), rope=Rope(theta=10000.0, pairs="neighbours"))
