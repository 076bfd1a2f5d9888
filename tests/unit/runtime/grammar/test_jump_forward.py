"""Jumps are canonical whatever follows, change no text, and the map gives the known answers."""

from __future__ import annotations

import random
import re

import interegular
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.grammar.automata.dfa import DEAD, compile_regex
from runtime.grammar.backends.outlines_backend import OutlinesGrammarBackend
from runtime.grammar.jump_forward import OutlinesJumpForwardMap
from runtime.grammar.jump_plan import Jump, JumpPlanner
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import BadConstraint
from tests.exploring import tries

GOLDENS = [
    (
        r"The google's DNS sever address is (\d{1,3}\.){3}(25[0-5]|2[0-4]\d|[01]?\d\d?)",
        "The google's DNS sever address is ",
        b"The google's DNS sever address is ",
    ),
    (r'\{"name": "[a-z]+", "age": [0-9]+\}', '{"name": "', b'{"name": "'),
    ("(Paris|Pavia)", "Pa", b"Pa"),
    ("ab*c", "a", b"a"),
    ("ab?", "a", b"a"),
    ("hello world", "hello world", b"hello world"),
    ("x.", "x", b"x"),
    ("a.b", "a", b"a"),
    ("a.*b", "a", b"a"),
    ('"[^"]*"', '"', b'"'),
    ("[가-각]", "", b"\xea\xb0"),
    ("가", "가", "가".encode()),
    ("(가나|가다)", "가", b"\xea\xb0\x80\xeb"),
    ("(😊|😋)x", "", b"\xf0\x9f\x98"),
    ("(é|è)t", "", b"\xc3"),
    ("", "", b""),
    ("a?b", "", b""),
    ("x(?:)y", "xy", b"xy"),
]


@pytest.mark.parametrize(("pattern", "symbols", "data"), GOLDENS)
def test_goldens(pattern, symbols, data):
    jumps = OutlinesJumpForwardMap(pattern)
    text, state = jumps.jump_forward_symbol(jumps.initial_state)
    assert text == symbols
    path = jumps.jump_forward_byte(jumps.initial_state)
    assert bytes(byte for byte, _ in path) == data
    dfa = compile_regex(pattern)
    assert dfa.walk(0, text.encode()) == state
    assert [after for _, after in path] == [dfa.walk(0, data[: n + 1]) for n in range(len(data))]
    assert jumps.jump_forward_symbol(state)[0] == ""


def test_edges_hold_both_levels():
    jumps = OutlinesJumpForwardMap("가")
    edge = jumps.edge(jumps.initial_state)
    assert edge is not None
    assert (edge.symbol, edge.byte) == ("가", 0xEA)
    middle = jumps.edge(edge.byte_next_state)
    assert middle is not None
    assert (middle.symbol, middle.byte) == (None, 0xB0)
    assert jumps.edge(edge.symbol_next_state) is None
    with pytest.raises(BadConstraint):
        OutlinesJumpForwardMap("(")


@settings(max_examples=tries(60), deadline=None)
@given(
    st.recursive(
        st.sampled_from(["a", "b", "ab", "é", "[ab]", "xy", "[^a]"]),
        lambda inner: st.one_of(
            st.lists(inner, min_size=1, max_size=3).map("".join),
            st.lists(inner, min_size=2, max_size=3).map(lambda p: f"({'|'.join(p)})"),
            st.tuples(inner, st.sampled_from("*+?")).map(lambda p: f"({p[0]}){p[1]}"),
        ),
        max_leaves=6,
    )
)
def test_symbols_agree_with_a_character_automaton(pattern):
    """The same answer from an independent library: one way on, no stop, and not "anything else"."""
    fsm = interegular.parse_pattern(pattern).to_fsm()
    text, state = "", fsm.initial
    while state not in fsm.finals:
        ways = {
            symbol: target
            for symbol, key in fsm.alphabet.items()
            if (target := fsm.map.get(state, {}).get(key)) is not None and fsm.islive(target)
        }
        if len(ways) != 1 or not isinstance(symbol := next(iter(ways)), str):
            break
        text, state = text + symbol, ways[symbol]
    jumps = OutlinesJumpForwardMap(pattern)
    assert jumps.jump_forward_symbol(jumps.initial_state)[0] == text


