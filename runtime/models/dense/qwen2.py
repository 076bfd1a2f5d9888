"""Qwen 2 and 2.5: biased query, key and value projections; an optional window in the upper layers. Data
only."""

from __future__ import annotations

from runtime.config.family import Family, Traits, layered_windows
from runtime.config.fields import Fields


def _traits(fields: Fields, layers: int) -> Traits:
    return Traits(windows=layered_windows(fields, layers), qkv_bias=True)


FAMILY = Family(_traits)
