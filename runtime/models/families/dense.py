"""Families whose layers all have one plain feed-forward. Data only.

Cohere        Command R and R+, Command R7B and A (Cohere 2): attention and feed-forward in parallel after one
              LayerNorm. Cohere 2 has a rotary embedding in the windowed layers only
Gemma         norms around zero, a scaled embedding. Gemma 2 (arXiv 2408.00118): softcaps, windows, norms
              after each half of a layer. Gemma 3 (2503.19786): another rotary embedding in windowed layers
GLM           GLM-4 and GLM-4-0414 (Glm4): half of each head is rotated
GPT-2         learned positions, matrices stored as [inputs, outputs]
GPT-NeoX      and Pythia: attention and feed-forward in parallel, one matrix of queries, keys and values
Llama         1 to 3; Ernie 4.5 and Seed-OSS differ in biases, Granite 3 has factors of activations
Mistral       Llama's shape, at first with windows. In Ministral 3 queries grow with their position
OLMo          2 (arXiv 2501.00656) and 3: norms after each half of a layer instead of before
Phi           1 to 2 (arXiv 2306.11644): LayerNorm, parallel halves. 3 to 4: Llama's layers in fewer tensors
Qwen          2, 2.5 and 3; Qwen2-VL and Qwen2.5-VL have a vision tower and a rotary embedding over three axes
SmolLM 3      Llama's layers, every fourth without a rotary embedding (arXiv 2501.18795)
StarCoder 2   (arXiv 2402.19173): LayerNorm, biases everywhere
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

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
from runtime.config.parts.vision import qwen2_5_vision, qwen2_vision

_LAYER = "model.layers.{layer}."
_ROPE = Rope(theta=10000.0)
_TIED = {"tie_word_embeddings": True}

# -- Cohere --------------------------------------------------------------------------------------------------


def _cohere(fields: Fields, layers: int) -> Traits:
    return Traits(
        **biases(fields),
        norm="layer",
        qk_norm=fields.flag("use_qk_norm", False),
        qk_norm_scope="each_head",
        parallel=True,
        logit_scale=fields.number("logit_scale", 0.0625),
    )


def _cohere2_kinds(fields: Fields, layers: int) -> tuple[str, ...]:
    return layer_types(fields, layers, fields.integer("sliding_window_pattern", 4))


def _cohere2(fields: Fields, layers: int) -> Traits:
    windows = windows_of(_cohere2_kinds(fields, layers), fields.integer("sliding_window", 4096))
    return replace(_cohere(fields, layers), windows=windows)


def _cohere2_ropes(fields: Fields, layers: int) -> tuple[str | None, ...]:
    return tuple("" if kind == "sliding_attention" else None for kind in _cohere2_kinds(fields, layers))


COHERE = Family(
    _cohere,
    Names(mlp_norm=_LAYER + "input_layernorm.weight"),
    rope=Rope(theta=500000.0, pairs="neighbours"),
    renamed={"rms_norm_eps": "layer_norm_eps"},
    kv_heads_default=True,
    defaults=_TIED,
)
COHERE2 = replace(COHERE, traits=_cohere2, rope=replace(COHERE.rope, kinds=_cohere2_ropes))

# -- Gemma ---------------------------------------------------------------------------------------------------


def _gemma(fields: Fields, layers: int) -> Traits:
    scale = math.sqrt(fields.integer("hidden_size"))
    return Traits(**biases(fields), norm="rms_plus_one", embedding_scale=scale)


def _capped_gemma(fields: Fields, layers: int, kinds: tuple[str, ...], logit_cap: float | None) -> Traits:
    """What Gemma 2 and 3 share."""
    if fields.flag("use_bidirectional_attention", False):
        raise fields.fail("'use_bidirectional_attention' is not supported")
    return replace(
        _gemma(fields, layers),
        windows=windows_of(kinds, fields.integer("sliding_window", 4096)),
        attention_scale=fields.integer("query_pre_attn_scalar", 256) ** -0.5,
        logit_softcap=_cap(fields, "final_logit_softcapping", logit_cap),
    )


def _cap(fields: Fields, name: str, default: float | None) -> float | None:
    """null means no cap, a missing field the default."""
    if name in fields.values and not fields.has(name):
        return None
    return fields.number(name, default) if default is not None or fields.has(name) else None


def _gemma2(fields: Fields, layers: int) -> Traits:
    traits = _capped_gemma(fields, layers, layer_types(fields, layers, 2), 30.0)
    return replace(traits, attention_softcap=_cap(fields, "attn_logit_softcapping", 50.0))


def _gemma3_kinds(fields: Fields, layers: int) -> tuple[str, ...]:
    return layer_types(fields, layers, fields.integer("sliding_window_pattern", 6))


def _gemma3(fields: Fields, layers: int) -> Traits:
    return replace(_capped_gemma(fields, layers, _gemma3_kinds(fields, layers), None), qk_norm=True)


# The first Gemma's configurations have "gelu" in hidden_act and mean the tanh approximation.
GEMMA = Family(
    _gemma,
    rope=_ROPE,
    renamed={"hidden_act": "hidden_activation"},
    defaults={"hidden_activation": "gelu_pytorch_tanh", **_TIED},
)
GEMMA2 = replace(
    GEMMA,
    traits=_gemma2,
    names=Names(
        attention_post_norm=_LAYER + "post_attention_layernorm.weight",
        mlp_norm=_LAYER + "pre_feedforward_layernorm.weight",
        mlp_post_norm=_LAYER + "post_feedforward_layernorm.weight",
    ),
)
_GEMMA3_ROPE = Rope(theta=1e6, kinds=_gemma3_kinds, local=("rope_local_base_freq", 10000.0))
GEMMA3 = replace(GEMMA2, traits=_gemma3, rope=_GEMMA3_ROPE)
_TOWER: dict[str, Any] = {"prefix": "language_model.", "beside": ("vision_tower.", "multi_modal_projector.")}
# Published with a vision tower, and with configurations that omit common values.
GEMMA3_TEXT = replace(
    GEMMA3,
    names=replace(GEMMA3.names, **_TOWER),
    defaults={
        **GEMMA3.defaults, "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 256, "rms_norm_eps": 1e-6, "max_position_embeddings": 131072,
    },
    text="text_config",
)  # fmt: skip

# -- GLM -----------------------------------------------------------------------------------------------------


def _glm(fields: Fields, layers: int) -> Traits:
    return Traits(qkv_bias=fields.flag("attention_bias", True))


_GATE_UP = _LAYER + "mlp.gate_up_proj"
GLM = Family(
    _glm, Names(gate=_GATE_UP, up=_GATE_UP), rope=Rope(theta=10000.0, partial=0.5, pairs="neighbours")
)
GLM4 = replace(
    GLM,
    names=replace(
        GLM.names,
        attention_post_norm=_LAYER + "post_self_attn_layernorm.weight",
        mlp_post_norm=_LAYER + "post_mlp_layernorm.weight",
    ),
)

# -- GPT-2 and GPT-NeoX --------------------------------------------------------------------------------------


def _gpt2(fields: Fields, layers: int) -> Traits:
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if fields.flag(name, False):
            raise fields.fail(f"{name!r} is not supported")
    return Traits(
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
GPT2 = Family(
    _gpt2,
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
    defaults={**_TIED, "activation_function": "gelu_new"},
    ffn_default=4,
)


def _gpt_neox(fields: Fields, layers: int) -> Traits:
    return Traits(
        **biases(fields, default=True),
        mlp_bias=True,
        norm="layer",
        norm_bias=True,
        gated=False,
        parallel=fields.flag("use_parallel_residual", True),
        qkv_by_head=True,
    )


_NEOX_LAYER = "gpt_neox.layers.{layer}."
GPT_NEOX = Family(
    _gpt_neox,
    Names(
        embedding="gpt_neox.embed_in.weight",
        final_norm="gpt_neox.final_layer_norm.weight",
        head="embed_out",
        attention_norm=_NEOX_LAYER + "input_layernorm.weight",
        mlp_norm=_NEOX_LAYER + "post_attention_layernorm.weight",
        query=_NEOX_LAYER + "attention.query_key_value",
        output=_NEOX_LAYER + "attention.dense",
        up=_NEOX_LAYER + "mlp.dense_h_to_4h",
        down=_NEOX_LAYER + "mlp.dense_4h_to_h",
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

# -- Llama ---------------------------------------------------------------------------------------------------


def _llama(fields: Fields, layers: int) -> Traits:
    return Traits(**biases(fields), mlp_bias=fields.flag("mlp_bias", False))


def _ernie(fields: Fields, layers: int) -> Traits:
    return Traits(**biases(fields, "use_bias"), mlp_bias=fields.flag("use_bias", False))


def _seed(fields: Fields, layers: int) -> Traits:
    return Traits(
        qkv_bias=fields.flag("attention_bias", True),
        output_bias=fields.flag("attention_out_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
    )


def _granite(fields: Fields, layers: int) -> Traits:
    return replace(
        _llama(fields, layers),
        attention_scale=fields.number("attention_multiplier", 1.0),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        logit_scale=1 / fields.number("logits_scaling", 1.0),
    )


# The first Llama's configurations have neither num_key_value_heads nor rope_theta.
LLAMA = Family(_llama, kv_heads_default=True, rope=_ROPE)
_ERNIE_ROPE = Rope(theta=500000.0, pairs="neighbours")
ERNIE = Family(_ernie, rope=_ERNIE_ROPE, kv_heads_default=True, defaults=_TIED)
SEED_OSS = replace(LLAMA, traits=_seed)
GRANITE = replace(LLAMA, traits=_granite)

# -- Mistral -------------------------------------------------------------------------------------------------


def _mistral(fields: Fields, layers: int) -> Traits:
    # In the published format null means "no window"; a missing field is ambiguous, so it is refused.
    if "sliding_window" not in fields.values:
        raise fields.fail(
            "the field 'sliding_window' is missing", hint="null means attention without a window"
        )
    return Traits(windows=one_window(fields, layers))


def _ministral(fields: Fields, layers: int) -> Traits:
    window = fields.integer("sliding_window") if fields.has("sliding_window") else None
    # Without layer_types every layer has the window, if there is one.
    return Traits(windows=windows_of(layer_types(fields, layers, layers + 1), window))


def _ministral3(fields: Fields, layers: int) -> Traits:
    rope, growth = fields.child("rope_parameters"), None
    if rope.has("llama_4_scaling_beta"):
        growth = QueryGrowth(
            beta=rope.number("llama_4_scaling_beta"), every=rope.integer("original_max_position_embeddings")
        )
    return Traits(windows=one_window(fields, layers), query_growth=growth)


MISTRAL = Family(_mistral, rope=_ROPE)
MINISTRAL = Family(_ministral, rope=_ROPE, kv_heads_default=True)
MINISTRAL3 = Family(_ministral3, rope=Rope(theta=1e6), kv_heads_default=True)
# Mistral 3 is one of them with a vision tower, which is not loaded.
MISTRAL3_TEXT = replace(MINISTRAL3, names=Names(**_TOWER), text="text_config")

# -- OLMo ----------------------------------------------------------------------------------------------------


def _olmo2(fields: Fields, layers: int) -> Traits:
    return Traits(**biases(fields), qk_norm=True, qk_norm_scope="heads")


def _olmo3_kinds(fields: Fields, layers: int) -> tuple[str, ...]:
    return layer_types(fields, layers, 4)


def _olmo3(fields: Fields, layers: int) -> Traits:
    windows = windows_of(_olmo3_kinds(fields, layers), fields.integer("sliding_window", 4096))
    return replace(_olmo2(fields, layers), windows=windows)


_OLMO_THETA = 500000.0
OLMO2 = Family(
    _olmo2,
    Names(
        attention_norm=None,
        attention_post_norm=_LAYER + "post_attention_layernorm.weight",
        mlp_norm=None,
        mlp_post_norm=_LAYER + "post_feedforward_layernorm.weight",
    ),
    rope=Rope(theta=_OLMO_THETA),
    kv_heads_default=True,
)
# Positions are scaled in the layers without a window only.
_OLMO3_ROPE = Rope(theta=_OLMO_THETA, kinds=_olmo3_kinds, local=("rope_theta", _OLMO_THETA))
OLMO3 = replace(OLMO2, traits=_olmo3, rope=_OLMO3_ROPE)

# -- Phi -----------------------------------------------------------------------------------------------------


def _phi(fields: Fields, layers: int) -> Traits:
    if fields.flag("qk_layernorm", False):
        raise fields.fail("'qk_layernorm' is not supported")
    return Traits(
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        head_bias=True,
        norm="layer",
        norm_bias=True,
        gated=False,
        parallel=True,
    )


def _windowed(fields: Fields, layers: int) -> Traits:
    return Traits(windows=one_window(fields, layers))


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
_PHI3_QKV = _LAYER + "self_attn.qkv_proj"
PHI3 = Family(
    _windowed,
    Names(query=_PHI3_QKV, key=_PHI3_QKV, value=_PHI3_QKV, gate=_GATE_UP, up=_GATE_UP),
    rope=Rope(theta=10000.0, partial=1.0),
    kv_heads_default=True,
)

# -- Qwen ----------------------------------------------------------------------------------------------------


def _qwen2(fields: Fields, layers: int) -> Traits:
    return Traits(windows=layered_windows(fields, layers), qkv_bias=True)


def _qwen3(fields: Fields, layers: int) -> Traits:
    return Traits(windows=layered_windows(fields, layers), **biases(fields), qk_norm=True)


QWEN2 = Family(_qwen2)
QWEN3 = Family(_qwen3)
# Their checkpoints use Qwen 2's names, or (transformers since 4.52) names below model.language_model.
QWEN2_VL = Family(
    _qwen2,
    Names(within="model.language_model."),
    rope=Rope(theta=1e6),
    text="text_config",
    flat=True,
    vision=qwen2_vision,
)
QWEN2_5_VL = replace(QWEN2_VL, vision=qwen2_5_vision)

# -- SmolLM 3 and StarCoder 2 --------------------------------------------------------------------------------


def _smollm3_ropes(fields: Fields, layers: int) -> tuple[str | None, ...]:
    return unturned_layers(fields, layers, exactly=True)


def _smollm3(fields: Fields, layers: int) -> Traits:
    windows: tuple[int | None, ...] = ()
    if fields.flag("use_sliding_window", False) and fields.has("sliding_window"):
        window = fields.integer("sliding_window")
        if fields.names("layer_types"):
            windows = windows_of(layer_types(fields, layers, layers), window)
        else:
            windows = tuple(window if kind is None else None for kind in _smollm3_ropes(fields, layers))
    return replace(_llama(fields, layers), windows=windows)


SMOLLM3 = Family(_smollm3, rope=Rope(theta=2e6, kinds=_smollm3_ropes), kv_heads_default=True, defaults=_TIED)


def _starcoder2(fields: Fields, layers: int) -> Traits:
    return Traits(
        windows=one_window(fields, layers),
        **biases(fields, "use_bias", default=True),
        mlp_bias=fields.flag("use_bias", True),
        norm="layer",
        norm_bias=True,
        gated=False,
    )


STARCODER2 = Family(
    _starcoder2,
    Names(up=_LAYER + "mlp.c_fc", down=_LAYER + "mlp.c_proj"),
    rope=_ROPE,
    renamed={"rms_norm_eps": "norm_epsilon"},
    defaults={"hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-5, **_TIED},
)
