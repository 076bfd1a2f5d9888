"""Choice methods as programs call them and bring them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sglang_dsl as sgl
from sglang_dsl.backends.base import ChoiceScore
from sglang_dsl.choices import METHODS, UserMethod, as_method
from sglang_dsl.errors import BadProgram, ProgramError
from sglang_dsl.lang.choices import ChoicesDecision, ChoicesSamplingMethod

OPTIONS = ["near", "nearer still", "far"]
TOKENS = [[(-0.5, 1, "near")], [(-0.5, 1, "near"), (-0.25, 2, "er still")], [(-0.4, 3, "far")]]
PRIOR = [[(None, 1, None)], [(None, 1, None), (-2.25, 2, None)], [(None, 3, None)]]


class Last(ChoicesSamplingMethod):
    """Takes the last option, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def __call__(self, **words: Any) -> ChoicesDecision:
        self.asked.append(words)
        return ChoicesDecision(words["choices"][-1], {"why": "it is the last", "index": 99})


class LastWithPrior(Last):
    @property
    def requires_unconditional_logprobs(self) -> bool:
        return True


@sgl.function
def asks(s: Any, method: Any, options: list[str]) -> None:
    s += "It is " + sgl.select("x", options, choices_method=method) + "."


def test_the_known_ones_can_be_called() -> None:
    words: dict[str, Any] = {"choices": OPTIONS, "input_token_logprobs": TOKENS}
    taken = sgl.token_length_normalized(**words)
    assert taken.decision == "nearer still"
    assert taken.meta_info["normalized_prompt_logprobs"] == pytest.approx([-0.5, -0.375, -0.4])
    # Means that are given are believed, by the method that goes by them and by no other.
    means = {"normalized_prompt_logprobs": [-3.0, -2.0, -1.0], "output_token_logprobs": [[], [], []]}
    assert sgl.token_length_normalized(**words, **means).decision == "far"
    greedy = sgl.greedy_token_selection(**words, **means)
    assert greedy.decision == "far"
    assert greedy.meta_info["greedy_logprob_matrix"][0] == [-0.5, -0.5]
    least = sgl.unconditional_likelihood_normalized(**words, unconditional_token_logprobs=PRIOR)
    assert least.decision == "nearer still"
    assert least.meta_info["normalized_unconditional_prompt_logprobs"] == pytest.approx([-0.5, 0.75, -0.4])
    wanted = {name: method.requires_unconditional_logprobs for name, method in METHODS.items()}
    assert [name for name, also in wanted.items() if also] == ["unconditional_likelihood_normalized"]
    assert all(isinstance(method, ChoicesSamplingMethod) for method in METHODS.values())


LOGPROBS = st.lists(st.floats(-20, 0), min_size=1, max_size=4)


@given(st.lists(LOGPROBS, min_size=1, max_size=5), st.sampled_from(sorted(METHODS)))
def test_a_call_picks_what_a_select_picks(rows: list[list[float]], name: str) -> None:
    options = [f"option {index}" for index in range(len(rows))]
    tokens = [[(value, 7, None) for value in row] for row in rows]
    scored = [
        ChoiceScore(tuple(row), unconditional=tuple(-1.0 for _ in row), text=option)
        for row, option in zip(rows, options, strict=True)
    ]
    prior = [[(-1.0, 7, None) for _ in row] for row in rows]
    made = METHODS[name](choices=options, input_token_logprobs=tokens, unconditional_token_logprobs=prior)
    decided = METHODS[name].decide(scored)
    assert made.decision == options[decided.index]
    assert made.meta_info["scores"] == list(decided.scores)


def test_calls_that_do_not_fit_are_told() -> None:
    with pytest.raises(ValueError, match="2 entries for 3 options"):
        sgl.token_length_normalized(choices=OPTIONS, input_token_logprobs=TOKENS[:2])
    with pytest.raises(ValueError, match="a token of option 0 has no log-probability"):
        sgl.token_length_normalized(choices=["a"], input_token_logprobs=[[(None, 1, None)]])
    with pytest.raises(ValueError, match="option 0 has no scored token"):
        sgl.token_length_normalized(choices=["a"], input_token_logprobs=[[]])
    with pytest.raises(ValueError, match="without its prompt"):
        sgl.unconditional_likelihood_normalized(choices=OPTIONS, input_token_logprobs=TOKENS)


@pytest.mark.parametrize("made", [Last, LastWithPrior])
def test_a_program_brings_its_own(made: type[Last]) -> None:
    method = made()
    state = asks.run(method, OPTIONS, backend=sgl.MockBackend())
    assert state["x"] == "far"
    assert state.text() == "It is far."
    (asked,) = method.asked
    assert asked["choices"] == OPTIONS
    assert len(asked["normalized_prompt_logprobs"]) == len(asked["input_token_logprobs"]) == 3
    for mean, tokens in zip(asked["normalized_prompt_logprobs"], asked["input_token_logprobs"], strict=True):
        assert mean == pytest.approx(sum(triple[0] for triple in tokens) / len(tokens))
    without = asked["unconditional_token_logprobs"]
    if made is Last:
        assert without is None
    else:
        assert list(map(len, without)) == list(map(len, asked["input_token_logprobs"]))
    meta = state.get_meta_info("x")
    assert (meta["why"], meta["index"], meta["method"]) == ("it is the last", 2, made.__name__)
    choice = state.choice("x")
    assert (choice.text, choice.index, choice.options) == ("far", 2, tuple(OPTIONS))
    # Compiled, the choice has the method's name; the program round-trips through JSON.
    program = asks.trace(method, OPTIONS)
    assert f"method='{made.__name__}'" in str(program)
    assert type(program).from_json(program.to_json()) == program


def test_a_function_will_do_and_gen_takes_it_too() -> None:
    def shortest(*, choices: list[str], **_: Any) -> ChoicesDecision:
        return ChoicesDecision(min(choices, key=len))

    @sgl.function
    def both(s: Any) -> None:
        s += sgl.gen("a", choices=OPTIONS, choices_method=shortest)
        s += sgl.gen("b", choices=OPTIONS, choices_method="greedy_token_selection")

    state = both.run(backend=sgl.MockBackend())
    assert state["a"] == "far"
    assert state["b"] in OPTIONS


def test_what_is_no_method_is_refused_where_it_is_written() -> None:
    for wrong in (Last, 3, ["x"], "no_such"):
        with pytest.raises(BadProgram, match="known: token_length_normalized"):
            sgl.select("x", OPTIONS, choices_method=wrong)  # type: ignore[arg-type]
    with pytest.raises(BadProgram, match="cannot be used"):
        sgl.select("x", OPTIONS, temperature=0.5, choices_method=Last())


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (lambda **_: ChoicesDecision("else"), "returned 'else', which is not one of the options"),
        (lambda **_: None, "returned None"),
        (lambda **words: words["nothing"], "KeyError: 'nothing'"),
    ],
)
def test_one_that_errs_fails_its_program_and_no_other(method: Any, said: str) -> None:
    wrong, right = asks.run_batch(
        [(method, OPTIONS), (Last(), OPTIONS)], backend=sgl.MockBackend(), on_error="return"
    )
    assert type(wrong) is ProgramError
    assert said in str(wrong)
    assert "in Select(name='x'" in str(wrong)
    assert right["x"] == "far"


def test_one_of_a_known_name_is_still_its_own() -> None:
    own = as_method(Last())
    assert isinstance(own, UserMethod)
    named = UserMethod("token_length_normalized", own.scores, own.pick, method=Last())
    assert asks.run(named, OPTIONS, backend=sgl.MockBackend())["x"] == "far"
