"""Command R and R+ (Cohere), Command R7B and A (Cohere 2): attention and feed-forward in parallel after one
LayerNorm, with neighbouring dimensions rotated together. Cohere 2 has sliding windows, and a rotary embedding
in the windowed layers only. Data only."""

from __future__ import annotations

from runtime.config.family import Family, Names, Rope, Traits, full_attention, layer_types, windows_of
from runtime.config.fields import Fields


def _with(fields: Fields, windows: tuple[int | None, ...]) -> Traits:
    bias = fields.flag("attention_bias", False)
    return Traits(
        windows=windows,
        qkv_bias=bias,
        output_bias=bias,
        norm="layer",
        qk_norm=fields.flag("use_qk_norm", False),
        qk_norm_scope="each_head",
        parallel=True,
        logit_scale=fields.number("logit_scale", 0.0625),
    )


def _cohere(fields: Fields, layers: int) -> Traits:
    return _with(fields, full_attention(layers))


def _layer_types(fields: Fields, layers: int) -> tuple[str, ...]:
    return layer_types(fields, layers, fields.integer("sliding_window_pattern", 4))


def _cohere2(fields: Fields, layers: int) -> Traits:
    kinds = _layer_types(fields, layers)
    return _with(fields, windows_of(kinds, fields.integer("sliding_window", 4096)))


def _turned(fields: Fields, layers: int) -> tuple[str | None, ...]:
    return tuple("" if kind == "sliding_attention" else None for kind in _layer_types(fields, layers))


_NAMES = Names(mlp_norm="model.layers.{layer}.input_layernorm.weight")
_RENAMED = {"rms_norm_eps": "layer_norm_eps"}

COHERE = Family(
    _cohere,
    _NAMES,
    rope=Rope(theta=500000.0, pairs="neighbours"),
    renamed=_RENAMED,
    kv_heads_default=True,
    defaults={"tie_word_embeddings": True},
)
COHERE2 = Family(
    _cohere2,
    _NAMES,
    rope=Rope(theta=500000.0, pairs="neighbours", kinds=_turned),
    renamed=_RENAMED,
    kv_heads_default=True,
    defaults={"tie_word_embeddings": True},
)
