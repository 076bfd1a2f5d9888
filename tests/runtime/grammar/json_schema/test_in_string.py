"""Masks inside of plain strings: those of the engine, without asking it each time."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from runtime.grammar.base import Matcher
from runtime.grammar.json_schema.in_string import StringMatcher
from runtime.grammar.json_schema.plain_strings import PlainMatcher
from runtime.grammar.json_schema.string_rules import Texts
from runtime.grammar.json_schema.tracker import STRING
from runtime.grammar.llguidance_backend import LLGuidanceBackend
from runtime.protocol.constraint import Constraint
from runtime.protocol.vocabulary import Vocabulary

PIECES = [
    "a", "ab", "abc", "abcdef", "abcdefghijkl", " the", "é", "日本", "😀", '"', '",', '", "', 'a"', 'ab",',
    'abc"}', '"]', '"}', "\\", '\\"', "\\n", "\\\\", "a\\", "\\u", "\\u00", "\\u0061", "ab\\n", '\\""',
    "\\ud83d", "\\ude00", ': "', ', "', '{"', "[", '["', "1", "12", "null",
]  # fmt: skip
TOKENS = tuple(
    dict.fromkeys(
        [*(bytes([value]) for value in range(256)), *(piece.encode() for piece in PIECES), b"a\xc3"]
    )
)
VOCABULARY = Vocabulary((*TOKENS, b""), frozenset({len(TOKENS)}), frozenset({len(TOKENS)}))
FREE, SHORT = {"type": "string"}, {"type": "string", "maxLength": 5}
UNLIKE = {"type": "array", "items": {"anyOf": [SHORT, {"type": "string", "minLength": 7}]}}
SCHEMAS: list[Any] = [
    FREE,
    SHORT,
    {"type": "string", "minLength": 3, "maxLength": 9},
    {"type": ["string", "null"], "maxLength": 40},
    {"type": "object", "properties": {"a": SHORT, "b": FREE, "é": {"type": "string", "minLength": 2}}},
    {"type": "array", "items": {"anyOf": [SHORT, {"type": "integer"}, {"type": "array", "items": SHORT}]}},
    UNLIKE,
    {"type": "array", "prefixItems": [SHORT, FREE], "items": {"type": "string", "enum": ["ab", "abc"]}},
    {"type": "object", "additionalProperties": {"type": "string", "maxLength": 3}},
    {"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "object", "properties": {
        "n": SHORT, "more": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
    }}}},
    {"type": "array", "uniqueItems": True, "items": SHORT},
    {"type": "string", "pattern": "^[a-f ]{0,9}$"},
    {"type": "array", "items": {"type": "string", "pattern": "^[^b]{2,}$"}},
    {"type": "object", "properties": {"a": {"type": "string", "pattern": "^[\"ab\\\\]{3}$"}}},
    {},
]  # fmt: skip
NAMES: list[Any] = [
    {"type": "object", "patternProperties": {"^ab": False}},
    {"type": "object", "patternProperties": {"^a": SHORT, "^ab": {"type": "integer"}}},
    {"type": "object", "patternProperties": {"^ab": {"type": "string", "minLength": 3, "maxLength": 2}}},
    {"type": "object", "properties": {"ab": SHORT}, "patternProperties": {"^a": FREE}},
    {"type": "object", "properties": {f"a{n}": SHORT for n in range(300)}},
    {"type": "object", "properties": {f"a{n}": SHORT for n in range(300)}, "required": ["a7"]},
    {"type": "object", "properties": {"s": {"enum": ["ab", "c"]}, "a": FREE}, "anyOf": [
        {"properties": {"s": {"maxLength": 1, "type": "string"}}}, {"properties": {"s": True, "b": SHORT}},
    ]},
]  # fmt: skip
"""Some of these names may not be had, or the engine is asked which."""


@pytest.fixture(scope="module")
def backend() -> LLGuidanceBackend:
    return LLGuidanceBackend(VOCABULARY, property_order="schema")


def within(matcher: Matcher) -> StringMatcher | PlainMatcher:
    while not isinstance(matcher, StringMatcher | PlainMatcher):
        matcher = matcher._inner  # type: ignore[attr-defined]
    return matcher


def engine(strings: StringMatcher | PlainMatcher) -> Matcher:
    """The engine itself, over all tokens, where `strings` is."""
    if isinstance(strings, StringMatcher):
        return strings._inner
    whole = strings._whole()
    assert whole.advance_bytes(strings._tracker.text())
    return whole


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("schema", [*SCHEMAS, *NAMES], ids=lambda schema: json.dumps(schema)[:60])
def test_masks_are_the_engines(
    backend: LLGuidanceBackend, schema: Any, plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not plain:  # as schemas are kept of which no string is known
        monkeypatch.setattr(Texts, "starting", lambda schema, rules: None)
    first = backend.compile(Constraint("json_schema", json.dumps(schema)))
    dice = random.Random(0)
    spared = 0
    for _ in range(12):
        matcher, taken = first.copy(), 0
        for _ in range(30):
            mask, strings = matcher.mask(), within(matcher)
            own = strings.mask()
            unasked = isinstance(strings, StringMatcher) and strings._inner._mask is None  # type: ignore[attr-defined]
            engines = engine(strings).mask()
            assert np.array_equal(own.bits, engines.bits), strings._tracker.text()
            assert (own.allowed is None) == (engines.allowed is None)
            if isinstance(strings, PlainMatcher):
                spared += strings._asked is None and strings._tracker.place.mode == STRING
            else:
                spared += unasked
            ways = np.flatnonzero(np.unpackbits(mask.bits.view(np.uint8), bitorder="little")).tolist()
            ways = [token for token in ways if token not in VOCABULARY.eos]
            if not ways:
                break
            if taken > 2 and dice.random() < 0.1:
                back = dice.randint(1, taken)
                matcher.rollback(back)
                taken -= back
                continue
            if dice.random() < 0.1:
                matcher = matcher.copy()
            long = [token for token in ways if token >= 256]
            assert matcher.advance(dice.choice(long if long and dice.random() < 0.8 else ways))
            taken += 1
    if schema not in NAMES:
        assert (spared > 0) == (schema is not UNLIKE), "the engine was asked each time"
