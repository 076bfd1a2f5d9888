"""Arrays whose items must differ and have few values: masks offer neither a comma nor the begin of an item
where no value is left, so that nothing has to be taken back."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.grammar.byte_matcher import BYTES
from runtime.grammar.json_schema.finite import can_differ
from runtime.grammar.table import make_backend
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import BadConstraint
from runtime.protocol.vocabulary import Vocabulary

PIECES = (b'","', b'",', b',"', b'["', b'["a', b'"]', b"1,", b",1", b"[1", b"1]", b"true,", b",true", b'a"',
          b'b","a', b"],", b",[", b"12", b"[2", b"[3", b'["b","a', b",2,")  # fmt: skip
TOKENS = Vocabulary((*BYTES.tokens, *PIECES))
ENGINES = {
    name: make_backend(name, TOKENS, whitespace="compact") for name in ("llguidance", "outlines")
}  # fmt: skip
VALUES = ["a", "b", "ab", "é", 'a"', 1, 12, 2, True, None, -3, 0.5]


def walk(name, schema, most=3000):
    """(texts that masks lead to, texts they get stuck at), along single bytes; what longer tokens of masks
    lead to is looked at, too."""
    first = ENGINES[name].compile(Constraint("json_schema", json.dumps(schema)))
    whole, stuck, waiting = set(), set(), [(first, b"")]
    while waiting and most:
        most -= 1
        matcher, text = waiting.pop()
        allowed = matcher.mask()
        ids = {token for token in range(len(TOKENS)) if allowed.bits[token >> 5] >> (token & 31) & 1}
        if matcher.may_stop():
            whole.add(text.decode())
        elif not ids:
            stuck.add(text)
        for token in ids:
            after = matcher.copy()
            assert after.advance(token)
            if token < 256:
                waiting.append((after, text + TOKENS.tokens[token]))
            else:
                assert after.may_stop() or after.mask().bits.any(), (text, TOKENS.tokens[token])
    assert most, "too many texts"
    return whole, stuck


def arrays(values, low, high):
    found = itertools.chain(*(itertools.permutations(values, size) for size in range(low, high + 1)))
    return {json.dumps(list(one), separators=(",", ":"), ensure_ascii=False) for one in found}


@pytest.mark.parametrize("name", sorted(ENGINES))
@settings(deadline=None, max_examples=12)
@given(
    st.lists(st.sampled_from(VALUES), min_size=1, max_size=4, unique=True), st.integers(0, 3), st.booleans()
)
def test_every_mask_leads_to_an_end(name, values, low, listed):
    schema = {"type": "array", "items": {"enum": values}, "uniqueItems": True, "minItems": low}
    if listed:  # the same, said by two schemas
        schema = {
            **schema,
            "items": True,
            "allOf": [{"items": {"anyOf": [{"const": one} for one in values]}}],
        }
    if low > len(values):
        with pytest.raises(BadConstraint, match=r"nothing matches|no text can match"):
            walk(name, schema | {"items": {"enum": values}})
        return
    assert walk(name, schema) == (arrays(values, low, len(values)), set())


@pytest.mark.parametrize("name", sorted(ENGINES))
@pytest.mark.parametrize(
    ("schema", "count"),
    [
        ({"items": {"type": ["boolean", "null"]}}, 16),
        ({"items": {"type": "integer", "minimum": 1, "exclusiveMaximum": 4}}, 16),
        ({"items": {"type": "integer", "minimum": 8.5, "maximum": 11.5}}, 16),
        ({"items": {"enum": [1, 2, 3], "not": {"const": 2}}}, 5),
        ({"items": {"$ref": "#/$defs/few"}, "$defs": {"few": {"enum": ["a", "b"]}}}, 5),
        ({"prefixItems": [{"enum": ["a", "b"]}, {"const": "a"}], "minItems": 2, "items": False}, 1),
        ({"prefixItems": [{"enum": ["a", "b"]}, {"enum": ["a", "b"]}, {"enum": ["a", "c"]}], "minItems": 3,
          "items": False}, 2),
        ({"prefixItems": [{"enum": ["x"]}], "items": {"enum": ["a", "x"]}}, 3),
        ({"prefixItems": [{"enum": [1, 12]}, {"enum": [[1], [1, 2]]}], "items": {"enum": [12, 1]}}, 11),
        ({"items": {"oneOf": [{"const": "a"}, {"type": "null"}]}}, 5),
    ],
)  # fmt: skip
def test_the_same_for_other_finite_sets(name, schema, count):
    whole, stuck = walk(name, {"type": "array", "uniqueItems": True, **schema})
    assert (len(whole), stuck) == (count, set())


@given(st.lists(st.none() | st.frozensets(st.sampled_from("abcd"), max_size=3), max_size=4))
def test_can_differ(choices):
    bounded = [values for values in choices if values is not None]
    expected = any(len(set(picked)) == len(picked) for picked in itertools.product(*bounded))
    assert can_differ(choices) == expected


@pytest.mark.parametrize("text", [r'["\u0061", "b"]', "[1.0, 2]", "[ 2, 1 ]", '["b", "a", 2, 1e0]'])
def test_given_text_may_spell_them_as_json_does(small, text):
    schema = {"type": "array", "items": {"enum": ["a", "b", 1, 2]}, "uniqueItems": True}
    assert small.accepts(small.matcher(schema), text)
    assert not small.accepts(small.matcher(schema), text[:-1].rstrip() + ', "b", 2]')
