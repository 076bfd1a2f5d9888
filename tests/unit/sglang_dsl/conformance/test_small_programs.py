"""Small programs in the style of sglang's own examples, on the mock and on the bundled checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

import sglang_dsl as sgl
from sglang_dsl.backends.base import Backend
from sglang_dsl.lang.ir import REGEX_INT
from sglang_dsl.srt.constrained import build_regex_from_object

pytestmark = pytest.mark.filterwarnings("ignore:.*no effect with choices")
STOP = ["\n"]
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}


@pytest.fixture(autouse=True)
def default(backend: Backend) -> Iterator[None]:
    sgl.set_default_backend(backend)
    yield
    sgl.set_default_backend(None)


def test_a_tool_is_chosen_and_used() -> None:
    @sgl.function
    def tool_use(s: Any, question: Any) -> None:
        s += "To answer this question: " + question + ". I need a "
        s += (
            sgl.gen("tool", choices=["calculator", "search engine"], max_tokens=5, return_logprob=True) + ". "
        )
        if s["tool"] == "calculator":
            s += "The expression is" + sgl.gen("expression", stop=STOP, max_tokens=8)
        else:
            s += "The words are" + sgl.gen("words", stop=STOP, max_tokens=8)

    for state in tool_use.run_batch([{"question": "2 + 2"}, {"question": "who?"}], temperature=0.0):
        used = "expression" if state["tool"] == "calculator" else "words"
        assert state.text().endswith(state[used])
    assert STOP == ["\n"]


def test_a_loop_of_choices_ends_by_one() -> None:
    @sgl.function
    def steps(s: Any) -> Any:
        for number in range(3):
            s += f"Step {number}: "
            s += sgl.gen(f"s{number}", choices=["go", "stop"], temperature=0.0, max_tokens=1) + "\n"
            if s[f"s{number}"] == "stop":
                break
        return number

    state = steps.run()
    assert all(state[f"s{number}"] == "go" for number in range(state.ret_value))


def test_values_of_every_dtype_from_the_first_line_on() -> None:
    @sgl.function
    def values(s: Any) -> None:
        s += sgl.gen_int("i", max_tokens=3) + " " + sgl.gen("f", dtype="float", max_tokens=4.0)
        s += " " + sgl.gen("b", dtype=bool) + " " + sgl.gen_string("s", max_tokens=12, top_k=-1.0)

    state = values.run(temperature=0, top_k=-1.0)
    assert re.fullmatch(REGEX_INT, state["i"])
    float(state["f"])
    assert state["b"] in ("True", "False")


def test_json_by_a_regex_and_by_a_schema() -> None:
    @sgl.function
    def both(s: Any) -> None:
        s += sgl.gen("one", max_tokens=64, regex=build_regex_from_object(json.dumps(SCHEMA)))
        s += "\n" + sgl.gen("two", max_tokens=64, json_schema=json.dumps(SCHEMA))

    state = both.run(temperature=0)
    assert {type(json.loads(state[name])["ok"]) for name in ("one", "two")} == {bool}


def test_samples_by_forks_and_by_n() -> None:
    @sgl.function
    def sampled(s: Any, question: Any, n: Any) -> None:
        s += "Q: " + question + "\nReasoning:"
        forks = s.fork(n)
        forks += sgl.gen("reasoning", stop="\n", temperature=0.7, max_tokens=6)
        forks += "\nThe answer is" + sgl.gen("answer", max_tokens=3)
        forks.join()
        s += "\nTogether:" + sgl.gen("all", n=2.0, max_tokens=3)

    state = sampled.run(question="1 + 1", n=4, temperature=0.5)
    assert [len(state[name]) for name in ("reasoning", "answer", "all")] == [4, 4, 2]


def test_turns_by_halves_and_by_blocks() -> None:
    @sgl.function
    def talk(s: Any, first: Any) -> None:
        s += sgl.system_begin() + "Be brief." + sgl.system_end()
        s += sgl.user_begin()
        s += first
        s += sgl.user_end()
        s += sgl.assistant_begin() + sgl.gen("a", max_tokens=4, stop="</s>") + sgl.assistant_end()
        with s.user():
            s += "And?"
        with s.assistant(), s.var_scope("whole"):
            s += "Well, " + sgl.gen("b", max_tokens=3)

    state = talk.run(first="Hello")
    assert [m["role"] for m in state.messages()] == ["system", "user", "assistant", "user", "assistant"]
    assert state["whole"] == "Well, " + state["b"]


def test_options_of_any_kind_of_collection_and_each_method() -> None:
    @sgl.function
    def pick(s: Any, method: Any) -> None:
        s += "x" + sgl.gen("g", choices=(c for c in ("a", "b")), choices_method=method, max_tokens=3)
        s += sgl.select("d", {"left": 1, "right": 2}, 0.0, method)

    methods = (
        sgl.token_length_normalized, sgl.greedy_token_selection, sgl.unconditional_likelihood_normalized,
    )  # fmt: skip
    for method in methods:
        state = pick.run(method=method)
        assert (state["g"] in "ab", state["d"] in ("left", "right")) == (True, True)
        assert len(state.get_meta_info("d")["normalized_prompt_logprobs"]) == 2


def test_one_request_for_several_generations_asked_for() -> None:
    @sgl.function(num_api_spec_tokens=16)
    def card(s: Any) -> None:
        s += "Name: " + sgl.gen("name", stop=STOP, max_tokens=6)
        s += "\nAge: " + sgl.gen("age", stop=STOP, max_tokens=6)

    state = card.run()
    assert state.text() == f"Name: {state['name']}\nAge: {state['age']}"
