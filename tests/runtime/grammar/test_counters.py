"""Bounded repeats are counted: the same language as when written out, at a cost that does not grow."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.grammar.automaton import Limits
from runtime.grammar.byte_automaton import DEAD
from runtime.grammar.counted_dfa import CountedByteDfa
from runtime.grammar.dfa import compile_regex
from runtime.grammar.masks import TokenAutomaton, TokenSpace
from runtime.grammar.outlines_backend import OutlinesGrammarBackend
from runtime.grammar.plain_tokens import plain_tokens
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import BadConstraint

LETTERS = "aabbcé日"
JSON_CHARACTER = r'(?:[^"\\\x00-\x1f\x7f]|\\["\\nrtbf])'

leaves = st.sampled_from(["a", "b", "[ab]", "[a-c]", "é", "[é日]", "(?:a|bc)", "[^a]"])


def grown(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    bounds = st.tuples(st.integers(0, 3), st.integers(0, 4), st.booleans())
    return st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda p: f"(?:{p[0]}|{p[1]})"),
        st.tuples(inner, st.sampled_from("*+?")).map(lambda p: f"(?:{p[0]}){p[1]}"),
        st.tuples(inner, bounds).map(
            lambda p: f"(?:{p[0]}){{{p[1][0]},{'' if p[1][2] else max(p[1][0] + p[1][1], 1)}}}"
        ),
    )


patterns = st.recursive(leaves, grown, max_leaves=6)


def accepts(dfa, text):
    state = dfa.walk(0, text.encode())
    return state != DEAD and dfa.accepts(state)


@settings(max_examples=80, deadline=None)
@given(
    patterns, st.lists(st.text(st.sampled_from(LETTERS), max_size=8), min_size=5, max_size=12), st.integers()
)
def test_counted_repeats_are_what_fullmatch_takes(pattern, texts, seed):
    dfa, wanted, pick = compile_regex(pattern, unrolled=1), re.compile(pattern), random.Random(seed)
    for text in texts:
        assert accepts(dfa, text) == bool(wanted.fullmatch(text)), f"{pattern} on {text!r}"
    for _ in range(4):
        state, data = 0, bytearray()
        for _ in range(12):
            if dfa.accepts(state) and (dfa.is_final(state) or pick.random() < 0.3):
                break
            ways = dfa.next_bytes(state)
            assert ways, "no dead end"
            byte = pick.choice(ways)
            assert dfa.step(state, byte) == dfa.following(state)[byte]
            state = dfa.step(state, byte)
            data.append(byte)
        if dfa.accepts(state):
            assert wanted.fullmatch(data.decode())


PLAINER = {"(a{1,500}){1,500}": "a{1,250000}", "(a?){5000}": "a{0,5000}"}
"""The same language without a choice of ways: `re` goes through all of them."""


@pytest.mark.parametrize(
    ("pattern", "counted"),
    [
        (r'"[^"]{0,256}"', True),
        (r"\w{3,4096}", True),
        ("(a{1,500}){1,500}", True),
        ("(ab?){0,300}", True),
        ("(?:[a-z]{1,50},){0,100}", True),
        (f'(?:"{JSON_CHARACTER}{{0,64}}",){{2,80}}', True),
        ("[a-z]{2,33}[a-c]{1,32}", False),
        (".*[ab]{40}", False),
        ("a{1000,}b", True),
        ("(a?){5000}", True),
        ("(?:a{1,40}|[ab]{1,60})c", True),
    ],
)
def test_what_is_counted_and_what_is_written_out(pattern, counted):
    try:
        dfa = compile_regex(pattern)
    except BadConstraint:
        assert not counted
        return
    assert isinstance(dfa, CountedByteDfa) == counted
    wanted, pick = re.compile(PLAINER.get(pattern, pattern)), random.Random(1)
    for size in (0, 1, 2, 3, 30, 50, 64, 255, 256, 257, 300, 301, 4096):
        for text in ("a" * size, "a" * size + "b", '"' + "a" * size + '"', "a," * size, 'x"a",' * size):
            assert accepts(dfa, text) == bool(wanted.fullmatch(text)), (pattern, size, text[:20])
        text = "".join(pick.choices("abc", k=size))
        assert accepts(dfa, text) == bool(wanted.fullmatch(text))


def test_the_cost_does_not_grow_with_the_bound():
    sizes = [
        compile_regex(f'"{JSON_CHARACTER}{{0,{bound}}}"').counts for bound in (16, 64, 256, 4096, 100_000)
    ]
    assert len({(one.controls, one.classes, len(one.target)) for one in sizes}) == 1


@pytest.mark.parametrize(
    "pattern",
    [
        "(?:a{1,500}b?){1,500}",
        "((a{1,50}b?){1,50}c?){1,90}",
        r"(\w{1,300}\d{1,300}){1,300}",
        "[ab]*a[ab]{30}",
    ],
)
def test_hostile_counts_are_refused_within_their_limits(pattern):
    with pytest.raises(BadConstraint):
        compile_regex(pattern, Limits(work=300_000))


def brute(dfa, vocabulary, state):
    silent = vocabulary.special | vocabulary.eos
    found = [
        token
        for token, data in enumerate(vocabulary.tokens)
        if data and token not in silent and dfa.walk(state, data) != DEAD
    ]
    return sorted([*found, *vocabulary.eos]) if dfa.accepts(state) else found


def ids_of(mask):
    return np.flatnonzero(np.unpackbits(mask.bits.view(np.uint8), bitorder="little")).tolist()


@pytest.mark.parametrize(
    "pattern",
    [
        f'"{JSON_CHARACTER}{{0,12}}"',
        f'"{JSON_CHARACTER}{{3,9}}", x',
        f'\\["{JSON_CHARACTER}{{0,5}}"(?:, "{JSON_CHARACTER}{{0,5}}"){{0,4}}\\]',
        r"[\w ]{2,14}",
        "[^x]{0,9}x",
        "[a-zé日東京本語]{4,11}!",
        "(?:[a-z]{1,6} ){0,7}",
        "(?:ab?){0,30}",
        f'"{JSON_CHARACTER}*"',
        r"(?:[^\n]{0,80}\n)*",
    ],
)
def test_masks_equal_brute_force_up_to_the_end_of_the_count(tokenizer, pattern):
    vocabulary = tokenizer.vocabulary
    space = TokenSpace(vocabulary)
    dfa = compile_regex(pattern, unrolled=2)
    if not space.trie.can_spell(dfa):
        dfa = compile_regex(pattern, unrolled=None)
    automaton = TokenAutomaton(dfa, space)
    pick = random.Random(pattern)
    for _ in range(2):
        state = 0
        for _ in range(10):
            mask = automaton.mask(state)
            ids = ids_of(mask)
            assert ids == brute(dfa, vocabulary, state)
            assert mask.allowed is None or mask.allowed.tolist() == ids
            texts = [token for token in ids if token not in vocabulary.eos]
            if not texts:
                break
            state = dfa.walk(state, vocabulary.tokens[pick.choice(texts)])


def test_strings_of_all_constraints_share_one_table(trained):
    plain_tokens.cache_clear()  # other tests had trees of this vocabulary, too
    space = TokenSpace(trained("gpt2").vocabulary)
    for bound in (16, 64, 256, 4096):
        for before in ('"', '\\{"a": "'):
            dfa = compile_regex(f'{before}{JSON_CHARACTER}{{0,{bound}}}"')
            automaton = TokenAutomaton(dfa, space)
            state = dfa.walk(0, before.replace("\\", "").encode())
            assert ids_of(automaton.mask(state)) == brute(dfa, space.vocabulary, state)
    assert len(space.plain.trees) <= 2, "however long they may be, and whatever stands before them"
    before = len(space.cache._masks)
    TokenAutomaton(compile_regex(f'"{JSON_CHARACTER}{{0,16}}"'), space).mask(0)
    assert len(space.cache._masks) == before, "an equal automaton has its masks already"


@settings(max_examples=40, deadline=None)
@given(pattern=patterns, seed=st.integers())
def test_a_closing_is_as_short_as_can_be(trained, pattern, seed):
    vocabulary = trained("gpt2").vocabulary
    matcher = OutlinesGrammarBackend(vocabulary).compile(Constraint("regex", pattern))
    pick = random.Random(seed)
    for _ in range(4):
        ids = matcher.closing(64)
        assert ids is not None
        after = matcher.copy()
        assert all(after.advance(token) for token in ids)
        assert after.may_stop()
        assert bool(ids) == (not matcher.may_stop())
        assert len(ids) <= _fewest_bytes(matcher)
        going = [byte for byte in matcher.next_bytes() if matcher.copy().advance_bytes(bytes((byte,)))]
        assert len(going) == len(matcher.next_bytes())
        if not going or not matcher.advance_bytes(bytes((pick.choice(going),))):
            return


def _fewest_bytes(matcher):
    """Bytes to the nearest match, by breadth; at most 24."""
    dfa, states = matcher._automaton.dfa, {matcher._state}
    for size in range(24):
        if any(map(dfa.accepts, states)):
            return size
        states = {dfa.step(state, byte) for state in states for byte in dfa.next_bytes(state)}
    return 24
