"""Which tokens may end a value: told in bulk, and the same as by asking of each."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest

from runtime.grammar.backends.llguidance_backend import LLGuidanceBackend
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


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:60])
def test_masks_are_what_each_token_would_be_told(backend: LLGuidanceBackend, schema: dict[str, Any]) -> None:
    first = backend.compile(Constraint("json_schema", json.dumps(schema)))
    assert first.origin.checked, "the schema has to be checked, or there is nothing to see"
    dice = random.Random(0)
    for _ in range(6):
        matcher, text = first.copy(), b""
        for _ in range(25):
            found = TokenBits.ids(matcher.mask().bits).tolist()
            one_by_one = [token for token in range(len(VOCABULARY)) if matcher.copy().advance(token)]
            assert found == one_by_one, text
            ways = [token for token in found if token not in VOCABULARY.eos]
            if not ways:
                break
            long = [token for token in ways if len(TOKENS[token]) > 1]
            token = dice.choice(long if long and dice.random() < 0.8 else ways)
            assert matcher.advance(token)
            text += TOKENS[token]
