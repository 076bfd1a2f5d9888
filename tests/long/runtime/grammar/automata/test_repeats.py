"""Bounded repeats: what re.fullmatch takes, masks to the end of the count, one mask in the middle of it."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.grammar.automata.automaton import Limits
from runtime.grammar.automata.dfa import DEAD, compile_regex
from runtime.grammar.backends.outlines_backend import OutlinesGrammarBackend
from runtime.grammar.byte_matcher import BYTES
from runtime.grammar.masks.merged_trie import merged, run_table
from runtime.grammar.masks.token_automaton import WIDE, TokenAutomaton, TokenSpace
from runtime.grammar.masks.trie import TokenTrie
from runtime.grammar.table import make_backend
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import UnsupportedConstraint
from runtime.protocol.vocabulary import Vocabulary

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
def test_repeats_are_what_fullmatch_takes(pattern, texts, seed):
    dfa, wanted, pick = compile_regex(pattern), re.compile(pattern), random.Random(seed)
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


PLAINER = {"(a?){5000}": "a{0,5000}"}
"""The same language without a choice of ways: `re` goes through all of them."""


@pytest.mark.parametrize(
    "pattern",
    [
        r'"[^"]{0,256}"',
        r"\w{3,4096}",
        "(ab?){0,300}",
        "(?:[a-z]{1,50},){0,100}",
        f'(?:"{JSON_CHARACTER}{{0,64}}",){{2,80}}',
        "[a-z]{2,33}[a-c]{1,32}",
        "a{1000,}b",
        "(a?){5000}",
        "(?:a{1,40}|[ab]{1,60})c",
    ],
)
def test_long_repeats(pattern):
    dfa, wanted, pick = compile_regex(pattern), re.compile(PLAINER.get(pattern, pattern)), random.Random(1)
    for size in (0, 1, 2, 3, 30, 50, 64, 255, 256, 257, 300, 301, 4096):
        for text in ("a" * size, "a" * size + "b", '"' + "a" * size + '"', "a," * size, 'x"a",' * size):
            assert accepts(dfa, text) == bool(wanted.fullmatch(text)), (pattern, size, text[:20])
        text = "".join(pick.choices("abc", k=size))
        assert accepts(dfa, text) == bool(wanted.fullmatch(text))


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
    with pytest.raises(UnsupportedConstraint):
        compile_regex(pattern, Limits(work=300_000))


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("a{3,100000}", "a" * 5000, "aa"),
        (r"(?:\w{1,300},){2,500}!", "abc," * 60 + "!", "abc,!"),
    ],
)
def test_counts_beyond_the_automata_go_to_another_engine(pattern, good, bad):
    start = make_backend("auto", BYTES).compile(Constraint("regex", pattern))
    assert start.origin.backend == "llguidance"
    for text in (good, bad):
        matcher = start.copy()
        assert (matcher.advance_bytes(text.encode()) and matcher.may_stop()) == (text == good)


def brute(dfa, vocabulary, state):
    silent = vocabulary.special | vocabulary.eos
    found = [
        token
        for token, data in enumerate(vocabulary.tokens)
        if data and token not in silent and dfa.walk(state, data) != DEAD
    ]
    return sorted([*found, *vocabulary.eos]) if dfa.accepts(state) else found


def ids_of(bits):
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()


@pytest.mark.parametrize(
    "pattern",
    [
        f'"{JSON_CHARACTER}{{0,12}}"',
        f'"{JSON_CHARACTER}{{3,90}}", x',
        f'\\["{JSON_CHARACTER}{{0,5}}"(?:, "{JSON_CHARACTER}{{0,5}}"){{0,4}}\\]',
        r"[\w ]{2,14}",
        "[^x]{0,9}x",
        "[a-zé日東京本語]{4,40}!",
        "(?:[a-z]{1,6} ){0,7}",
        "(?:ab?){0,30}",
        f'"{JSON_CHARACTER}*"',
        r"(?:[^\n]{0,80}\n)*",
    ],
)
def test_masks_equal_brute_force_up_to_the_end_of_the_count(tokenizer, pattern):
    vocabulary = tokenizer.vocabulary
    dfa = compile_regex(pattern)
    automaton = TokenAutomaton(dfa, TokenSpace(vocabulary))
    pick = random.Random(pattern)
    for _ in range(3):
        state = 0
        for _ in range(30):
            mask = automaton.mask(state)
            ids = ids_of(mask.bits)
            assert ids == brute(dfa, vocabulary, state)
            assert mask.allowed is None or mask.allowed.tolist() == ids
            texts = [token for token in ids if token not in vocabulary.eos]
            if not texts:
                break
            state = dfa.walk(state, vocabulary.tokens[pick.choice(texts)])


def test_the_middle_of_a_long_repeat_has_one_mask(trained):
    vocabulary = trained("gpt2").vocabulary
    longest = max(map(len, vocabulary.tokens))
    space = TokenSpace(vocabulary)
    dfa = compile_regex(f"[^x]{{5,{20 * longest}}}x")
    automaton = TokenAutomaton(dfa, space)
    masks = [automaton.mask(dfa.walk(0, b"a" * size)) for size in range(19 * longest)]
    assert len({id(mask) for mask in masks[5:]}) == 1
    assert len({id(mask) for mask in masks}) > 1, "an x may not come before its time"
    for size in range(19 * longest, 20 * longest + 1):  # up to the end, where each place has its own
        state = dfa.walk(0, b"a" * size)
        assert ids_of(automaton.mask(state).bits) == brute(dfa, vocabulary, state)


@settings(max_examples=40, deadline=None)
@given(pattern=patterns, seed=st.integers())
def test_a_closing_is_as_short_as_can_be(trained, pattern, seed):
    matcher = OutlinesGrammarBackend(trained("gpt2").vocabulary).compile(Constraint("regex", pattern))
    pick = random.Random(seed)
    for _ in range(4):
        ids = matcher.closing(64)
        assert ids is not None
        after = matcher.copy()
        assert all(after.advance(token) for token in ids)
        assert after.may_stop()
        assert bool(ids) == (not matcher.may_stop())
        fewest = _fewest_bytes(matcher)
        assert fewest is None or len(ids) <= fewest
        going = [byte for byte in matcher.next_bytes() if matcher.copy().advance_bytes(bytes((byte,)))]
        assert len(going) == len(matcher.next_bytes())
        if not going or not matcher.advance_bytes(bytes((pick.choice(going),))):
            return


def _fewest_bytes(matcher):
    """Bytes to the nearest match, by breadth; None where that is more than 24."""
    ends = [matcher]
    for size in range(24):
        if any(end.may_stop() for end in ends):
            return size
        further = {}
        for end in ends:
            for byte in end.next_bytes():
                after = end.copy()
                assert after.advance_bytes(bytes((byte,)))
                further.setdefault((after.next_bytes(), after.may_stop(), after.closing(64)), after)
        ends = list(further.values())
    return None


@pytest.mark.parametrize(
    "pattern", ['"([^"\\\\\\x00-\\x1f]|\\\\["n])*"', r"\w+ [a-f]{2}", "(?:ab|cd)*é", "."]
)
def test_a_merged_tree_has_the_tokens_of_the_tree(trained, pattern):
    vocabulary = trained("gpt2").vocabulary
    dfa = compile_regex(pattern)
    trie = TokenTrie(vocabulary)
    none = run_table(dfa.utf8, np.zeros(dfa.classes + 1, dtype=np.bool_))
    tree = merged(trie, dfa.kind_of, none)
    assert ids_of(tree.reach(dfa, [0])) == sorted(trie.reach(dfa, 0).ids.tolist())
    assert tree.nodes <= len(trie.byte) + 1


@pytest.mark.parametrize(
    ("pattern", "runs"),
    [
        ('"([^"\\\x00-\x1f]|\\["n]){0,9}"', 1),
        (r"[\w ]{3,7}é?", 2),
        ("[a-z]{3}[a-f]{0,4}", 2),
        ("[a-zé]{0,5}@[a-z0-9]{2,6}", 1),
        ("[A-Z]{1,4}東[a-zé]{1,4}", 2),
        (".*", 1),
    ],
)
def test_of_a_run_only_the_number_of_characters_counts(pattern, runs):
    """Masks from every state are those of the tree of all; the tree is smaller than without the run where
    something else tells the run's characters apart."""
    pick = random.Random(7)
    signs = ["a", "b", "n", "A", "Z", "4", "é", "東", "@", '"', "\\", "\n", "\xe9"]
    texts = {
        "".join(pick.choices(signs, (9, 9, 9, 5, 5, 2, 2, 1, 1, 1, 1, 1, 1), k=size % 9))
        for size in range(800)
    }
    cut = {text.encode()[at:] for text in sorted(texts) for at in (0, 1)} | {
        text.encode()[:-1] for text in texts
    }
    trie = TokenTrie(Vocabulary(tuple(sorted(cut))))
    dfa = compile_regex(pattern)
    found = dfa.runs(WIDE)
    assert len(found) == runs
    tree = merged(trie, dfa.kind_of, run_table(dfa.utf8, found[0].classes))
    none = merged(trie, dfa.kind_of, run_table(dfa.utf8, np.zeros_like(found[0].classes)))
    assert tree.nodes < none.nodes or "n" not in pattern
    for state in range(len(dfa.delta)):
        wanted = sorted(trie.reach(dfa, state * dfa.nodes).ids.tolist())
        assert ids_of(none.reach(dfa, [state * dfa.nodes])) == wanted
        chain = found[0].chain(state, tree.roots)
        assert chain or runs == 2 or dfa.width(state * dfa.nodes) < WIDE
        if chain:
            assert ids_of(tree.reach(dfa, [at * dfa.nodes for at in chain])) == wanted


@given(st.lists(st.text("abé東", max_size=4), max_size=25), st.sets(st.integers(0, 30), max_size=4))
def test_the_tree_spells_each_token(texts, silent):
    """From the root to where it ends its text is spelled; children and levels are consecutive."""
    tokens = tuple(data.encode() for data in texts)
    silent = frozenset(n for n in silent if n < len(tokens))
    trie = TokenTrie(Vocabulary(tokens, silent, frozenset()))
    spelled: list[bytes] = []
    for node, above in enumerate(trie.parent.tolist()):
        spelled.append((spelled[above] if above >= 0 else b"") + bytes([int(trie.byte[node])]))
        if above >= 0:
            first = int(trie.child_start[above])
            assert first <= node < first + int(trie.child_count[above])
    assert len(set(spelled)) == len(spelled) == trie.levels[-1]
    for token, data in enumerate(tokens):
        end = int(trie.end_of[token])
        assert (end >= 0) == (bool(data) and token not in silent)
        if end >= 0:
            named = int(trie.token[end])
            assert (spelled[end], tokens[named]) == (data, data)
            assert named <= token
    singles = {data[0] for n, data in enumerate(tokens) if len(data) == 1 and n not in silent}
    assert trie.missing_bytes == frozenset(range(256)) - singles
