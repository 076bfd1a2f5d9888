"""Arrays whose items must differ and are listed: no more of them than there are values, and ends are met."""

from __future__ import annotations

import json

import pytest

from runtime.grammar.byte_matcher import BYTES
from runtime.grammar.table import make_backend
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import BadConstraint

BACKEND = make_backend("auto", BYTES, whitespace="compact")


def compiled(schema):
    return BACKEND.compile(Constraint("json_schema", json.dumps({"type": "array", **schema})))


def test_there_are_no_more_items_than_values():
    matcher = compiled({"items": {"enum": ["a", "b", 1, 1.0]}, "uniqueItems": True})
    assert matcher.advance_bytes(b'["b",1,"a"')
    assert matcher.next_bytes() == {ord("]")}


def test_fewer_values_than_items_match_nothing():
    with pytest.raises(BadConstraint, match="nothing matches"):
        compiled({"items": {"enum": ["a", "b"]}, "uniqueItems": True, "minItems": 3})


@pytest.mark.parametrize(
    "schema",
    [
        {"items": {"enum": ["a", "b", "ab"]}, "minItems": 2},
        {"items": {"type": "integer", "minimum": 1, "maximum": 3}, "maxItems": 3},
        {"prefixItems": [{"enum": ["a", "b"]}, {"const": "a"}], "minItems": 2, "items": False},
        {"items": {"$ref": "#/$defs/few"}, "$defs": {"few": {"enum": ["a", "b"]}}, "maxItems": 2},
    ],
)
def test_an_end_is_found_from_wherever_masks_lead(schema):
    """Where no value is left, the last steps are taken back."""
    matcher = compiled({**schema, "uniqueItems": True})
    for _ in range(200):
        if matcher.may_stop():
            break
        rejection = matcher.verdict()
        if rejection is not None:
            assert rejection.back
            matcher.retract(rejection)
            continue
        ways = sorted(matcher.next_bytes())
        assert matcher.advance(ways[-1] if ways[-1] < 0x5D else ways[0])
    assert matcher.may_stop()
