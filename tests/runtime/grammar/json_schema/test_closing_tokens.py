"""Which tokens may end a value: told in bulk, and the same as by asking of each."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest

from runtime.grammar.backends.llguidance_backend import LLGuidanceBackend
from runtime.grammar.json_schema.checks.checked import CheckedMatcher
from runtime.grammar.masks.token_bits import TokenBits
from runtime.protocol.constraint import Constraint
from runtime.protocol.vocabulary import Vocabulary

HEADS = ("", "a", "b", "ab", "kind", "\\", '\\"', "\\u0061", "a\\n", "é", "\\ud83d", "1")
TAILS = (
    "",
    ",",
    ", ",
    ": ",
    ':"',
    ', "',
    '":',
    '", "',
    "}",
    "},",
    "}}",
    "]",
    '],"',
    '},{"',
    ":[",
    ":{",
    ":1,",
    " \n",
)
PIECES = [
    *(f'{head}"{tail}'.encode() for head, tail in itertools.product(HEADS, TAILS)),
    *("".join((lead, '"', head, '"', tail)).encode()
      for lead, head, tail in itertools.product((",", ", ", ""), HEADS, TAILS[:4])),
    b"1,", b"1}", b"12", b"true", b"true,", b"null]", b"]}", b"}}", b"},", b" ]", b"\xc3", b'\xa9"', b"{}",
    b"[]", b'{"', b"{\n", b',"', b': "', b"1.5 ", b"[1,", b"[[", b"]]",
]  # fmt: skip
TOKENS = tuple(dict.fromkeys([*(bytes([value]) for value in range(256)), *PIECES]))
VOCABULARY = Vocabulary((*TOKENS, b""), frozenset({len(TOKENS)}), frozenset({len(TOKENS)}))

LOOSE: dict[str, Any] = {"type": "array", "items": {"type": ["string", "integer", "array", "object"]}}
SCHEMAS: list[dict[str, Any]] = [
    {"type": "array", "uniqueItems": True},
    {**LOOSE, "uniqueItems": True, "maxItems": 4},
    {
        "type": "array",
        "items": {"type": "array", "uniqueItems": True, "items": {"enum": ["a", "b", 1, "ab"]}},
    },
    {"type": "object", "additionalProperties": {"type": "string", "not": {"enum": ["a", "b", "kind"]}}},
    {"type": "object", "additionalProperties": {"type": ["string", "array"], "not": {"pattern": "^a"}}},
    {"type": "object", "propertyNames": {"not": {"const": "a"}}},
    {"type": "object", "minProperties": 2, "additionalProperties": {"type": "object", "maxProperties": 1}},
    {
        "type": "object",
        "patternProperties": {"^a": False, "b$": {"type": "integer"}},
        "not": {"required": ["b"]},
    },
    {"type": "array", "contains": {"const": "ab"}, "items": {"type": ["string", "null", "boolean"]}},
    {"type": "array", "items": {"type": "integer", "not": {"multipleOf": 3}}},
    {
        "type": "object",
        "properties": {"kind": {"enum": ["a", "b"]}, "a": {"type": ["string", "integer"]}},
        "if": {"properties": {"kind": {"const": "a"}}},
        "then": {"required": ["a"]},
        "else": {"not": {"required": ["a"]}},
    },
]


@pytest.fixture(scope="module")
def backend() -> LLGuidanceBackend:
    return LLGuidanceBackend(VOCABULARY)


def asked_one_by_one(matcher: CheckedMatcher) -> list[int]:
    tracker, bits = matcher._tracker, matcher._closing_tokens.bits
    wide = TokenBits.ids(matcher._inner.mask().bits).tolist()
    return [
        token
        for token in wide
        if (tracker.complete() if token in VOCABULARY.eos else tracker.allows(bits.texts[token]))
    ]


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:60])
def test_masks_are_what_each_token_would_be_told(backend: LLGuidanceBackend, schema: dict[str, Any]) -> None:
    first = backend.compile(Constraint("json_schema", json.dumps(schema)))
    assert isinstance(first, CheckedMatcher), "the schema has to be checked, or there is nothing to see"
    dice = random.Random(0)
    refused = 0
    for _ in range(6):
        matcher = first.copy()
        for _ in range(25):
            place, text = matcher._tracker.place, matcher._tracker.text()
            found = TokenBits.ids(matcher.mask().bits).tolist()
            assert matcher._tracker.place == place
            assert matcher._tracker.text() == text
            assert found == asked_one_by_one(matcher), text
            refused += TokenBits.count(matcher._inner.mask()) - len(found)
            ways = [token for token in found if token not in VOCABULARY.eos]
            if not ways:
                break
            long = [token for token in ways if len(TOKENS[token]) > 1]
            assert matcher.advance(dice.choice(long if long and dice.random() < 0.8 else ways))
    assert refused, "no token was refused: the walk is no test"
