"""MockBackend: deterministic, and honest about what it cannot do."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sglang_dsl as sgl
from runtime.protocol.messages import Message
from runtime.protocol.sampling import SamplingParams
from sglang_dsl import BackendError, InvalidValue, MockBackend, Unsupported, gen, select
from sglang_dsl.backends.base import Call, Prompt
from sglang_dsl.backends.common.example_text import example


@sgl.function
def one(s: Any, prompt: str = "p", node: Any = None) -> None:
    s += prompt + (gen("x") if node is None else node)


def test_made_up_text_depends_on_the_prompt_alone() -> None:
    first, second = MockBackend(), MockBackend()
    assert one.run("a", backend=first)["x"] == one.run("a", backend=second)["x"]
    one.run("b", backend=first).sync()
    assert one.run("a", backend=first)["x"] == one.run("a", backend=second)["x"]
    assert len({one.run(str(i), backend=first)["x"] for i in range(30)}) > 10
    assert len(set(one.run(node=gen("x", n=4), backend=first)["x"])) > 1


@pytest.mark.parametrize(
    "regex",
    [
        r"[0-9]{3}-[0-9]{4}",
        r"(cat|dog)s?",
        r"\{\"name\": \"[A-Z][a-z]*\", \"ok\": (true|false)\}",
        r"[^a-y]+",
        r".\d\w\s\D\W\S",
        r"^a(?:b|c)*?d$",
        r"(a|b)\1",
        r"(?i:x)y",
        r"é|ü",
        sgl.REGEX_INT,
        sgl.REGEX_FLOAT,
        sgl.REGEX_BOOL,
        sgl.REGEX_STR,
    ],
)
def test_made_up_text_matches_its_regex(regex: str) -> None:
    for prompt in "abcdef":
        assert re.fullmatch(regex, one.run(prompt, gen("x", regex=regex), backend=MockBackend())["x"])


def test_made_up_text_varies_where_the_regex_lets_it() -> None:
    found = {one.run(str(i), gen("x", regex="(cat|dog)[0-9]"), backend=MockBackend())["x"] for i in range(40)}
    assert len(found) > 5


@pytest.mark.parametrize("regex", [r"(?=a)b", r"a(?<!a)", r"[^\s\S]"])
def test_a_regex_it_cannot_do_is_refused(regex: str) -> None:
    with pytest.raises(Unsupported, match="cannot make up text"):
        one.run(node=gen("x", regex=regex), backend=MockBackend())["x"]


@given(st.from_regex(r"([a-c]|[0-9]{2}|\(x\|y\)|z\?)+", fullmatch=True))
def test_examples_match(pattern: str) -> None:
    assert re.fullmatch(pattern, example(pattern))


def test_scripts() -> None:
    assert one.run("what is red", backend=MockBackend({"blue": "sky", r"re.": "rose"}))["x"] == "rose"
    with pytest.raises(BackendError, match="patterns matches"):
        one.run("green", backend=MockBackend({"blue": "sky"}))["x"]
    used_up = MockBackend(["only"])
    assert one.run(backend=used_up)["x"] == "only"
    with pytest.raises(BackendError, match="no replies left"):
        one.run(backend=used_up)["x"]

    async def later(call: Call) -> str:
        await asyncio.sleep(0.001)
        return str(call.prompt.plain_text).upper()

    assert one.run("loud", backend=MockBackend(later))["x"] == "LOUD"
    with pytest.raises(BackendError, match="1 texts for a call that requests 2"):
        one.run(node=gen("x", n=2), backend=MockBackend([["a"]]))["x"]
    with pytest.raises(TypeError, match="pass a list"):
        MockBackend("text")
    with pytest.raises(ValueError, match="words"):
        MockBackend(tokens="ids")


def test_a_scripted_reply_must_keep_its_constraint() -> None:
    for node, good, bad in (
        (gen("x", regex="a+"), "aa", "ab"),
        (gen("x", dtype=int), "12", "twelve"),
        (gen("x", json_schema={"type": "object"}), '{"a": 1}', "{"),
    ):
        assert one.run(node=node, backend=MockBackend([good]))["x"] == good
        with pytest.raises(InvalidValue, match="is not what its"):
            one.run(node=node, backend=MockBackend([bad]))["x"]
    with pytest.raises(Unsupported, match="script the reply"):
        one.run(node=gen("x", ebnf='root ::= "a"'), backend=MockBackend())["x"]


def test_limits_and_stops() -> None:
    state = one.run(node=gen("x", max_tokens=2), backend=MockBackend(["one two three"]))
    assert state["x"] == "one two"
    assert state.get_meta_info("x")["finish_reason"] == {"type": "length"}
    state = one.run(node=gen("x", stop=["wo", "t"]), backend=MockBackend(["one two three"]))
    assert state["x"] == "one "
    assert state.get_meta_info("x")["finish_reason"] == {"type": "stop", "matched": "t"}
    counted = MockBackend(["é"], tokens="bytes")
    state = one.run("ü", backend=counted)
    assert state["x"] == "é"
    assert (counted.usage.prompt_tokens, counted.usage.completion_tokens) == (2, 2)


def test_what_it_has_not_is_refused() -> None:
    for words in (
        {"stop_regex": "a"},
        {"top_logprobs_num": 1},
        {"logprob_start_len": 0},
        {"stop_token_ids": [3]},
    ):
        with pytest.raises(Unsupported):
            one.run(node=gen("x", **words), backend=MockBackend())["x"]  # type: ignore[arg-type]
    state = one.run(node=gen("x", return_logprob=True), backend=MockBackend(["two words"]))
    assert len(state.get_meta_info("x")["output_token_logprobs"]) == 2


def test_errors_come_at_their_call() -> None:
    mock = MockBackend(errors={1: OSError("second")}, scores={"a": -1})
    assert one.run(backend=mock)["x"]
    with pytest.raises(BackendError, match="second"):
        one.run(node=select("x", ["a"]), backend=mock)["x"]
    assert one.run(node=select("x", ["a"]), backend=mock)["x"] == "a"
    assert (len(mock.calls), len(mock.choice_calls)) == (1, 2)


def test_scores_may_be_a_function() -> None:
    mock = MockBackend(scores=lambda call, option: [-len(option)])
    assert one.run(node=select("x", ["long one", "short"]), backend=mock)["x"] == "short"
    made_up = select("x", ["p", "q"], choices_method="unconditional_likelihood_normalized")
    state = one.run(node=made_up, backend=MockBackend())
    assert state["x"] in ("p", "q")
    assert all(len(prior) == 1 for prior in state.get_meta_info("x")["unconditional_logprobs"])
    picks = {one.run(str(i), select("x", ["p", "q"]), backend=MockBackend())["x"] for i in range(20)}
    assert picks == {"p", "q"}


def test_prompts_with_parts_are_counted() -> None:
    prompt = Prompt((Message("user", [{"type": "text", "text": "hi"}]), Message("assistant", "", open=True)))
    done = asyncio.run(MockBackend(["ok"]).generate(Call(prompt, SamplingParams())))
    assert done.meta["prompt_tokens"] > 0


@pytest.mark.parametrize("tokens", ["words", "bytes"])
def test_what_it_makes_up_is_as_long_as_it_must_be_and_its_tokens_are_told(tokens: str) -> None:
    node = gen("x", min_tokens=40, max_tokens=80, return_logprob=True, return_text_in_logprobs=True)
    state = one.run(node=node, backend=MockBackend(tokens=tokens))
    meta = state.get_meta_info("x")
    assert 40 <= meta["completion_tokens"] <= 80
    told = meta["output_token_logprobs"]
    assert len(told) == meta["completion_tokens"]
    assert "".join(text for _, _, text in told) == state["x"]
    again = one.run(node=gen("x", return_logprob=True), backend=MockBackend(tokens=tokens))
    assert {text for _, _, text in again.get_meta_info("x")["output_token_logprobs"]} == {None}


def test_it_says_which_model_answers() -> None:
    backend = MockBackend()
    assert backend.get_model_name() == backend.model_info["model_path"] == "mock"
