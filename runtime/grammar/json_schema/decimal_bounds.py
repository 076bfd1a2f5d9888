"""The numbers within decimal bounds that the engine leaves out.

Of a bound of several decimal places, 0.99, its language has no number that is a beginning of it, 0.9, though
all others.
"""

from __future__ import annotations

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


def _is_within(value: Fraction, bounds: Mapping[str, float], divisor: float | None) -> bool:
    for word, bound in bounds.items():
        limit = Fraction(repr(bound))
        if value == limit and word.startswith("exclusive"):
            return False
        if value < limit if word.lower().endswith("minimum") else value > limit:
            return False
    return divisor is None or (value / Fraction(repr(divisor))).denominator == 1
