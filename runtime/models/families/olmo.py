"""OLMo 2 (arXiv 2501.00656), OLMo 3 and OLMoE (arXiv 2409.02060). Data only.

Queries and keys are normalised over all heads together. OLMo 2 and 3 have norms after each half of a layer
instead of before it; OLMo 3 has sliding windows, and scales positions in the other layers only. OLMoE has
Llama's shape with experts in every layer.
"""

from __future__ import annotations

from runtime.config.family import Family, Names, Rope, Traits, full_attention, layer_types, windows_of
from runtime.config.fields import Fields
from runtime.config.parts.experts import ExpertsSpec, RouterSpec, checked, expert_count


def _with(fields: Fields, windows: tuple[int | None, ...]) -> Traits:
    bias = fields.flag("attention_bias", False)
    return Traits(
        windows=windows,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        qk_norm_scope="heads",
    )


def _olmo2(fields: Fields, layers: int) -> Traits:
    return _with(fields, full_attention(layers))


def _kinds(fields: Fields, layers: int) -> tuple[str, ...]:
    return layer_types(fields, layers, 4)


def _olmo3(fields: Fields, layers: int) -> Traits:
    return _with(fields, windows_of(_kinds(fields, layers), fields.integer("sliding_window", 4096)))


_NAMES = Names(
    attention_norm=None,
    attention_post_norm="model.layers.{layer}.post_attention_layernorm.weight",
    mlp_norm=None,
    mlp_post_norm="model.layers.{layer}.post_feedforward_layernorm.weight",
)
_THETA = 500000.0

OLMO2 = Family(_olmo2, _NAMES, rope=Rope(theta=_THETA), kv_heads_default=True)
OLMO3 = Family(
    _olmo3,
    _NAMES,
    rope=Rope(theta=_THETA, kinds=_kinds, local=("rope_theta", _THETA)),
    kv_heads_default=True,
)


def _olmoe(fields: Fields, layers: int) -> Traits:
    if fields.has("clip_qkv"):
        raise fields.fail("'clip_qkv' is not supported")
    bias = fields.flag("attention_bias", False)
    return Traits(
        windows=full_attention(layers),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        qk_norm_scope="heads",
        experts=checked(
            fields,
            ExpertsSpec(
                (True,) * layers,
                count=expert_count(fields),
                width=fields.integer("intermediate_size"),
                router=RouterSpec(
                    fields.integer("num_experts_per_tok"), renormalise=fields.flag("norm_topk_prob", False)
                ),
            ),
        ),
    )


OLMOE = Family(_olmoe, kv_heads_default=True, rope=Rope(theta=10000.0))
