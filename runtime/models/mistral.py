"""Mistral 7B and its successors: Llama's shape with, in the first version, a sliding window. Data only."""

from __future__ import annotations

from runtime.config.family import Family, Traits
from runtime.config.fields import Fields


def _traits(fields: Fields, layers: int) -> Traits:
    # The published format says null for "no window"; a missing field would leave it open, so it is refused.
    if "sliding_window" not in fields.values:
        raise fields.fail(
            "the field 'sliding_window' is missing", hint="null means attention without a window"
        )
    window = fields.integer("sliding_window") if fields.has("sliding_window") else None
    return Traits(windows=(window,) * layers)


FAMILY = Family(_traits, rope_theta_default=10000.0)
