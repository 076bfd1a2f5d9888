"""Plain tokens, the trees they are walked along, and what may follow a state."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.grammar.dfa import DEAD, compile_node, compile_regex
from runtime.grammar.json_schema.text_nodes import found_by
from runtime.grammar.masks import TokenAutomaton, TokenSpace
from runtime.grammar.merged_trie import byte_kinds, merged
from runtime.grammar.plain_tokens import PlainAutomaton, PlainTokens, is_plain
from runtime.grammar.token_bits import TokenBits
from runtime.grammar.trie import TokenTrie
from runtime.protocol.vocabulary import Vocabulary


def ids_of(bits):
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()


@pytest.fixture(scope="module")
def vocabulary(trained):
    return trained("gpt2").vocabulary


@pytest.fixture(scope="module")
def plain(vocabulary):
    return PlainTokens(TokenBits(vocabulary))


def test_what_is_plain_stands_in_strings_only():
    for data in (b"name", b" the", "é!".encode(), b"x:", b"[x"):
        assert is_plain(data), data
        assert json.loads(b'"' + data + b'"') == data.decode()
    for data in (
        b"",
        b"x",
        b"true",
        b"12",
        b'a"',
        b"a\\n",
        b"a\n",
        b"\xc3",
        b"a\xc3",
        b", ",
        b"e5",
        b"a\x7f",
    ):
        assert not is_plain(data), data


PATTERNS = [
    "^[a-z]+@[a-z.]+$", "fox", "^(?:the|then|them) .*$", "^[a-zé日本]{2,9}$", "^[0-9a-f]{2}-[ab][a-z]*$",
    "^[^ ]+ [^ ]+$", "^.{0,3}$", "(?:user|name)s?$", r"^[\w ]{1,5}x$", "^$",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_after_a_state_come_the_plain_tokens_that_lead_on(plain, vocabulary, pattern):
    dfa = compile_node(found_by(pattern), unrolled=None)
    automaton, pick = PlainAutomaton(dfa, plain), random.Random(pattern)
    listed = [token for token, data in enumerate(plain.bits.texts) if is_plain(data)]
    state = 0
    for _ in range(8):
        found = ids_of(automaton.after(state))
        assert found == [token for token in listed if dfa.walk(state, vocabulary.tokens[token]) != DEAD]
        # On by any text, not only by plain tokens: they may never lead to where it does.
        ways = [byte for byte in dfa.next_bytes(state) if byte < 128]
        if not ways:
            break
        state = dfa.step(state, pick.choice(ways))


@pytest.mark.parametrize(
    "pattern", ['"([^"\\\\\\x00-\\x1f]|\\\\["n])*"', r"\w+ [a-f]{2}", "(?:ab|cd)*é", "."]
)
def test_a_merged_tree_has_the_tokens_of_the_tree(vocabulary, pattern):
    dfa = compile_regex(pattern, unrolled=None)
    trie = TokenTrie(vocabulary)
    tree = merged(trie, byte_kinds(dfa.utf8, ~dfa.classes))
    for token, data in enumerate(vocabulary.tokens):
        node = int(tree.node_of[token])
        silent = not data or token in vocabulary.special or token in vocabulary.eos
        if silent or (node == tree.nodes and dfa.walk(0, data) == DEAD):
            continue
        assert node < tree.nodes
    flags = np.zeros(tree.nodes + 1, dtype=np.bool_)
    flags[:-1] = True
    assert set(ids_of(tree.pack(flags))) >= set(trie.reach(dfa, 0).ids.tolist())
    assert tree.nodes <= len(trie.byte)


@given(
    st.lists(st.text("abé東", max_size=4), max_size=25),
    st.sets(st.integers(0, 30), max_size=4),
    st.booleans(),
)
def test_the_tree_spells_each_token(texts, silent, characters):
    """From the root to where it ends its text is spelled; children and levels are consecutive."""
    tokens = tuple(data.encode() for data in texts)
    silent = frozenset(n for n in silent if n < len(tokens))
    trie = TokenTrie(Vocabulary(tokens, silent, frozenset()), characters=characters)
    spelled: list[str] = []
    for node, above in enumerate(trie.parent.tolist()):
        place = int(trie.points[trie.byte[node]])
        spelled.append((spelled[above] if above >= 0 else "") + chr(place))
        if above >= 0:
            first = int(trie.child_start[above])
            assert first <= node < first + int(trie.child_count[above])
    assert len(set(spelled)) == len(spelled) == trie.levels[-1]
    for token, data in enumerate(tokens):
        end = int(trie.end_of[token])
        text = data.decode() if characters else data.decode("latin-1")
        assert (end >= 0) == (bool(data) and token not in silent)
        if end >= 0:
            named = int(trie.token[end])
            assert (spelled[end], tokens[named]) == (text, data)
            assert named <= token
    if not characters:
        singles = {data[0] for n, data in enumerate(tokens) if len(data) == 1 and n not in silent}
        assert trie.missing_bytes == frozenset(range(256)) - singles


def test_a_vocabulary_without_plain_tokens():
    bytes_only = Vocabulary(
        (*(bytes((byte,)) for byte in range(256)), b""), frozenset({256}), frozenset({256})
    )
    assert not PlainTokens(TokenBits(bytes_only)).all.any()
    assert ids_of(TokenAutomaton(compile_regex("[a-z]{2,9}"), TokenSpace(bytes_only)).mask(0).bits) == [
        *range(ord("a"), ord("z") + 1)
    ]
