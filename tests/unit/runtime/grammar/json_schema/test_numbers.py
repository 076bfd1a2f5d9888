"""Bounds of numbers: masks spell every number within them, and none beyond."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from runtime.protocol.errors import BadConstraint
from tests.exploring import tries

decimals = st.builds(
    lambda digits, places: Decimal(digits).scaleb(-places), st.integers(-1300, 1300), st.integers(0, 4)
)
WORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
ENGINES = ["auto", "xgrammar"]


def number(value: Decimal) -> float | int:
    return int(value) if value == value.to_integral_value() else float(value)


def shown(value: Decimal) -> str:
    """Its shortest decimal spelling, the one that masks offer."""
    text = f"{value:f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text in ("-0", "") else text


def holds(word: str, value: Decimal, bound: Decimal) -> bool:
    match word:
        case "minimum":
            return value >= bound
        case "maximum":
            return value <= bound
        case "exclusiveMinimum":
            return value > bound
        case _:
            return value < bound


@settings(deadline=None, max_examples=tries(80))
@example({"maximum": Decimal("0.99")}, [Decimal("0.9")], None, "number", "auto")
@example({"minimum": Decimal("-1.106")}, [Decimal("0.1")], None, None, "auto")
@example({"maximum": Decimal("0.55")}, [], Decimal("0.25"), "number", "auto")
@example({"minimum": Decimal("4.05"), "maximum": Decimal("4.1")}, [], Decimal("0.1"), "number", "auto")
@given(
    st.dictionaries(st.sampled_from(WORDS), decimals, min_size=1, max_size=3), st.lists(decimals, max_size=8),
    st.sampled_from([None, None, None, Decimal("0.5"), Decimal("0.1"), Decimal(2)]),
    st.sampled_from(["number", None, "integer"]), st.sampled_from(ENGINES),
)  # fmt: skip
def test_every_number_within_the_bounds_is_offered(small, bounds, values, divisor, kind, engine):
    schema = {word: number(bound) for word, bound in bounds.items()}
    if divisor is not None:
        schema["multipleOf"] = number(divisor)
    if kind is not None:
        schema["type"] = kind
    step = Decimal("0.0001")
    near = [value for bound in bounds.values() for value in (bound, bound - step, bound + step, -bound)]
    cut = [Decimal(f"{bound:f}"[:end]) for bound in bounds.values()
           for end in range(len(f"{bound:f}")) if f"{bound:f}"[:end] not in ("", "-")]  # fmt: skip
    wanted = {
        value: all(holds(word, value, bound) for word, bound in bounds.items())
        and (kind != "integer" or value == value.to_integral_value())
        and (divisor is None or value % divisor == 0)
        for value in (*values, *near, *cut)
    }
    try:
        start = small.matcher(schema, engine)
    except BadConstraint:
        assert engine == "xgrammar" or not any(wanted.values())
        return
    for value, within in wanted.items():
        taken = small.accepts(start.copy(), shown(value))
        assert taken == within or (within and start.matcher.origin.narrowed), value


@pytest.mark.parametrize("bound", [0.99, 1.2345e-5, 12.5e-7, 1e-9, 123456.789012])
@pytest.mark.parametrize("sign", [1, -1])
def test_bounds_of_any_size(small, bound, sign):
    word = "maximum" if sign > 0 else "minimum"
    start = small.matcher({"type": "array", "items": {word: sign * bound}})
    places = len(f"{Decimal(repr(bound)):f}".partition(".")[2])
    for count in range(1, places + 1):
        text = f"{Decimal(repr(bound)):f}"
        cut = Decimal(text[: len(text) - places + count]) * sign
        assert small.accepts(start.copy(), f'[{shown(cut)}, "x"]'), cut
    beyond = Decimal(repr(bound)) * sign + (Decimal(1).scaleb(-places - 1) * sign)
    assert not small.accepts(start.copy(), f"[{shown(beyond)}]")
