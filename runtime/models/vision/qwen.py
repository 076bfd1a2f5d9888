"""Qwen2-VL and Qwen2.5-VL: Qwen 2's decoder with a rotary embedding over three axes, beside a vision tower.
Checkpoints have the decoder's names as Qwen 2 has them, or (transformers since 4.52) below
model.language_model. Data only."""

from __future__ import annotations

from dataclasses import replace

from runtime.config.family import Family, Names, Rope, Traits, layered_windows
from runtime.config.fields import Fields
from runtime.config.parts.vision import qwen2_5_vision, qwen2_vision


def _traits(fields: Fields, layers: int) -> Traits:
    return Traits(windows=layered_windows(fields, layers), qkv_bias=True)


QWEN2 = Family(
    _traits,
    Names(within="model.language_model."),
    rope=Rope(theta=1e6),
    text="text_config",
    flat=True,
    vision=qwen2_vision,
)
QWEN2_5 = replace(QWEN2, vision=qwen2_5_vision)
