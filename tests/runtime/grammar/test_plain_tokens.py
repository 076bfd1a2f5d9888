"""Plain tokens, and the masks that are put together from them: the same as without the short cut."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.grammar.dfa import DEAD, compile_node, compile_regex
from runtime.grammar.json_schema.plain_strings import PlainMatcher
from runtime.grammar.json_schema.text_nodes import found_by
from runtime.grammar.llguidance_backend import LLGuidanceBackend
from runtime.grammar.llguidance_parser import Parser
from runtime.grammar.masks import TokenSpace
from runtime.grammar.merged_trie import byte_kinds, merged
from runtime.grammar.plain_tokens import PlainAutomaton, PlainTokens, is_plain
from runtime.grammar.token_bits import TokenBits
from runtime.grammar.trie import TokenTrie
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import InternalFault, UnsupportedConstraint
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
    listed = [token for token, flag in enumerate(plain.flags.tolist()) if flag]
    state = 0
    for _ in range(8):
        found = ids_of(automaton.after(state))
        assert found == [token for token in listed if dfa.walk(state, vocabulary.tokens[token]) != DEAD]
        for first in b"nt":
            begun = [token for token in listed if vocabulary.tokens[token][0] == first]
            wanted = [token for token in begun if dfa.walk(state, vocabulary.tokens[token][1:]) != DEAD]
            assert ids_of(automaton.after(state, first)) == wanted
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


SCHEMAS = [
    {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}},
    {"type": "object", "properties": {"name": {"maxLength": 5}, "names": {"minLength": 2}},
     "required": ["name"], "additionalProperties": False},
    {"type": "object", "additionalProperties": {"enum": ["the fox", "the dogs", "é\nb", 7]}},
    {"type": "array", "items": {"type": "string", "pattern": "^[a-z ]{2,6}$"}},
    {"type": "array", "items": {"pattern": "fox|dogs"}},
    {"anyOf": [{"const": "lazy"}, {"type": "string", "maxLength": 3}, {"type": "object"}]},
    {"type": "object", "patternProperties": {"^x": {"type": "string", "maxLength": 2}},
     "additionalProperties": {"enum": ["over"]}},
    {"type": "object", "patternProperties": {"^[a-z]+$": {"type": "null"}}, "additionalProperties": False},
    {"allOf": [{"properties": {"a": {"type": "string"}}},
               {"properties": {"a": {"maxLength": 4}, "b": True}}]},
    {"oneOf": [{"type": "object", "properties": {"kind": {"const": "fox"}, "v": {"maxLength": 2}},
                "required": ["kind", "v"], "additionalProperties": False},
               {"type": "object", "properties": {"kind": {"const": "house"}, "v": {"enum": ["brown", "fox"]}},
                "required": ["kind", "v"], "additionalProperties": False}]},
    {"type": "string", "format": "email"}, {"type": "string", "minLength": 3, "pattern": "o"},
    {"$defs": {"t": {"properties": {"name": {"type": "string"}, "in": {"$ref": "#/$defs/t"}}}},
     "$ref": "#/$defs/t"},
]  # fmt: skip


def plain_one(matcher):
    while matcher is not None and not isinstance(matcher, PlainMatcher):
        matcher = getattr(matcher, "_now", None) or getattr(matcher, "_inner", None)
    return matcher


@pytest.fixture(scope="module")
def backends(vocabulary):
    """One as it is, and one whose engine is asked for every mask."""
    quick, slow = LLGuidanceBackend(vocabulary), LLGuidanceBackend(vocabulary)
    slow._space = quick.space
    slow._followed = lambda grammar, origin, schema: slow._start(grammar, origin, "json_schema")
    return quick, slow


@pytest.mark.parametrize("number", range(len(SCHEMAS)))
def test_masks_are_those_of_the_engine(backends, vocabulary, number):
    constraint = Constraint("json_schema", json.dumps(SCHEMAS[number]))
    starts = [backend.compile(constraint) for backend in backends]
    assert plain_one(starts[0]) is not None
    pick = random.Random(number)
    for walk in range(6):
        one, other = (start.copy() for start in starts)
        if walk == 5:  # tokens that end in the middle of an escape or a character
            for text in (b'"', b'{"', b'["', b'{"a":"'):
                if one.advance_bytes(text):
                    assert other.advance_bytes(text)
                    break
        for step in range(30):
            found, wanted = one.mask(), other.mask()
            assert ids_of(found.bits) == ids_of(wanted.bits)
            texts = [token for token in ids_of(found.bits) if token not in vocabulary.eos]
            if not texts:
                break
            odd = [t for t in texts if vocabulary.tokens[t].endswith(b"\\") or vocabulary.tokens[t][-1] > 127]
            token = pick.choice(odd if odd and pick.random() < 0.3 else texts)
            assert one.advance(token) is other.advance(token) is True
            assert (one.may_stop(), one.forced_bytes()) == (other.may_stop(), other.forced_bytes())
            if step % 5 == 4:
                back = pick.randint(1, 4)
                one.rollback(back)
                other.rollback(back)
            if step % 7 == 6:
                one, left = one.copy(), one
                assert left.advance_bytes(b"") is one.advance_bytes(b"") is other.advance_bytes(b"")


@given(st.lists(st.text("abé東", max_size=4), max_size=25), st.text("abé東", max_size=8))
def test_along_a_text_come_all_plain_tokens_that_it_begins_with(texts, text):
    """Those of equal text too."""
    vocabulary = Vocabulary((*(data.encode() for data in texts), b""), frozenset(), frozenset({len(texts)}))
    found = PlainTokens(TokenBits(vocabulary)).along(text.encode())
    wanted = [n for n, data in enumerate(texts) if is_plain(data.encode()) and text.startswith(data)]
    assert sorted(found) == wanted


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


def test_backends_of_a_vocabulary_share_its_plain_tokens(backends, vocabulary):
    assert TokenSpace(vocabulary).plain is LLGuidanceBackend(vocabulary).space.plain


def test_a_vocabulary_without_plain_tokens():
    bytes_only = Vocabulary(
        (*(bytes((byte,)) for byte in range(256)), b""), frozenset({256}), frozenset({256})
    )
    matcher = LLGuidanceBackend(bytes_only).compile(Constraint("json_schema", '{"maxLength": 2}'))
    assert matcher.advance_bytes(b'"ab')
    assert ids_of(matcher.mask().bits) == [ord('"')]
    automaton = TokenSpace(bytes_only)
    assert automaton.plain.most == 0


class PanicException(BaseException):
    """What a panic of a library in Rust looks like from Python."""


class Panicking:
    def __getattr__(self, name):
        def call(*given):
            raise PanicException("index out of bounds")

        return call


@pytest.mark.parametrize(
    ("name", "given"),
    [("try_consume_tokens", ([1],)), ("validate_tokens", ([1],)), ("compute_mask", (0, 0)),
     ("rollback", (1,)), ("compute_ff_bytes", ()), ("is_accepting", ()), ("is_stopped", ()), ("copy", ())],
)  # fmt: skip
def test_a_panic_is_a_fault_of_one_constraint(name, given):
    with pytest.raises(InternalFault, match="index out of bounds"):
        getattr(Parser(Panicking(), "json_schema"), name)(*given)


@pytest.mark.parametrize(
    "word", [{"const": "\ud800"}, {"enum": ["a", "x\udfff"]}, {"properties": {"\ud800": {}}}]
)
def test_a_lone_surrogate_is_refused_by_its_place(vocabulary, word):
    with pytest.raises(UnsupportedConstraint, match="lone surrogate"):
        LLGuidanceBackend(vocabulary).compile(Constraint("json_schema", json.dumps(word)))


def test_surrogates_in_pairs_and_in_remarks_are_no_mistake(backends):
    spec = '{"const": "\\ud83d\\ude0a", "description": "\\ud800"}'
    matcher = backends[0].compile(Constraint("json_schema", spec))
    assert matcher.advance_bytes('"😊"'.encode())
    assert matcher.may_stop()
