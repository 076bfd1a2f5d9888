"""Decimal bounds as the engine reads them rightly.

Of a bound of several decimal places, 0.99, its language has no number that is a beginning of it, 0.9, though
all others. It counts the multiples of a fraction between two bounds in floating point, where 4.1 / 0.1 is
less than 41.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction


def shorter_within(bounds: Mapping[str, float], divisor: float | None) -> list[float]:
    """The bounds cut to fewer decimal places, as far as they are within all of `bounds` (minimum, ...) and
    multiples of `divisor`."""
    found: dict[float, None] = {}
    for bound in bounds.values():
        whole, _, places = f"{Decimal(repr(bound)):f}".partition(".")
        for count in range(1, len(places)):
            text = f"{whole}.{places[:count]}"
            if float(text) and _is_within(Fraction(text), bounds, divisor):
                found[float(text)] = None
    return [int(value) if value.is_integer() else value for value in found]


def between_multiples(bounds: Mapping[str, float], divisor: float) -> dict[str, float]:
    """Bounds with the same multiples of `divisor`, which is no whole number, within them; a quarter of it
    away from the nearest. As they are where none is within."""
    step, lowest, highest = Fraction(repr(divisor)), None, None
    for word, bound in bounds.items():
        ratio = Fraction(repr(bound)) / step
        if word.lower().endswith("minimum"):
            first = math.floor(ratio) + 1 if word.startswith("exclusive") else math.ceil(ratio)
            lowest = first if lowest is None else max(lowest, first)
        else:
            last = math.ceil(ratio) - 1 if word.startswith("exclusive") else math.floor(ratio)
            highest = last if highest is None else min(highest, last)
    if lowest is not None and highest is not None and lowest > highest:
        return dict(bounds)
    quarter, made = Fraction(1, 4), {}
    if lowest is not None:
        made["minimum"] = float((lowest - quarter) * step)
    if highest is not None:
        made["maximum"] = float((highest + quarter) * step)
    return made


def _is_within(value: Fraction, bounds: Mapping[str, float], divisor: float | None) -> bool:
    for word, bound in bounds.items():
        limit = Fraction(repr(bound))
        if value == limit and word.startswith("exclusive"):
            return False
        if value < limit if word.lower().endswith("minimum") else value > limit:
            return False
    return divisor is None or (value / Fraction(repr(divisor))).denominator == 1
