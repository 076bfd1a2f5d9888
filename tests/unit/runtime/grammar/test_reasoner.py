"""The reasoning wrapper: asleep until the end of the reasoning, however that is cut into tokens; budget;
rollback across the border; copies."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.grammar.backends.llguidance_backend import LLGuidanceBackend
from runtime.grammar.backends.outlines_backend import OutlinesGrammarBackend
from runtime.grammar.base import Matcher
from runtime.grammar.reasoner import ReasonerMatcher, Reasoning, ReasoningEnd
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import BadRequest
from runtime.protocol.vocabulary import Vocabulary
from tests.exploring import tries

EOS, THINK_END, PAD = 256, 257, 258
WORDS = [
    b"</",
    b"think",
    b">",
    b"</think>",
    b"</think>ye",
    b"</think>x",
    b"k>",
    b"k>yes",
    b"k>z",
    b"ye",
    b"yes",
    b" a",
]
TOKENS = (*(bytes([value]) for value in range(256)), b"", b"", b"", *WORDS)
VOCABULARY = Vocabulary(TOKENS, frozenset({EOS, THINK_END, PAD}), frozenset({EOS}))
ID = {data: number for number, data in enumerate(TOKENS) if data}
BY_TEXT = Reasoning(VOCABULARY, ReasoningEnd(texts=("</think>",)))
BY_ID = Reasoning(VOCABULARY, ReasoningEnd(ids=((THINK_END,),)))
BY_IDS = Reasoning(VOCABULARY, ReasoningEnd(ids=((ID[b"</"], ID[b"think"], ID[b">"]),)))
BACKEND = OutlinesGrammarBackend(VOCABULARY)


def answer(pattern: str = "(yes|no)") -> Matcher:
    return BACKEND.compile(Constraint("regex", pattern))


def allowed(matcher: Matcher) -> list[int]:
    mask = matcher.mask()
    ids = np.flatnonzero(np.unpackbits(mask.bits.view(np.uint8), bitorder="little")).tolist()
    assert mask.allowed is None or mask.allowed.tolist() == ids
    return ids


def seen(matcher: Matcher) -> tuple[list[int], bool, bool, bytes]:
    return allowed(matcher), matcher.may_stop(), matcher.is_terminated(), matcher.forced_bytes()


def test_no_thinking_is_the_constraint_itself():
    matcher = answer()
    assert BY_ID.wrap(matcher, thinking=False) is matcher
    assert allowed(matcher) == [ord("n"), ord("y"), ID[b"ye"], ID[b"yes"]]


def test_asleep_until_the_token():
    matcher = BY_ID.wrap(answer(), thinking=True)
    assert isinstance(matcher, ReasonerMatcher)
    assert matcher.asleep
    ids = allowed(matcher)
    assert THINK_END in ids
    assert EOS not in ids
    assert PAD not in ids
    assert len(ids) == len(TOKENS) - 2
    for token in (ord("n"), ID[b"</think>"], ID[b"</think>x"]):
        assert matcher.advance(token)
    assert not matcher.advance(EOS)
    assert not matcher.may_stop()
    assert not matcher.is_terminated()
    assert matcher.forced_bytes() == b""
    assert matcher.advance(THINK_END)
    assert not matcher.asleep
    assert seen(matcher) == seen(answer())
    assert not matcher.advance(THINK_END)
    assert matcher.advance(ID[b"yes"])
    assert matcher.is_terminated()


def test_a_sequence_of_ids_counts_whole():
    a, b, c = ID[b"</"], ID[b"think"], ID[b">"]
    matcher = BY_IDS.wrap(answer(), thinking=True)
    for token in (a, b, a, b, ord("x"), c, a, a, b):
        assert matcher.advance(token)
        assert matcher.asleep
    assert matcher.advance(c)
    assert not matcher.asleep


@pytest.mark.parametrize(
    "cut", [[b"</think>"], [b"<", b"/", b"think", b">"], [b"</", b"thin"[:1], b"h", b"i", b"n", b"k>"]]
)
def test_text_counts_however_it_is_cut(cut):
    matcher = BY_TEXT.wrap(answer(), thinking=True)
    for data in [b"<", b"</", b" a", *cut]:
        assert matcher.asleep
        assert matcher.advance(ID[data])
    assert not matcher.asleep
    assert seen(matcher) == seen(answer())


def test_a_token_over_the_border_begins_the_answer():
    matcher = BY_TEXT.wrap(answer(), thinking=True)
    assert ID[b"</think>x"] not in allowed(matcher)
    assert ID[b"k>z"] in allowed(matcher)
    assert ID[b"</think>ye"] in allowed(matcher)
    assert matcher.advance_bytes(b"</thin")
    assert ID[b"k>z"] not in allowed(matcher)
    assert not matcher.advance(ID[b"k>z"])
    assert not matcher.advance_bytes(b"k>z")
    twin = matcher.copy()
    assert matcher.advance(ID[b"k>yes"])
    assert matcher.is_terminated()
    matcher.rollback(1)
    assert seen(matcher) == seen(twin)
    assert matcher.advance_bytes(b"k>ye")
    assert matcher.forced_bytes() == b"s"


@pytest.mark.parametrize("reasoning", [BY_TEXT, BY_ID, BY_IDS])
def test_masks_say_what_advance_does(reasoning):
    matcher, pick = reasoning.wrap(answer("[a-z]*x?"), thinking=True, max_thinking_tokens=6), random.Random(1)
    for _ in range(14):
        ids = allowed(matcher)
        for token in range(len(TOKENS)):
            assert matcher.copy().advance(token) == (token in ids)
        assert matcher.advance(pick.choice([token for token in ids if token != EOS]))
    assert not matcher.asleep


@pytest.mark.parametrize(
    ("reasoning", "ending"),
    [(BY_ID, [THINK_END]), (BY_IDS, [ID[b"</"], ID[b"think"], ID[b">"]])],
)
@pytest.mark.parametrize("budget", [0, 1, 3])
def test_the_budget_forces_the_end(reasoning, ending, budget):
    matcher = reasoning.wrap(answer(), thinking=True, max_thinking_tokens=budget)
    for _ in range(budget):
        assert len(allowed(matcher)) > 200
        assert matcher.advance(ord("a"))
    for token in ending:
        assert allowed(matcher) == [token]
        assert not matcher.advance(ord("a"))
        assert matcher.advance(token)
    assert seen(matcher) == seen(answer())


def test_the_budget_goes_on_with_an_end_that_has_begun():
    matcher = BY_IDS.wrap(answer(), thinking=True, max_thinking_tokens=2)
    assert matcher.advance(ord("a"))
    assert matcher.advance(ID[b"</"])
    assert allowed(matcher) == [ID[b"think"]]
    spelled = BY_TEXT.wrap(answer(), thinking=True, max_thinking_tokens=1)
    assert spelled.advance(ID[b"</"])
    assert spelled.forced_bytes() == b"think>"
    assert allowed(spelled) == [ord("t"), ID[b"think"]]
    assert not spelled.advance_bytes(b"x")
    assert spelled.advance_bytes(b"thin")
    assert allowed(spelled) == sorted([ord("k"), ID[b"k>"], ID[b"k>yes"]])
    assert spelled.advance_bytes(b"k>no")
    assert spelled.is_terminated()


@settings(deadline=None, max_examples=tries(60))
@given(
    st.sampled_from([BY_TEXT, BY_ID, BY_IDS]), st.sampled_from([None, 0, 4]), st.integers(0, 2**32),
    st.sampled_from(["(yes|no)", "[a-z]{2,4}", "a*"]),
)  # fmt: skip
def test_rollback_and_copies_are_exact(reasoning, budget, seed, pattern):
    pick = random.Random(seed)
    matcher = reasoning.wrap(answer(pattern), thinking=True, max_thinking_tokens=budget)
    trail = [seen(matcher)]
    marks = {THINK_END, *(ID[word] for word in WORDS)}
    for _ in range(12):
        ids = allowed(matcher)
        near = [token for token in ids if token in marks]
        token = pick.choice(near if near and pick.random() < 0.6 else ids)
        as_text = TOKENS[token] and pick.random() < 0.3 and matcher.advance_bytes(TOKENS[token])
        assert as_text or matcher.advance(token)  # where ids are due, text is refused
        trail.append(seen(matcher))
        if matcher.is_terminated():
            break
    steps = len(trail) - 1
    for _ in range(6):
        back = pick.randint(0, steps)
        twin = matcher.copy()
        twin.rollback(back)
        assert seen(twin) == trail[steps - back]
        assert seen(matcher) == trail[-1]
    with pytest.raises(ValueError, match="undo"):
        matcher.rollback(steps + 1)
    matcher.rollback(steps)
    assert seen(matcher) == trail[0]


def test_a_rejection_stays_behind_the_border():
    schema = '{"type": "integer", "not": {"enum": [1]}}'
    inner = LLGuidanceBackend(VOCABULARY).compile(Constraint("json_schema", schema))
    matcher = BY_ID.wrap(inner, thinking=True)
    for token in (ord("a"), THINK_END, ord("1")):
        assert matcher.advance(token)
    assert not matcher.may_stop()
    assert matcher.verdict() is None
    assert matcher.advance(ord("2"))
    assert matcher.may_stop()


@pytest.mark.parametrize(
    "end",
    [
        ReasoningEnd(), ReasoningEnd(ids=((),)), ReasoningEnd(texts=("",)), ReasoningEnd(ids=((9999,),)),
        ReasoningEnd(ids=((-1,),)),
    ],
)  # fmt: skip
def test_ends_that_make_no_sense(end):
    with pytest.raises(BadRequest, match="reasoning_end"):
        Reasoning(VOCABULARY, end)


def test_budgets_below_zero():
    with pytest.raises(BadRequest, match="max_thinking_tokens"):
        BY_ID.wrap(answer(), thinking=True, max_thinking_tokens=-1)


def test_copies_made_asleep_go_their_own_ways():
    matcher = BY_TEXT.wrap(answer("[a-z]{3}"), thinking=True)
    assert matcher.advance_bytes(b"so")
    twin, third = matcher.copy(), matcher.copy()
    assert matcher.advance_bytes(b"</think>ab")
    assert twin.advance_bytes(b"</think>x")
    assert third.asleep
    assert seen(third) == seen(third.copy())
    assert not matcher.may_stop()
    assert matcher.advance(ord("c"))
    assert matcher.is_terminated()
    assert twin.advance_bytes(b"yz")
    assert twin.is_terminated()
    matcher.rollback(2)
    assert matcher.asleep
    fourth = matcher.copy()
    assert fourth.advance_bytes(b"</think>qrs")
    assert matcher.advance_bytes(b"</think>tuv")
    assert matcher.is_terminated()
    fourth.rollback(1)
    assert seen(fourth) == seen(third)


@pytest.mark.parametrize("reasoning", [BY_TEXT, BY_ID, BY_IDS])
def test_what_closes_it_ends_the_reasoning_first(reasoning):
    matcher = reasoning.wrap(answer("(?:[a-z]{2}|no way)"), thinking=True)
    for taken in (b"", b"<", b"/", b"a"):
        if taken:
            assert matcher.advance(ord(taken))
        ids = matcher.closing(40)
        assert ids is not None
        twin = matcher.copy()
        assert all(twin.advance(token) for token in ids)
        assert twin.may_stop()
        assert matcher.asleep
        assert matcher.closing(len(ids)) is not None
    assert matcher.closing(1) is None
    assert matcher.undoable() == 0


def test_reasoning_alone_can_be_bounded():
    matcher = BY_ID.wrap(BY_ID.anything(), thinking=True, max_thinking_tokens=2)
    assert matcher.advance(ord("a"))
    assert not matcher.advance(EOS)
    assert matcher.advance(ord("b"))
    assert allowed(matcher) == [THINK_END]
    assert matcher.advance(THINK_END)
    assert allowed(matcher) == list(range(len(TOKENS)))
    assert matcher.advance(ord("c"))
    assert matcher.advance(EOS)
    assert matcher.is_terminated()
    matcher.rollback(1)
    assert not matcher.is_terminated()
    with pytest.raises(ValueError, match="cannot undo"):
        matcher.rollback(99)
