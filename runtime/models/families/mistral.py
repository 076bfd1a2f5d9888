"""Mistral 7B and its successors, and Mixtral (arXiv 2401.04088). Data only.

Llama's shape with a sliding window in the first version. Ministral 8B has windows in some layers; in
Ministral 3 queries grow with their position. Mistral 3 is one of them with a vision tower, which is not
loaded. Mixtral has experts in every layer.
"""

from __future__ import annotations

from runtime.config.family import Family, Names, QueryGrowth, Rope, Traits, layer_types, windows_of
from runtime.config.fields import Fields
from runtime.config.parts.experts import ExpertNames, ExpertsSpec, RouterSpec, checked


def _mistral(fields: Fields, layers: int) -> Traits:
    # In the published format null means "no window"; a missing field is ambiguous, so it is refused.
    if "sliding_window" not in fields.values:
        raise fields.fail(
            "the field 'sliding_window' is missing", hint="null means attention without a window"
        )
    window = fields.integer("sliding_window") if fields.has("sliding_window") else None
    return Traits(windows=(window,) * layers)


def _ministral(fields: Fields, layers: int) -> Traits:
    window = fields.integer("sliding_window") if fields.has("sliding_window") else None
    # Without layer_types every layer has the window, if there is one.
    kinds = layer_types(fields, layers, layers + 1)
    return Traits(windows=windows_of(kinds, window))


def _ministral3(fields: Fields, layers: int) -> Traits:
    window = fields.integer("sliding_window") if fields.has("sliding_window") else None
    rope, growth = fields.child("rope_parameters"), None
    if rope.has("llama_4_scaling_beta"):
        growth = QueryGrowth(
            beta=rope.number("llama_4_scaling_beta"),
            every=rope.integer("original_max_position_embeddings"),
        )
    return Traits(windows=(window,) * layers, query_growth=growth)


MISTRAL = Family(_mistral, rope=Rope(theta=10000.0))
MINISTRAL = Family(_ministral, rope=Rope(theta=10000.0), kv_heads_default=True)
MINISTRAL3 = Family(_ministral3, rope=Rope(theta=1e6), kv_heads_default=True)
MISTRAL3_TEXT = Family(
    _ministral3,
    Names(prefix="language_model.", beside=("vision_tower.", "multi_modal_projector.")),
    rope=Rope(theta=1e6),
    kv_heads_default=True,
    text="text_config",
)


def _mixtral(fields: Fields, layers: int) -> Traits:
    # The published configuration has null for "no window"; transformers omits the field.
    window = fields.integer("sliding_window") if fields.has("sliding_window") else None
    return Traits(
        windows=(window,) * layers,
        experts=checked(
            fields,
            ExpertsSpec(
                (True,) * layers,
                count=fields.integer("num_local_experts"),
                width=fields.integer("intermediate_size"),
                router=RouterSpec(fields.integer("num_experts_per_tok"), renormalise=True),
            ),
        ),
    )


_EXPERT = "model.layers.{layer}.block_sparse_moe.experts.{expert}"
_MIXTRAL_NAMES = Names(
    experts=ExpertNames(
        router="model.layers.{layer}.block_sparse_moe.gate",
        gate=f"{_EXPERT}.w1",
        up=f"{_EXPERT}.w3",
        down=f"{_EXPERT}.w2",
    )
)
MIXTRAL = Family(_mixtral, _MIXTRAL_NAMES, rope=Rope(theta=10000.0))
