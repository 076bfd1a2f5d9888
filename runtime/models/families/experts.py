"""Families with mixtures of experts. Data only.

DeepSeek   V2 (arXiv 2405.04434), V3 and R1 (arXiv 2412.19437): latent attention. V2 chooses experts by
           softmax, the large model only from the best groups; V3 in groups, by sigmoids with a correction
GLM        4.5 and 4.6 (arXiv 2508.06471): DeepSeek-V3's router
gpt-oss    (arXiv 2508.10925): every other layer has a window, every head a sink; the experts have biases and
           a clamped activation, and are stored as one MXFP4 tensor per layer
Llama 4    its language model: every fourth layer has no rotary embedding, and its queries grow with their
           position. The others attend within chunks; contexts are limited to the first chunk (8,192 tokens
           in the published models), in which that equals full attention
Mixtral    (arXiv 2401.04088), OLMoE (arXiv 2409.02060): experts in every layer
Qwen       2 has a shared expert behind a gate, 3 has none
"""

from __future__ import annotations

from dataclasses import replace

from runtime.config.family import (
    Family,
    Names,
    QueryGrowth,
    Rope,
    Traits,
    biases,
    layer_types,
    layered_windows,
    one_window,
    unturned_layers,
    windows_of,
)
from runtime.config.fields import Fields
from runtime.config.parts.experts import (
    SHARED_EXPERTS,
    Clamp,
    ExpertNames,
    RouterSpec,
    StackNames,
    experts_of,
    layers_after,
    shared_width,
    sigmoid_experts,
    sparse_layers,
)
from runtime.config.parts.latent import latent_scale, latent_spec

_ROPE = Rope(theta=10000.0)
_NEIGHBOURS = Rope(theta=10000.0, pairs="neighbours")

# -- DeepSeek and GLM ----------------------------------------------------------------------------------------


def _deepseek_v2(fields: Fields, layers: int) -> Traits:
    for name in ("norm_topk_prob", "mlp_bias"):
        if fields.flag(name, False):
            raise fields.fail(f"{name!r} true is not supported")
    latent, router = latent_spec(fields), _deepseek_v2_router(fields)
    return Traits(
        latent=latent,
        attention_scale=latent_scale(fields, latent),
        experts=experts_of(fields, layers_after(fields, layers), router, shared_width=shared_width(fields)),
    )


def _deepseek_v2_router(fields: Fields) -> RouterSpec:
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


def _deepseek_v3(fields: Fields, layers: int) -> Traits:
    if not fields.flag("rope_interleave", True):
        raise fields.fail("'rope_interleave' false is not supported")
    if (method := fields.text("topk_method", "noaux_tc")) != "noaux_tc":
        raise fields.fail(f"'topk_method' {method!r} is not supported; known: noaux_tc")
    latent = latent_spec(fields)
    return Traits(
        latent=latent,
        attention_scale=latent_scale(fields, latent),
        further_layers=fields.integer("num_nextn_predict_layers", 0, minimum=0),
        experts=sigmoid_experts(fields, layers),
    )


def _glm4_moe(fields: Fields, layers: int) -> Traits:
    return Traits(
        qkv_bias=fields.flag("attention_bias", False),
        qk_norm=fields.flag("use_qk_norm", False),
        further_layers=fields.integer("num_nextn_predict_layers", 0, minimum=0),
        experts=sigmoid_experts(fields, layers),
    )


_SHARED = Names(experts=SHARED_EXPERTS)
DEEPSEEK_V2 = Family(_deepseek_v2, _SHARED, rope=_NEIGHBOURS, kv_heads_default=True)
DEEPSEEK_V3 = Family(_deepseek_v3, _SHARED, rope=_NEIGHBOURS)
GLM4_MOE = Family(_glm4_moe, _SHARED, rope=Rope(theta=10000.0, partial=0.5))

# -- gpt-oss -------------------------------------------------------------------------------------------------


def _gpt_oss(fields: Fields, layers: int) -> Traits:
    return Traits(
        windows=windows_of(layer_types(fields, layers, every=2), fields.integer("sliding_window")),
        **biases(fields, default=True),
        sinks=True,
        experts=experts_of(
            fields,
            (True,) * layers,
            RouterSpec(fields.integer("num_experts_per_tok"), renormalise=True, bias=True),
            "intermediate_size",
            bias=True,
            clamp=Clamp(fields.number("swiglu_alpha", 1.702), fields.number("swiglu_limit", 7.0)),
        ),
    )


_OSS_EXPERTS = "model.layers.{layer}.mlp.experts"
_OSS_NAMES = ExpertNames(
    router="model.layers.{layer}.mlp.router",
    stack=StackNames(f"{_OSS_EXPERTS}.gate_up_proj", f"{_OSS_EXPERTS}.down_proj", alternate=True),
)
GPT_OSS = Family(_gpt_oss, Names(experts=_OSS_NAMES), rope=Rope(theta=150000.0))

# -- Llama 4 -------------------------------------------------------------------------------------------------