PIECES = [
    '{"name": "',
    '","age":',
    "The answer is ",
    " Paris, Rome",
    "don't ",
    "'re",
    "'",
    "I'l",
    "42",
    "3.1",
    "\n\n",
    ".\n",
    "  ",
    " - ",
    "東京",
    "é",
    "😊",
    ": [",
    "}",
    "]]",
    "<thi",
    "name",
    " house",
    "!",
    "e-mail user@",
    "x1",
    " 2026",
    '\n  "',
    "a",
    "The google's ",
    "$",
    "\t",
    " ?",
]
GAPS = [
    "[a-z]+",
    r"\d+",
    "( yes|, no|\n+x)",
    "['a-zA-Z ]*",
    r"\s*\S+",
    ".{1,5}",
    "(?s:.)*",
    "('s|'re|'ll|x)",
    "[A-Z]?",
    "(nk>|x)",
    "[東é]+",
    "",
]
literals = st.lists(st.sampled_from(PIECES), min_size=1, max_size=4).map("".join)
grammars = st.tuples(
    st.sampled_from(GAPS), literals, st.sampled_from(GAPS), literals, st.sampled_from(GAPS)
).map(lambda p: p[0] + re.escape(p[1]) + p[2] + re.escape(p[3]) + p[4])


def plan_jump(matcher, tail_ids, vocabulary, encode, max_tokens, context=()):
    return JumpPlanner(vocabulary, encode).plan(matcher, tail_ids, max_tokens, context)


def table_of(dfa):
    """The state after each byte, of each state."""
    return np.stack([dfa.following(state) for state in range(len(dfa.delta) * dfa.nodes)])


def distances(dfa):
    """How many bytes each state is from a match."""
    table = table_of(dfa)
    far = np.full(len(table) + 1, 1 << 20)
    far[:-1][:: dfa.nodes][dfa.accepting] = 0
    while True:
        closer = np.minimum(far[:-1], 1 + far[table].min(axis=1))  # DEAD is the last one: far away
        if (closer == far[:-1]).all():
            return far
        far[:-1] = closer


LIKELY = frozenset(b"abcnelrs '3.,\n\">kx")


def random_text(dfa, state, pick, limit=12, far=None):
    """Bytes that lead from `state` to a match; the shortest way after `limit` of them."""
    far, data = distances(dfa) if far is None else far, bytearray()
    while not (dfa.accepts(state) and (dfa.is_final(state) or len(data) > limit or pick.random() < 0.15)):
        options = dfa.next_bytes(state)
        byte = pick.choice([byte for byte in options if byte in LIKELY] or options)
        if len(data) > limit or pick.random() < 0.2:
            byte = min(options, key=lambda byte: (far[dfa.step(state, byte)], pick.random()))
        state = dfa.step(state, byte)
        data.append(byte)
    return bytes(data)


def canonical(tokenizer, text):
    return JumpPlanner(tokenizer.vocabulary, tokenizer.encode).encode_exactly(text)


