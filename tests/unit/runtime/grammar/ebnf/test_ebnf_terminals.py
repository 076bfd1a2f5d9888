"""Terminals of recursive grammars: what may be read by a lexer, longest match first, and what may not; the
language and the masks stay those of the definition."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.grammar.byte_matcher import byte_matcher
from runtime.grammar.ebnf import spelling as ebnf_spelling
from runtime.grammar.ebnf import terminals as ebnf_terminals
from runtime.grammar.ebnf.reading import parse_ebnf
from runtime.grammar.ebnf.spelling import as_regex
from runtime.grammar.ebnf.terminals import split
from runtime.grammar.ebnf.tree import Chars, Grammar, Repeat
from runtime.grammar.table import make_backend
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import BadConstraint
from tests.exploring import tries
from tests.unit.runtime.grammar.ebnf.test_ebnf import CASES, accepts, matches


def longest(spec: str) -> set[str]:
    """Texts of the terminals of several characters: of each its first one, spelled by the first choices."""
    grammar, terminals = split(parse_ebnf(spec))
    found = {_example(grammar.rules[name]) for name in terminals}
    return {text for text in found if len(text) > 1}


def _example(node) -> str:
    match node:
        case Chars(ranges):
            return chr(ranges[0][0])
        case Repeat(item, low, _):
            return _example(item) * max(low, 2)
    parts = getattr(node, "items", None)
    return "".join(map(_example, parts)) if parts is not None else _example(node.options[0])


@pytest.mark.parametrize(
    ("spec", "found"),
    [
        ('root ::= "(" root ")" | [0-9]+ ("." [0-9]+)? | [a-z] [a-z]*', {"00.00.00", "aaa"}),
        ('root ::= "<" root ">" | name "end"\nname ::= [a-z]+', {"aaend"}),
        ('root ::= "<" root ">" | name (root | "-") "end"\nname ::= [a-z]+', {"end"}),
        ('root ::= ([éè]{1,2} [^a(] ("ba" | root))?', {"ba"}),
        ('root ::= ([éè]{1,2} [a(] ("ba" | root))?', {"èè", "ba"}),
        ('root ::= "<" root ">" | name " end"\nname ::= [a-z]+', {"aa end"}),
        ('root ::= "[" root "]" | "true" | "tree"', {"true", "tree"}),
        ('root ::= "[" root "]" | "if" root | [a-z]', {"if"}),
        ('root ::= "[" root "]" | "if " root | [a-z]+', {"if ", "aa"}),
        ('root ::= "é" root | [aè]+ root "é" | "b"', set()),  # é and è begin with the same byte
        ('root ::= "é" root | [bè]+ "z" | "a"', {"bbz"}),
        ('root ::= [a]* root "b" | "c"', set()),
        ('root ::= "[" [a]* "(" root ")" [a]* "]" | "c"', {"aa"}),
        ('root ::= x root y | "c"\nx ::= "ab"?\ny ::= "d" "e"', {"abab", "de"}),
        ('root ::= "(" root ")" | [a]{299}', {"a" * 299}),
        ('root ::= "(" root ")" | [a]{300}', set()),
    ],
)
def test_which_parts_are_terminals(spec, found):
    assert longest(spec) == found


def test_all_is_told_where_the_look_is_given_up(monkeypatch):
    monkeypatch.setattr(ebnf_terminals, "MAX_TERMINALS", 2)
    spec = 'root ::= "(" root ")" | [0-9]+ | [a-z]+'
    assert longest(spec) == set()
    assert accepts(byte_matcher("ebnf", spec, "llguidance"), "((17))")


ATOMS = [
    '"a"', '"b"', '"ab"', '"ba"', "[ab]", "[a]+", "[ab]*", '"é"', '"è"', "[éa]+", "[aè]", '"("', '")"',
    '"éa"', '" "?', "[^a(]", "root", "x", "y", "z",
]  # fmt: skip
LEXEMES = ["[ab]+", "[a] [ab]*", '"a" | "ab"', "[éè]{1,2}", '"(" [ab]* ")"']
COUNTS = ["*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}"]
BODIES = st.recursive(
    st.sampled_from(ATOMS),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(" ".join),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]} | {pair[1]})"),
        st.tuples(inner, st.sampled_from(COUNTS)).map(lambda pair: f"({pair[0]}){pair[1]}"),
    ),
    max_leaves=6,
)


def recursive(root: str, x: str, y: str, z: str) -> tuple[str, Grammar] | None:
    spec = f'root ::= {root} | "(" root ")" x\nx ::= {x}\ny ::= {y}\nz ::= {z}\n'
    try:
        grammar = parse_ebnf(spec)
    except BadConstraint:
        return None
    return None if as_regex(grammar) is not None else (spec, grammar)


@settings(deadline=None, max_examples=tries(60))
@given(BODIES, BODIES, BODIES, st.sampled_from(LEXEMES), st.integers(0, 1 << 30))
def test_the_language_is_that_of_the_definition(root, x, y, z, seed):
    found = recursive(root, x, y, z)
    if found is None:
        return
    spec, grammar = found
    pick = random.Random(seed)
    texts = {"".join(pick.choices("ab()éè", k=pick.randint(0, 5))) for _ in range(12)}
    face = byte_matcher("ebnf", spec, "llguidance")
    for _ in range(3):
        walk, text = face.copy(), b""
        while len(text) < 7 and (offered := sorted(set("ab()éè".encode()) & walk.next_bytes())):
            text += bytes([pick.choice(offered)])
            assert walk.advance(text[-1])
            if walk.may_stop():
                texts.add(text.decode())
    for text in texts:
        assert accepts(face, text) == matches(grammar, text), text


WALKED = ["arithmetic", "json", "nested", "left recursion", "greedy tokens would fail"]


@pytest.mark.parametrize("name", WALKED)
def test_masks_are_those_of_single_characters(name, monkeypatch, trained):
    """Along walks, over all tokens."""
    vocabulary = trained("gpt2").vocabulary
    spec, backend = CASES[name][0], make_backend("llguidance", vocabulary)
    quick = backend.compile(Constraint("ebnf", spec))

    monkeypatch.setattr(ebnf_spelling, "split", ebnf_terminals.single)
    plain = backend.compile(Constraint("ebnf", spec))
    pick = random.Random(3)
    for _ in range(8):
        one, other = quick.copy(), plain.copy()
        for _ in range(12):
            mask = one.mask()
            assert (mask.bits == other.mask().bits).all()
            assert one.may_stop() == other.may_stop()
            ids = [n for n in range(len(vocabulary)) if int(mask.bits[n >> 5]) >> (n & 31) & 1]
            ids = [n for n in ids if n not in vocabulary.eos]
            if not ids:
                break
            token = pick.choice(ids)
            assert one.advance(token)
            assert other.advance(token)
