"""Llama 4, its language model: every fourth layer has no rotary embedding, and its queries grow with their
position; one of many experts beside a shared one. Data only.

The other layers attend within chunks. Contexts are limited to the first chunk (8,192 tokens in the published
models), in which that equals full attention.
"""

from __future__ import annotations

from dataclasses import replace

from runtime.config.family import Family, Names, QueryGrowth, Rope, Traits, full_attention
from runtime.config.fields import Fields
from runtime.config.parts.experts import (
    ExpertNames,
    ExpertsSpec,
    RouterSpec,
    StackNames,
    checked,
    expert_count,
)


def _traits(fields: Fields, layers: int) -> Traits:
    bias = fields.flag("attention_bias", False)
    growth = None
    # Some published configurations have a number here, as the first version of the format had.
    if fields.values.get("attn_temperature_tuning", True):
        growth = QueryGrowth(
            beta=fields.number("attn_scale", 0.1),
            every=int(fields.number("floor_scale", 8192)),
            shift=1,
            turned=False,
        )
    return Traits(
        windows=full_attention(layers),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=fields.flag("use_qk_norm", True),
        qk_norm_scope="turned_head",
        query_growth=growth,
        longest=fields.integer("attention_chunk_size") if fields.has("attention_chunk_size") else None,
        experts=checked(
            fields,
            ExpertsSpec(
                _layers(fields, layers),
                count=expert_count(fields),
                width=_width(fields),
                router=RouterSpec(
                    fields.integer("num_experts_per_tok", 1), scores="sigmoid", weighs_inputs=True
                ),
                shared_width=_width(fields),
            ),
        ),
    )


def _width(fields: Fields) -> int:
    """The width of an expert; for other layers the field has another meaning."""
    return Fields(fields.values, fields.source).integer("intermediate_size")


def _layers(fields: Fields, layers: int) -> tuple[bool, ...]:
    listed = fields.ids("moe_layers")
    if fields.has("moe_layers"):
        return tuple(layer in listed for layer in range(layers))
    step = fields.integer("interleave_moe_layer_step", 1)
    return tuple((layer + 1) % step == 0 for layer in range(layers))


def _kinds(fields: Fields, layers: int) -> tuple[str | None, ...]:
    turned = fields.ids("no_rope_layers")
    if not turned:
        every = fields.integer("no_rope_layer_interval", 4)
        turned = tuple(int((layer + 1) % every != 0) for layer in range(layers))
    if len(turned) < layers:
        raise fields.fail(f"'no_rope_layers' has {len(turned)} entries for {layers} layers")
    return tuple("" if turned[layer] else None for layer in range(layers))


_LAYER = "model.layers.{layer}.feed_forward"
NAMES = Names(
    gate=f"{_LAYER}.gate_proj",
    up=f"{_LAYER}.up_proj",
    down=f"{_LAYER}.down_proj",
    experts=ExpertNames(
        router=f"{_LAYER}.router",
        gate=_LAYER + ".experts.{expert}.gate_proj",
        up=_LAYER + ".experts.{expert}.up_proj",
        down=_LAYER + ".experts.{expert}.down_proj",
        shared_gate=f"{_LAYER}.shared_expert.gate_proj",
        shared_up=f"{_LAYER}.shared_expert.up_proj",
        shared_down=f"{_LAYER}.shared_expert.down_proj",
        stack=StackNames(f"{_LAYER}.experts.gate_up_proj", f"{_LAYER}.experts.down_proj"),
    ),
)
FAMILY = Family(
    _traits,
    NAMES,
    rope=Rope(theta=500000.0, pairs="neighbours", kinds=_kinds),
    renamed={"intermediate_size": "intermediate_size_mlp"},
)
# As published, with a vision tower.
WITH_TOWER = replace(
    FAMILY,
    names=replace(NAMES, prefix="language_model.", beside=("vision_model.", "multi_modal_projector.")),
    text="text_config",
)
