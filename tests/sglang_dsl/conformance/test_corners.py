"""Corners that programs written for sglang touch: what runs there runs here, on the mock and on the bundled
checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sglang_dsl as sgl
from sglang_dsl.backends.base import Backend
from sglang_dsl.errors import BadProgram

SAYS = "without effect beside choices"


def run(backend: Backend, body: Callable[[Any], Any], **words: Any) -> Any:
    state = sgl.function(body).run(backend=backend, **words)
    state.sync()
    return state


# -- words beside choices ------------------------------------------------------------------------------------


def test_words_beside_choices_run_with_one_warning(backend: Backend) -> None:
    def body(s: Any) -> None:
        s += "Is it so? " + sgl.gen(
            "a", max_tokens=5, choices=["yes", "no"], temperature=0.0, return_logprob=True, stop="\n"
        )

    with pytest.warns(UserWarning, match=SAYS) as told:
        state = run(backend, body)
    assert [str(one.message) for one in told] == [f"max_tokens, stop: {SAYS}, where whole options are scored"]
    assert told[0].filename == __file__
    assert state["a"] in ("yes", "no")
    assert len(state.get_meta_info("a")["input_token_logprobs"]) == 2


def test_words_beside_choices_that_say_nothing_are_taken() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        node = sgl.gen(
            "a",
            None,
            choices=("x", "y"),
            n=1,
            stop=[],
            stop_token_ids=None,
            ignore_eos=False,
            top_p=1.0,
            top_k=-1,
            min_tokens=0,
            frequency_penalty=0,
            return_logprob=True,
            return_text_in_logprobs=True,
            logprob_start_len=-1,
            top_logprobs_num=0,
        )
    assert node == sgl.select("a", ["x", "y"])


IDLE = {
    "max_tokens": 3, "min_tokens": 2, "n": 2, "stop": "x", "stop_token_ids": [1], "stop_regex": "a+",
    "top_p": 0.5, "top_k": 3, "min_p": 0.1, "frequency_penalty": 0.5, "presence_penalty": 0.5,
    "ignore_eos": True, "logprob_start_len": 0, "top_logprobs_num": 2, "dtype": str,
    "repetition_penalty": 1.5, "logit_bias": {1: 2.0}, "token_healing": True, "no_stop_trim": True,
}  # fmt: skip


@given(st.sets(st.sampled_from(sorted(IDLE)), min_size=1))
def test_every_idle_word_is_named_once(words: set[str]) -> None:
    with pytest.warns(UserWarning, match=SAYS) as told:
        node = sgl.gen("a", choices=["x", "y"], **{word: IDLE[word] for word in words})
    assert len(told) == 1
    assert set(str(told[0].message).partition(":")[0].split(", ")) == words
    assert node == sgl.select("a", ["x", "y"])


def test_a_choice_method_without_choices_is_a_generation(backend: Backend) -> None:
    with pytest.warns(UserWarning, match="without effect without choices"):
        node = sgl.gen("a", max_tokens=3, choices=None, choices_method=sgl.greedy_token_selection)
    assert isinstance(run(backend, lambda s: s.__iadd__("x" + node))["a"], str)


# -- numbers -------------------------------------------------------------------------------------------------


def test_whole_numbers_may_be_floats(backend: Backend) -> None:
    state = run(
        backend,
        lambda s: s.__iadd__("Hello" + sgl.gen("a", 4.0, top_k=-1.0, n=1.0)),
        temperature=0,
        top_k=-1.0,
    )
    assert isinstance(state["a"], str)


def test_numbers_of_numpy_are_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    node = sgl.gen("a", max_tokens=numpy.int64(4), temperature=numpy.float32(0.5), top_k=numpy.float64(3))
    assert node == sgl.gen("a", max_tokens=4, temperature=0.5, top_k=3)
    assert type(node.sampling.max_tokens) is int


@given(st.floats().filter(lambda value: not value.is_integer()))
def test_what_is_no_whole_number_is_refused(value: float) -> None:
    with pytest.raises(BadProgram, match="whole number"):
        sgl.gen("a", max_tokens=4, top_k=value)


# -- names, turns, beginnings --------------------------------------------------------------------------------


def test_a_variable_may_have_an_empty_name(backend: Backend) -> None:
    state = run(backend, lambda s: s.__iadd__("Hello" + sgl.gen("", max_tokens=3)))
    assert state.text() == "Hello" + state[""]


@pytest.mark.parametrize("end", ["system_end", "assistant_end", "user_end"])
def test_any_end_ends_the_open_turn(backend: Backend, end: str) -> None:
    def body(s: Any) -> None:
        s += sgl.user_begin() + "Hello" + getattr(sgl, end)()
        s += sgl.assistant(sgl.gen("a", max_tokens=3))

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        state = run(backend, body)
    assert [m["role"] for m in state.messages()] == ["user", "assistant"]
    assert len(told) == (end != "user_end")
    with pytest.raises(BadProgram, match="no turn is open"):
        run(backend, lambda s: s.__iadd__(getattr(sgl, end)()))


@pytest.mark.parametrize(
    "words", [{}, {"regex": "[0-9]{2}"}, {"dtype": int}, {"choices": ["left", "right"]}, {"n": 2}]
)
def test_a_program_may_begin_with_a_generation(backend: Backend, words: dict[str, Any]) -> None:
    more = {} if "choices" in words else {"max_tokens": 4}
    state = run(backend, lambda s: s.__iadd__(sgl.gen("a", **words, **more)))
    value = state["a"]
    assert state.text() == (value[0] if isinstance(value, list) else value)
