"""Phi 3, 3.5 and 4: Llama's layers, with queries, keys and values in one tensor, and gate and up in another.
Data only."""

from __future__ import annotations

from runtime.config.family import Family, Names, Rope, Traits
from runtime.config.fields import Fields


def _traits(fields: Fields, layers: int) -> Traits:
    window = fields.integer("sliding_window") if fields.has("sliding_window") else None
    return Traits(windows=(window,) * layers)


_QKV = "model.layers.{layer}.self_attn.qkv_proj"
_GATE_UP = "model.layers.{layer}.mlp.gate_up_proj"
FAMILY = Family(
    _traits,
    Names(query=_QKV, key=_QKV, value=_QKV, gate=_GATE_UP, up=_GATE_UP),
    rope=Rope(theta=10000.0, partial=1.0),
    kv_heads_default=True,
)
