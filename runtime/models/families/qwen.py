"""Qwen 2 and 2.5, Qwen 3, both with experts, and Qwen2-VL and Qwen2.5-VL. Data only.

Qwen 2 has biased query, key and value projections and an optional sliding window in the upper layers. Qwen 3
normalises queries and keys per head before the rotary embedding. With experts, Qwen 2 has a shared one behind
a gate. The VL models have a rotary embedding over three axes and a vision tower; their checkpoints use Qwen
2's names for the decoder, or (transformers since 4.52) names below model.language_model.
"""

from __future__ import annotations

from dataclasses import replace

from runtime.config.family import Family, Names, Rope, Traits, layered_windows
from runtime.config.fields import Fields
from runtime.config.parts.experts import ExpertsSpec, RouterSpec, checked, expert_count, sparse_layers
from runtime.config.parts.vision import qwen2_5_vision, qwen2_vision


def _qwen2(fields: Fields, layers: int) -> Traits:
    return Traits(windows=layered_windows(fields, layers), qkv_bias=True)


QWEN2 = Family(_qwen2)


def _qwen3(fields: Fields, layers: int) -> Traits:
    bias = fields.flag("attention_bias", False)
    return Traits(
        windows=layered_windows(fields, layers),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
    )


QWEN3 = Family(_qwen3)


def _qwen2_moe(fields: Fields, layers: int) -> Traits:
    return Traits(
        windows=layered_windows(fields, layers),
        qkv_bias=fields.flag("qkv_bias", True),
        experts=checked(
            fields,
            ExpertsSpec(
                sparse_layers(fields, layers),
                count=expert_count(fields),
                width=fields.integer("moe_intermediate_size"),
                router=RouterSpec(
                    fields.integer("num_experts_per_tok"), renormalise=fields.flag("norm_topk_prob", False)
                ),
                shared_width=fields.integer("shared_expert_intermediate_size"),
                shared_gate=True,
            ),
        ),
    )


QWEN2_MOE = Family(_qwen2_moe, kv_heads_default=True)


def _qwen3_moe(fields: Fields, layers: int) -> Traits:
    # Unlike in Qwen 3 without experts, a window applies to all layers.
    window = fields.integer("sliding_window") if fields.flag("use_sliding_window", False) else None
    bias = fields.flag("attention_bias", False)
    return Traits(
        windows=(window,) * layers,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        experts=checked(
            fields,
            ExpertsSpec(
                sparse_layers(fields, layers),
                count=expert_count(fields),
                width=fields.integer("moe_intermediate_size"),
                router=RouterSpec(
                    fields.integer("num_experts_per_tok"), renormalise=fields.flag("norm_topk_prob", False)
                ),
            ),
        ),
    )


QWEN3_MOE = Family(_qwen3_moe)


QWEN2_VL = Family(
    _qwen2,
    Names(within="model.language_model."),
    rope=Rope(theta=1e6),
    text="text_config",
    flat=True,
    vision=qwen2_vision,
)
QWEN2_5_VL = replace(QWEN2_VL, vision=qwen2_5_vision)
