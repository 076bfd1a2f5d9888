"""DeepSeek V2 (arXiv 2405.04434): latent attention; experts chosen by a softmax, in the large model only from
the best groups. Data only."""

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
)
from runtime.config.parts.latent import latent_scale, latent_spec


def _traits(fields: Fields, layers: int) -> Traits:
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
                router=_router(fields),
                shared_width=shared_width(fields),
            ),
        ),
    )


def _router(fields: Fields) -> RouterSpec:
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


FAMILY = Family(
    _traits,
    Names(experts=SHARED_EXPERTS),
    rope=Rope(theta=10000.0, pairs="neighbours"),
    kv_heads_default=True,
)