def _llama4(fields: Fields, layers: int) -> Traits:
    growth = None
    # Some published configurations have a number here, as the first version of the format had.
    if fields.values.get("attn_temperature_tuning", True):
        growth = QueryGrowth(
            beta=fields.number("attn_scale", 0.1),
            every=int(fields.number("floor_scale", 8192)),
            shift=1,
            turned=False,
        )
    # Of an expert intermediate_size is the width; for other layers the field has another name.
    plain = Fields(fields.values, fields.source)
    router = RouterSpec(fields.integer("num_experts_per_tok", 1), scores="sigmoid", weighs_inputs=True)
    width = "intermediate_size"
    return Traits(
        **biases(fields),
        qk_norm=fields.flag("use_qk_norm", True),
        qk_norm_scope="turned_head",
        query_growth=growth,
        longest=fields.integer("attention_chunk_size") if fields.has("attention_chunk_size") else None,
        experts=experts_of(
            plain, _llama4_layers(fields, layers), router, width, shared_width=plain.integer(width)
        ),
    )


def _llama4_layers(fields: Fields, layers: int) -> tuple[bool, ...]:
    listed = fields.ids("moe_layers")
    if fields.has("moe_layers"):
        return tuple(layer in listed for layer in range(layers))
    step = fields.integer("interleave_moe_layer_step", 1)
    return tuple((layer + 1) % step == 0 for layer in range(layers))


_LLAMA4_LAYER = "model.layers.{layer}.feed_forward"
LLAMA4 = Family(
    _llama4,
    Names(
        gate=f"{_LLAMA4_LAYER}.gate_proj",
        up=f"{_LLAMA4_LAYER}.up_proj",
        down=f"{_LLAMA4_LAYER}.down_proj",
        experts=ExpertNames(
            router=f"{_LLAMA4_LAYER}.router",
            gate=_LLAMA4_LAYER + ".experts.{expert}.gate_proj",
            up=_LLAMA4_LAYER + ".experts.{expert}.up_proj",
            down=_LLAMA4_LAYER + ".experts.{expert}.down_proj",
            shared_gate=f"{_LLAMA4_LAYER}.shared_expert.gate_proj",
            shared_up=f"{_LLAMA4_LAYER}.shared_expert.up_proj",
            shared_down=f"{_LLAMA4_LAYER}.shared_expert.down_proj",
            stack=StackNames(f"{_LLAMA4_LAYER}.experts.gate_up_proj", f"{_LLAMA4_LAYER}.experts.down_proj"),
        ),
    ),
    rope=Rope(theta=500000.0, pairs="neighbours", kinds=unturned_layers),
    renamed={"intermediate_size": "intermediate_size_mlp"},
)
# As published, with a vision tower.
_LLAMA4_BESIDE = ("vision_model.", "multi_modal_projector.")
LLAMA4_WITH_TOWER = replace(
    LLAMA4, names=replace(LLAMA4.names, prefix="language_model.", beside=_LLAMA4_BESIDE), text="text_config"
)

# -- Mixtral, OLMoE and Qwen ---------------------------------------------------------------------------------


def _router(fields: Fields) -> RouterSpec:
    renormalise = fields.flag("norm_topk_prob", False)
    return RouterSpec(fields.integer("num_experts_per_tok"), renormalise=renormalise)


def _mixtral(fields: Fields, layers: int) -> Traits:
    # The published configuration has null for "no window"; transformers omits the field.
    router = RouterSpec(fields.integer("num_experts_per_tok"), renormalise=True)
    experts = experts_of(fields, (True,) * layers, router, "intermediate_size")
    return Traits(windows=one_window(fields, layers), experts=experts)


_MIXTRAL_EXPERT = "model.layers.{layer}.block_sparse_moe.experts.{expert}"
_MIXTRAL_NAMES = ExpertNames(
    router="model.layers.{layer}.block_sparse_moe.gate",
    gate=f"{_MIXTRAL_EXPERT}.w1",
    up=f"{_MIXTRAL_EXPERT}.w3",
    down=f"{_MIXTRAL_EXPERT}.w2",
)
MIXTRAL = Family(_mixtral, Names(experts=_MIXTRAL_NAMES), rope=_ROPE)


def _olmoe(fields: Fields, layers: int) -> Traits:
    if fields.has("clip_qkv"):
        raise fields.fail("'clip_qkv' is not supported")
    experts = experts_of(fields, (True,) * layers, _router(fields), "intermediate_size")
    return Traits(**biases(fields), qk_norm=True, qk_norm_scope="heads", experts=experts)


def _qwen2_moe(fields: Fields, layers: int) -> Traits:
    return Traits(
        windows=layered_windows(fields, layers),
        qkv_bias=fields.flag("qkv_bias", True),
        experts=experts_of(
            fields,
            sparse_layers(fields, layers),
            _router(fields),
            shared_width=fields.integer("shared_expert_intermediate_size"),
            shared_gate=True,
        ),
    )


def _qwen3_moe(fields: Fields, layers: int) -> Traits:
    # Unlike in Qwen 3 without experts, a window applies to all layers.
    window = fields.integer("sliding_window") if fields.flag("use_sliding_window", False) else None
    experts = experts_of(fields, sparse_layers(fields, layers), _router(fields))
    return Traits(windows=(window,) * layers, **biases(fields), qk_norm=True, experts=experts)


OLMOE = Family(_olmoe, kv_heads_default=True, rope=_ROPE)
QWEN2_MOE = Family(_qwen2_moe, kv_heads_default=True)
QWEN3_MOE = Family(_qwen3_moe)
