"""Gemma: norms around zero, a scaled embedding, GELU. Gemma 2 (arXiv 2408.00118) adds norms after each half
of a layer, softcaps of scores and logits, and sliding windows; Gemma 3 (arXiv 2503.19786) adds normalised
queries and keys, and a separate rotary embedding for windowed layers. Data only."""

from __future__ import annotations

import math
from dataclasses import replace

from runtime.config.family import Family, Names, Rope, Traits, full_attention, layer_types, windows_of
from runtime.config.fields import Fields


def _base(fields: Fields, windows: tuple[int | None, ...]) -> Traits:
    bias = fields.flag("attention_bias", False)
    return Traits(
        windows=windows,
        qkv_bias=bias,
        output_bias=bias,
        norm="rms_plus_one",
        embedding_scale=math.sqrt(fields.integer("hidden_size")),
    )


def _cap(fields: Fields, name: str, default: float | None) -> float | None:
    """null means no cap, a missing field the default."""
    if name in fields.values and not fields.has(name):
        return None
    return fields.number(name, default) if default is not None or fields.has(name) else None


def _windowed(fields: Fields, kinds: tuple[str, ...]) -> tuple[int | None, ...]:
    if fields.flag("use_bidirectional_attention", False):
        raise fields.fail("'use_bidirectional_attention' is not supported")
    return windows_of(kinds, fields.integer("sliding_window", 4096))


def _gemma(fields: Fields, layers: int) -> Traits:
    return _base(fields, full_attention(layers))


def _gemma2(fields: Fields, layers: int) -> Traits:
    return replace(
        _base(fields, _windowed(fields, layer_types(fields, layers, 2))),
        attention_scale=fields.integer("query_pre_attn_scalar", 256) ** -0.5,
        attention_softcap=_cap(fields, "attn_logit_softcapping", 50.0),
        logit_softcap=_cap(fields, "final_logit_softcapping", 30.0),
    )


def _gemma3_kinds(fields: Fields, layers: int) -> tuple[str, ...]:
    return layer_types(fields, layers, fields.integer("sliding_window_pattern", 6))


def _gemma3(fields: Fields, layers: int) -> Traits:
    return replace(
        _base(fields, _windowed(fields, _gemma3_kinds(fields, layers))),
        qk_norm=True,
        attention_scale=fields.integer("query_pre_attn_scalar", 256) ** -0.5,
        logit_softcap=_cap(fields, "final_logit_softcapping", None),
    )


_LAYER = "model.layers.{layer}."
_NAMES = Names(
    attention_post_norm=_LAYER + "post_attention_layernorm.weight",
    mlp_norm=_LAYER + "pre_feedforward_layernorm.weight",
    mlp_post_norm=_LAYER + "post_feedforward_layernorm.weight",
)
# The first Gemma's configurations have "gelu" in hidden_act and mean the tanh approximation.
_RENAMED = {"hidden_act": "hidden_activation"}
_DEFAULTS = {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}
_ROPE3 = Rope(theta=1e6, kinds=_gemma3_kinds, local=("rope_local_base_freq", 10000.0))

GEMMA = Family(_gemma, rope=Rope(theta=10000.0), renamed=_RENAMED, defaults=_DEFAULTS)
GEMMA2 = Family(_gemma2, _NAMES, rope=Rope(theta=10000.0), renamed=_RENAMED, defaults=_DEFAULTS)
GEMMA3 = Family(_gemma3, _NAMES, rope=_ROPE3, renamed=_RENAMED, defaults=_DEFAULTS)
# Published with a vision tower, and with configurations that omit common values.
GEMMA3_TEXT = Family(
    _gemma3,
    replace(_NAMES, prefix="language_model.", beside=("vision_tower.", "multi_modal_projector.")),
    rope=_ROPE3,
    renamed=_RENAMED,
    defaults={
        **_DEFAULTS,
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
    },
    text="text_config",
)