@pytest.mark.parametrize("name", ["gpt2", "capitals", "contractions", "sentencepiece"])
@settings(max_examples=tries(15), deadline=None)
@given(grammar=grammars, seed=st.integers(0, 1 << 30))
def test_jumps_are_canonical_whatever_follows(trained, name, grammar, seed):
    tokenizer = trained(name)
    vocabulary, tokens = tokenizer.vocabulary, tokenizer.vocabulary.tokens
    matcher = OutlinesGrammarBackend(vocabulary).compile(Constraint("regex", grammar))
    dfa = compile_regex(grammar)
    pick, far = random.Random(seed), distances(dfa)
    tail: list[int] = []
    state = 0
    for _ in range(12):
        before = tokens[tail[0]] if tail else b""
        jump = plan_jump(matcher, tail, vocabulary, tokenizer.encode, 1000)
        if jump is not None:
            spelled = b"".join(tokens[token] for token in jump.ids)
            appended = spelled[len(before) :] if jump.replaced else spelled
            assert not jump.replaced or (spelled.startswith(before) and jump.ids[0] != tail[0])
            assert appended
            assert dfa.forced(state)[0].startswith(appended)
            ids = list(jump.ids) if jump.replaced else [*(tail if before else []), *jump.ids]
            state = dfa.walk(state, appended)
            for _ in range(6):
                rest = random_text(dfa, state, pick, far=far)
                whole = canonical(tokenizer, (before + appended + rest).decode())
                if whole is not None:  # else the whole spells a special token, or is normalised
                    assert whole[: len(ids)] == ids, (before, appended, rest)
            tail = [ids[-1]] if pick.random() < 0.5 else []
            assert matcher.advance_bytes(b"")
            continue
        rest = random_text(dfa, state, pick, far=far)
        if not rest:
            return
        text = (
            canonical(tokenizer, rest.decode("utf-8", "ignore"))
            if dfa.nodes == 1 or state % dfa.nodes == 0
            else None
        )
        token = (
            text[0]
            if text
            else next(t for t, data in enumerate(tokens) if data == rest[:1] and t not in vocabulary.special)
        )
        assert matcher.advance(token)
        state = dfa.walk(state, tokens[token])
        assert state != DEAD
        tail = [token]


@pytest.mark.parametrize(
    "pattern",
    [
        r'\{"name": "[A-Za-z ]+", "age": \d+, "house": "(Paris|Pavia|Rome)"\}',
        r"The answer is (Yes|No), and it's [a-z]+\.",
        r"x1 = \d+;\n東京 😊 done",
        r"hello world",
        r"\{\n  \"a\": \d,\n  \"b\": \d\n\}",
        "(😊|😋)x and more",
    ],
)
def test_jumping_changes_no_text_and_saves_steps(tokenizer, pattern):
    vocabulary = tokenizer.vocabulary
    dfa = compile_regex(pattern)
    backend = OutlinesGrammarBackend(vocabulary)
    target = random_text(dfa, 0, random.Random(1))

    def run(jumping):
        """A model with one text in mind: its next token is the first canonical one of what is left."""
        matcher, ids, steps = backend.compile(Constraint("regex", pattern)), [], 0
        while True:
            done = b"".join(vocabulary.tokens[token] for token in ids)
            if jumping and (jump := plan_jump(matcher, ids[-1:], vocabulary, tokenizer.encode, 1000)):
                ids[len(ids) - jump.replaced :] = jump.ids
                continue
            if matcher.is_terminated() or done == target:
                return done, steps, ids
            left = target[len(done) :]
            options = (
                canonical(tokenizer, left.decode()) if left[:1] < b"\x80" or left[:1] >= b"\xc0" else None
            )
            token = options[0] if options else vocabulary.tokens.index(left[:1])
            assert matcher.advance(token)
            ids.append(token)
            steps += 1

    plain, plain_steps, plain_ids = run(False)
    jumped, jumped_steps, ids = run(True)
    assert plain == jumped == target
    assert jumped_steps < plain_steps
    if plain_ids == canonical(tokenizer, target.decode()):  # else the model itself did not keep to it
        assert ids == plain_ids


def matcher_for(tokenizer, pattern):
    return OutlinesGrammarBackend(tokenizer.vocabulary).compile(Constraint("regex", pattern))


def test_the_seam_is_healed(trained):
    tokenizer = trained("gpt2")
    vocabulary = tokenizer.vocabulary
    whole = tokenizer.encode(" house")
    assert len(whole) == 1
    first = vocabulary.tokens.index(b" ")
    matcher = matcher_for(tokenizer, r"( h|\nh)[ao]use")
    assert matcher.advance(first)
    assert matcher.forced_bytes() == b"h"
    assert plan_jump(matcher, [first], vocabulary, tokenizer.encode, 9) is None
    matcher = matcher_for(tokenizer, r"( h|\nh)ouse")
    assert matcher.advance(first)
    assert plan_jump(matcher, [first], vocabulary, tokenizer.encode, 9) == Jump(1, tuple(whole))
    assert matcher.is_terminated()
    matcher.rollback(1)
    assert matcher.forced_bytes() == b"house"


