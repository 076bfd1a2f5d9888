"""White space between the tokens of JSON is bounded under every policy, on every backend: no output is
endless because of it."""

from __future__ import annotations

import json

import pytest

from runtime.grammar.byte_matcher import ByteMatcher, byte_matcher
from runtime.protocol.errors import UnsupportedConstraint

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": "integer"}}, "b": {"type": "null"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
MOST = {"compact": 0, "single": 1, "flexible": 43}
"""Bytes of it in one place: of "flexible" a line break (two bytes) and 40 columns, or as many of any kind."""
SPACE = b" \n\t\r"


def longest(face: ByteMatcher, limit: int) -> int:
    """The longest run of white space that may come here, up to `limit`, whatever its bytes."""
    reached = {b"": face}
    for count in range(limit):
        after: dict[bytes, ByteMatcher] = {}
        for text, here in reached.items():
            for byte in SPACE:
                if byte in here.next_bytes():
                    twin = here.copy()
                    assert twin.advance(byte)
                    after.setdefault((text + bytes([byte]))[-2:], twin)
        if not after:
            return count
        reached = after
    return limit


@pytest.mark.parametrize("policy", MOST)
@pytest.mark.parametrize("backend", ["llguidance", "xgrammar", "outlines"])
def test_white_space_is_bounded_in_every_place(backend: str, policy: str) -> None:
    try:
        face = byte_matcher("json_schema", json.dumps(SCHEMA), backend, whitespace=policy)
    except UnsupportedConstraint:
        pytest.skip("no schemas on this backend")
    most = MOST[policy] * (2 if backend == "outlines" else 1)  # on both sides of what an array may leave out
    for number, byte in enumerate(b'{"a":[1,2],"b":null}'):
        if number % 3 == 0:
            assert longest(face.copy(), 60) <= most
        assert face.advance(byte)
    assert longest(face, 60) <= most
