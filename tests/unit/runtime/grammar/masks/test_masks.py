"""Token masks equal brute force over the vocabulary; a generation under them always finishes."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest

from runtime.grammar.automata.dfa import DEAD, compile_choices, compile_regex
from runtime.grammar.backends.outlines_backend import OutlinesGrammarBackend
from runtime.grammar.masks.token_automaton import TokenAutomaton, TokenSpace
from runtime.grammar.masks.token_bits import Cache, TokenBits, mask_bytes
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import BadConstraint
from runtime.protocol.vocabulary import Vocabulary

PATTERNS = [
    r"\d{4}-\d{2}-\d{2}",
    r'\{"name": "[^"\\]*", "age": \d{1,3}\}',
    r"(Paris|Pavia|東京|Rome)",
    r"[\w ]{0,12}",
    r".*",
    r"(?i)the fox",
    r"[가-각é😊]x*",
    r"\s*[^\W\d]+\s*",
    r"(?s).{3}",
    r"don't|I'll( we've)*",
    r"",
]


def ids_of(mask):
    flags = np.unpackbits(mask.bits.view(np.uint8), bitorder="little")
    return np.flatnonzero(flags).tolist()


def brute(dfa, vocabulary, state):
    allowed = [
        token
        for token, data in enumerate(vocabulary.tokens)
        if data
        and token not in vocabulary.special
        and token not in vocabulary.eos
        and dfa.walk(state, data) != DEAD
    ]
    return sorted([*allowed, *vocabulary.eos]) if dfa.accepts(state) else allowed


@pytest.fixture(scope="module")
def space(tokenizer):
    return TokenSpace(tokenizer.vocabulary)


@pytest.mark.parametrize("by", ["library", "numpy"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_masks_equal_brute_force(space, pattern, by, monkeypatch):
    if by != "library":
        monkeypatch.setattr(space, "native", None)
    monkeypatch.setattr(space, "cache", Cache(1 << 20, mask_bytes))
    dfa = compile_regex(pattern)
    automaton = TokenAutomaton(dfa, space)
    pick, state = random.Random(3), 0
    for _ in range(5):
        mask = automaton.mask(state)
        ids = ids_of(mask)
        assert ids == brute(dfa, space.vocabulary, state)
        assert len(mask.bits) == -(-len(space.vocabulary) // 32)
        assert (mask.allowed is None) == (len(ids) * 16 >= len(space.vocabulary))
        assert mask.allowed is None or mask.allowed.tolist() == ids
        tokens = [token for token in ids if token not in space.vocabulary.eos]
        if not tokens:
            break
        state = dfa.walk(state, space.vocabulary.tokens[pick.choice(tokens)])


@pytest.mark.parametrize("pattern", PATTERNS)
def test_walks_under_the_mask_finish_and_match(tokenizer, pattern):
    start = OutlinesGrammarBackend(tokenizer.vocabulary).compile(Constraint("regex", pattern or "()"))
    pick = random.Random(11)
    for _ in range(8):
        matcher, data = start.copy(), b""
        for _ in range(60):
            ids = ids_of(matcher.mask())
            assert ids, "a mask may not be empty before the end"
            stops = [token for token in ids if token in tokenizer.vocabulary.eos]
            token = stops[0] if stops and pick.random() < 0.2 else pick.choice(ids)
            assert matcher.advance(token)
            data += tokenizer.vocabulary.tokens[token]
            if matcher.is_terminated():
                break
        if matcher.may_stop():
            assert re.fullmatch(pattern, data.decode("utf-8"))
        else:
            assert "*" in pattern or "{" in pattern


def test_two_tokens_with_one_text():
    vocabulary = Vocabulary((b"a", b"b", b"a", b"ab", b"ab", b"", b"a"), frozenset({6}), frozenset({5}))
    automaton = TokenAutomaton(compile_regex("ab?"), TokenSpace(vocabulary))
    assert ids_of(automaton.mask(0)) == [0, 2, 3, 4]


def test_a_vocabulary_without_some_bytes_meets_no_dead_end():
    vocabulary = Vocabulary((b"x", b"yes", b"no", b"nope", b"", b"ye"), frozenset(), frozenset({4}))
    space = TokenSpace(vocabulary)
    automaton = TokenAutomaton(compile_regex("x*(yes|no|nowhere|yell)"), space)
    assert ids_of(automaton.mask(0)) == [
        0,
        1,
        2,
    ]  # "ye" can never become "yes" or "yell": no token goes on from it
    matcher = OutlinesGrammarBackend(vocabulary).compile(Constraint("regex", "x*(yes|no|nowhere|yell)"))
    assert not matcher.advance(5)
    assert matcher.advance(2)
    assert ids_of(matcher.mask()) == [4]
    with pytest.raises(BadConstraint, match="no sequence of the vocabulary's tokens"):
        TokenAutomaton(compile_regex("yell"), space)
    with pytest.raises(BadConstraint, match="no sequence of the vocabulary's tokens"):
        TokenAutomaton(compile_choices(["maybe"]), space)


def test_random_small_vocabularies_have_no_dead_ends():
    pick = random.Random(5)
    for _ in range(150):
        texts = [bytes(pick.choices(b"ab", k=pick.randint(1, 4))) for _ in range(pick.randint(1, 4))]
        vocabulary = Vocabulary((*texts, b""), frozenset(), frozenset({len(texts)}))
        pattern = pick.choice(["(ab|ba)*a", "a{2,5}b", "(aab|bb)+", "a*b{3}", "abba|bab"])
        try:
            automaton = TokenAutomaton(compile_regex(pattern), TokenSpace(vocabulary))
        except BadConstraint:
            alive = {""}
            for _ in range(7):
                alive |= {text + more.decode() for text in alive for more in texts if len(text) < 8}
            assert not any(re.fullmatch(pattern, text) for text in alive)
            continue
        state = 0
        for _ in range(10):
            ids = ids_of(automaton.mask(state))
            assert ids
            ids = [token for token in ids if token < len(texts)]
            if not ids:
                break
            state = automaton.dfa.walk(state, texts[pick.choice(ids)])


def test_the_cache_is_bounded_and_shared():
    cache, made = Cache(5000, mask_bytes), []
    bits = TokenBits(Vocabulary((b"x",) * 320))

    def make(number):
        made.append(number)
        return bits.listed([number])

    first = cache.get((0, 1), lambda: make(1))
    assert cache.get((0, 1), lambda: make(1)) is first
    for number in range(2, 40):
        cache.get((0, number), lambda number=number: make(number))
    assert cache.get((0, 39), lambda: make(39)).allowed.tolist() == [39]
    assert made == list(range(1, 40))
    cache.get((0, 1), lambda: make(1))
    assert made[-1] == 1
    with pytest.raises(ValueError, match="read-only"):
        first.bits[0] = 0