def test_a_jump_keeps_within_its_budget(tokenizer):
    pattern = "The quick brown fox jumps over the lazy dogs"
    vocabulary = tokenizer.vocabulary
    for budget in range(6):
        matcher = matcher_for(tokenizer, pattern)
        jump = plan_jump(matcher, [], vocabulary, tokenizer.encode, budget)
        assert (jump is None) == (budget == 0)
        if jump is not None:
            assert len(jump.ids) == budget
            done = b"".join(vocabulary.tokens[token] for token in jump.ids)
            assert matcher.forced_bytes() == pattern.encode()[len(done) :]


def test_nothing_certain_means_no_change(tokenizer):
    vocabulary = tokenizer.vocabulary
    for pattern in ["[ab]c", "nam[a-z]+", "(😊|😋)", "(é|è)"]:
        matcher = matcher_for(tokenizer, pattern)
        before = matcher.forced_bytes()
        assert plan_jump(matcher, [], vocabulary, tokenizer.encode, 9) is None
        assert matcher.forced_bytes() == before


def test_text_that_spells_a_special_token_is_left_to_the_model(trained):
    tokenizer = trained("gpt2")
    matcher = matcher_for(tokenizer, re.escape("say <|end|> now"))
    assert tokenizer.encode("<|end|>") == sorted(tokenizer.vocabulary.eos)
    assert plan_jump(matcher, [], tokenizer.vocabulary, tokenizer.encode, 99) is None


def test_a_tail_that_begins_inside_a_character_is_kept(trained):
    tokenizer = trained("gpt2")
    tokens = tokenizer.vocabulary.tokens
    matcher = matcher_for(tokenizer, "(😊|☃) and more")
    smile = "😊".encode()
    for byte in smile:
        assert matcher.advance(tokens.index(bytes([byte])))
    last = tokens.index(smile[-1:])
    assert plan_jump(matcher, [last], tokenizer.vocabulary, tokenizer.encode, 99) is None
    jump = plan_jump(matcher, [], tokenizer.vocabulary, tokenizer.encode, 99)
    assert jump is not None
    assert b"".join(tokens[token] for token in jump.ids) == b" and more"


def test_what_may_follow_decides_how_much_is_certain(trained):
    """A quotation mark before a letter is a token of its own; before anything it might be `""` or `",`."""
    tokenizer = trained("gpt2")
    vocabulary = tokenizer.vocabulary
    narrow = plan_jump(
        matcher_for(tokenizer, r'\{"name": "(true|false)"\}'), [], vocabulary, tokenizer.encode, 99
    )
    wide = plan_jump(matcher_for(tokenizer, r'\{"name": "[^"]*"\}'), [], vocabulary, tokenizer.encode, 99)
    assert narrow is not None
    assert wide is not None
    assert list(narrow.ids) == tokenizer.encode('{"name": "')
    assert narrow.ids[: len(wide.ids)] == wide.ids
    assert len(wide.ids) < len(narrow.ids)


def test_the_text_before_is_read_along(trained):
    """`"name` would be one piece at the beginning of a text; behind a brace the mark belongs to that."""
    tokenizer = trained("contractions")
    tokens = tokenizer.vocabulary.tokens
    before, mark = tokens.index(b"{"), tokens.index(b'"')
    for context in ([], [before]):
        matcher = matcher_for(tokenizer, '"name, (a|b)')
        assert matcher.advance(mark)
        jump = plan_jump(matcher, [mark], tokenizer.vocabulary, tokenizer.encode, 99, context)
        assert jump is not None
        ids = list(jump.ids) if jump.replaced else [mark, *jump.ids]
        whole = tokenizer.encode("{" * len(context) + '"name, ')
        if context and tokens[whole[0]] != b"{":  # the model has chosen otherwise: its own tokens stay
            whole = [before, *tokenizer.encode('"name, ')]
        assert ids == whole[len(context) :][: len(ids)]


@pytest.mark.parametrize("pattern", ["[a-c]x", "(é|ü)", "ab?", r"\d{2}|[^0]", "hello"])
def test_next_bytes(tokenizer, pattern):
    matcher = matcher_for(tokenizer, pattern)
    assert matcher.next_bytes() == set(compile_regex(pattern).next_bytes(0))
