"""SmolLM 3: Llama's layers, every fourth without a rotary embedding (NoPE, arXiv 2501.18795). Data only."""

from __future__ import annotations

from runtime.config.family import Family, Rope, Traits, full_attention, layer_types, windows_of
from runtime.config.fields import Fields


def _kinds(fields: Fields, layers: int) -> tuple[str | None, ...]:
    turned = fields.ids("no_rope_layers")  # 1: the layer has a rotary embedding, in spite of the name
    if not turned:
        every = fields.integer("no_rope_layer_interval", 4)
        turned = tuple(int((layer + 1) % every != 0) for layer in range(layers))
    if len(turned) != layers:
        raise fields.fail(f"'no_rope_layers' has {len(turned)} entries for {layers} layers")
    return tuple("" if one else None for one in turned)


def _windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    if not fields.flag("use_sliding_window", False) or not fields.has("sliding_window"):
        return full_attention(layers)
    window = fields.integer("sliding_window")
    if fields.names("layer_types"):
        return windows_of(layer_types(fields, layers, layers), window)
    return tuple(window if kind is None else None for kind in _kinds(fields, layers))


def _traits(fields: Fields, layers: int) -> Traits:
    bias = fields.flag("attention_bias", False)
    return Traits(
        windows=_windows(fields, layers),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )


FAMILY = Family(
    _traits, rope=Rope(theta=2e6, kinds=_kinds), kv_heads_default=True, defaults={"tie_word_embeddings": True}
)
