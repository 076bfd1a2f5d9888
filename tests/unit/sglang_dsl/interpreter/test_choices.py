"""How select picks."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_dsl.backends.base import ChoiceScore
from sglang_dsl.choices import (
    METHODS,
    draw,
    greedy_token_selection,
    softmax,
    token_length_normalized,
    unconditional_likelihood_normalized,
)


def scores(*rows: list[float]) -> list[ChoiceScore]:
    return [ChoiceScore(tuple(row)) for row in rows]


def test_length_normalized_takes_the_best_mean() -> None:
    assert token_length_normalized.decide(scores([-1.0, -3.0], [-1.9], [-2.5])).index == 1
    assert token_length_normalized.decide(scores([-4.0], [-1.0, -1.0, -1.0])).index == 1


def test_certain_tokens_count() -> None:
    decision = token_length_normalized.decide(scores([0.0], [-0.1, -0.1]))
    assert decision.index == 0
    assert token_length_normalized.decide(scores([-3.0, 0.0], [-2.0, -0.5])).index == 1
    all_certain = token_length_normalized.decide(scores([0.0, 0.0], [0.0]))
    assert all_certain.index == 0
    assert all_certain.probabilities == (0.5, 0.5)


def test_greedy_goes_token_by_token() -> None:
    # The first token decides although the second option's mean is better.
    assert greedy_token_selection.decide(scores([-0.5, -9.0], [-0.6, -0.1])).index == 0
    # Equal first tokens: the second one decides; a short option goes on with its mean.
    assert greedy_token_selection.decide(scores([-0.5, -2.0], [-0.5, -1.0], [-0.5])).index == 2
    assert greedy_token_selection.decide(scores([-0.5], [-0.5])).index == 0


def test_unconditional_takes_away_what_is_likely_anyway() -> None:
    rows = [
        ChoiceScore((-1.0, -1.0), unconditional=(None, -0.1)),
        ChoiceScore((-2.0,), unconditional=(-5.0,)),
    ]
    decision = unconditional_likelihood_normalized.decide(rows)
    assert decision.index == 1
    assert decision.scores == pytest.approx((-0.95, 3.0))
    with pytest.raises(ValueError, match="without its prompt"):
        unconditional_likelihood_normalized.decide(scores([-1.0]))


def test_impossible_options_lose_and_never_break_the_arithmetic() -> None:
    inf = -math.inf
    for method in (token_length_normalized, greedy_token_selection):
        decision = method.decide(scores([inf, 0.0], [-50.0]))
        assert decision.index == 1
        assert decision.probabilities == (0.0, 1.0)
    assert token_length_normalized.decide(scores([inf], [inf])).probabilities == (0.5, 0.5)
    rows = [ChoiceScore((inf,), unconditional=(inf,)), ChoiceScore((-1.0,), unconditional=(-1.0,))]
    assert unconditional_likelihood_normalized.decide(rows).index == 1


def test_nothing_to_score_is_an_error() -> None:
    with pytest.raises(ValueError, match="no options"):
        token_length_normalized.decide([])
    with pytest.raises(ValueError, match="option 1 has no scored token"):
        token_length_normalized.decide([ChoiceScore((-1.0,)), ChoiceScore(())])


LOGPROBS = st.lists(st.floats(-30, 0), min_size=1, max_size=5)


@given(st.lists(LOGPROBS, min_size=1, max_size=6))
def test_ties_go_to_the_lowest_index_and_probabilities_add_up(rows: list[list[float]]) -> None:
    for method in (token_length_normalized, greedy_token_selection):
        once = method.decide(scores(*rows))
        assert method.decide(scores(*rows, *rows)).index == once.index
        assert sum(once.probabilities) == pytest.approx(1)
    decided = token_length_normalized.decide(scores(*rows))
    assert decided.index == decided.scores.index(max(decided.scores))


def test_a_drawn_choice_follows_the_probabilities_and_the_seed() -> None:
    rows = scores([math.log(0.7)], [math.log(0.2)], [math.log(0.1)])
    drawn = [token_length_normalized.decide(rows, 1.0, seed).index for seed in range(2000)]
    assert drawn == [token_length_normalized.decide(rows, 1.0, seed).index for seed in range(2000)]
    share = Counter(drawn)
    assert share[0] / 2000 == pytest.approx(0.7, abs=0.04)
    assert share[1] / 2000 == pytest.approx(0.2, abs=0.04)
    # Colder is surer.
    cold = Counter(token_length_normalized.decide(rows, 0.2, seed).index for seed in range(2000))
    assert cold[0] > share[0]


@given(st.lists(st.floats(-50, 0), min_size=1, max_size=8), st.floats(0, 1, exclude_max=True))
def test_draw_only_takes_options_with_a_share(figures: list[float], at: float) -> None:
    probabilities = softmax(figures, 0.5)
    assert probabilities[draw(probabilities, at)] > 0


def test_the_table_knows_each_method_by_its_name() -> None:
    assert all(name == method.name for name, method in METHODS.items())
    assert len(METHODS) == 4
