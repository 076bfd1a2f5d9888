"""Qwen 3 (dense): queries and keys are normalised per head before the rotary embedding. Data only."""

from __future__ import annotations

from runtime.config.family import Family, Traits, layered_windows
from runtime.config.fields import Fields


def _traits(fields: Fields, layers: int) -> Traits:
    bias = fields.flag("attention_bias", False)
    return Traits(
        windows=layered_windows(fields, layers),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
    )


FAMILY = Family(_traits)
