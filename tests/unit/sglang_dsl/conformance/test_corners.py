"""Corners that programs written for sglang touch: what runs there runs here, on the mock and on the bundled
checkpoint."""

from __future__ import annotations

import asyncio
import json
import socket
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sglang_dsl as sgl
from sglang_dsl.backends.base import Backend
from sglang_dsl.backends.common.openai_choices import likeliest
from sglang_dsl.errors import BackendError, BadProgram, Unsupported
from sglang_dsl.lang.backend.base_backend import BaseBackend
from sglang_dsl.lang.choices import ChoicesDecision
from sglang_dsl.lang.ir import SglSamplingParams, SglSeparateReasoning
from tests.unit.sglang_dsl.conformance.parts import Api, claude, openai_completion, openai_stream

SAYS = "no effect with choices"


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
    with pytest.warns(UserWarning, match="no effect without choices"):
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


# -- text without turns on chat APIs -------------------------------------------------------------------------


def gemini(text: str) -> Any:
    candidate = {"content": {"parts": [{"text": text}], "role": "model"}, "finishReason": "STOP"}
    return 200, [json.dumps({"candidates": [candidate], "usageMetadata": {}}).encode()]


@sgl.function
def few_shot(s: Any) -> None:
    s += "Q: What is 1 + 1?\nA: 2\nQ: What is 2 + 2?\nA:"
    s += sgl.gen("answer", max_tokens=8)
    s += "\nQ: And 3 + 3?\nA:" + sgl.gen("next", max_tokens=8)


def test_text_without_turns_is_one_turn_of_the_user(api: Api) -> None:
    answers = {
        "anthropic": (sgl.Anthropic("m", base_url=api.url, api_key="k"), claude(" 4")),
        "gemini": (sgl.Gemini("m", base_url=api.url, api_key="k"), gemini(" 4")),
    }
    for name, (backend, answer) in answers.items():
        api.sent.clear()
        api.say = lambda path, body, answer=answer: answer
        state = few_shot.run(backend=backend)
        assert state["next"] == " 4"
        told = [body["messages"] if name == "anthropic" else body["contents"] for body in api.bodies()]
        said = ["content", "parts"][name == "gemini"]
        texts = [turn[0][said] if name == "anthropic" else turn[0][said][0]["text"] for turn in told]
        assert [len(turn) for turn in told] == [1, 1]
        assert [turn[0]["role"] for turn in told] == ["user", "user"]
        assert texts[0].endswith("2 + 2?\nA:")
        assert texts[1] == texts[0] + " 4\nQ: And 3 + 3?\nA:"
        backend.close()


def test_text_beside_turns_is_still_refused(api: Api) -> None:
    def body(s: Any) -> None:
        s += "Loose. " + sgl.user("Hello") + sgl.assistant(sgl.gen("a"))

    with pytest.raises(Unsupported, match="is outside of a turn"):
        run(sgl.Anthropic("m", base_url=api.url, api_key="k"), body)
    assert not api.sent


# -- choices and strings on completion models ----------------------------------------------------------------


class Speaker:
    """A completion model with a vocabulary of characters: says what its texts make likely, character by
    character. `texts`: text -> weight."""

    def __init__(self, texts: dict[str, float], tops: int = 5, room: int = 3) -> None:
        self.texts, self.tops, self.room, self.asked = texts, tops, room, 0

    async def __call__(self, said: str) -> list[tuple[str, dict[str, float]]]:
        self.asked += 1
        steps: list[tuple[str, dict[str, float]]] = []
        while len(steps) < self.room:
            following: dict[str, float] = {}
            for text, weight in self.texts.items():
                if text.startswith(said) and len(text) > len(said):
                    token = text[len(said)]
                    following[token] = following.get(token, 0.0) + weight
            if not following:
                break
            ranked = sorted(following, key=lambda token: -following[token])[: self.tops]
            steps.append((ranked[0], {token: following[token] for token in ranked}))
            said += ranked[0]
        return steps


@given(
    st.lists(st.text("ab c", min_size=1, max_size=6).filter(str.strip), min_size=1, max_size=5, unique=True),
    st.data(),
)
def test_the_likeliest_option_is_the_one_that_the_model_says(options: list[str], data: st.DataObject) -> None:
    options = list(dict.fromkeys(option.strip() for option in options))
    chosen = data.draw(st.sampled_from(options))
    blanks = data.draw(st.sampled_from(["", " ", "\n "]))
    # Of a text that ends there the log-probabilities tell no token.
    begins = any(option != chosen and option.startswith(chosen) for option in options)
    ends = data.draw(st.sampled_from([".", "!?"] if begins else [".", "!?", ""]))
    others = {blanks + option + ".": 0.1 for option in options if option != chosen}
    speaker = Speaker({blanks + chosen + ends: 10.0, **others}, room=data.draw(st.integers(1, 5)))
    index, _ = asyncio.run(likeliest(speaker, options))
    assert options[index] == chosen
    assert speaker.asked <= len(blanks + chosen) + 2


def completion(tokens: list[tuple[str, dict[str, float]]]) -> Any:
    told = {
        "tokens": [token for token, _ in tokens],
        "token_logprobs": [tops[token] for token, tops in tokens],
        "top_logprobs": [tops for _, tops in tokens],
    }
    text = "".join(token for token, _ in tokens)
    choice = {"index": 0, "text": text, "finish_reason": "length", "logprobs": told}
    return 200, [json.dumps({"id": "c", "choices": [choice], "usage": {"prompt_tokens": 3}}).encode()]


def test_select_on_a_completion_model(api: Api) -> None:
    said = [
        completion([(" Well", {" Well": -0.5, " pos": -1.5, " neg": -2.5}), (",", {",": -0.1})]),
        completion([("itive", {"itive": -0.01}), (".", {".": -0.2})]),
    ]
    api.say = lambda path, body: said[len(api.sent) - 1]
    backend = sgl.OpenAI("gpt-3.5-turbo-instruct", base_url=api.url, api_key="k")
    program = sgl.function(
        lambda s: s.__iadd__("Good. Mood:" + sgl.select("mood", ["negative", "positive", "post"]))
    )
    state = program.run(backend=backend)
    assert state["mood"] == "positive"
    assert [body["prompt"] for body in api.bodies()] == ["Good. Mood:", "Good. Mood: pos"]
    assert {body["temperature"] for body in api.bodies()} == {0}
    assert state.get_meta_info("mood")["exact"] is False
    backend.close()


def test_select_where_a_server_tells_no_log_probabilities(api: Api) -> None:
    backend = sgl.OpenAI("m", is_chat_model=False, base_url=api.url, api_key="k")
    program = sgl.function(lambda s: s.__iadd__("Is it? " + sgl.gen("a", choices=["yes", "no", "yes, but"])))
    for text, wanted in (("yes, of course", "yes"), (" no", "no"), ("yes, but not here", "yes, but")):
        api.say = lambda path, body, text=text: openai_completion(text)
        assert program.run(backend=backend)["a"] == wanted
    api.say = lambda path, body: openai_completion("maybe")
    with pytest.raises(BackendError, match="none of the options"):
        program.run(backend=backend)["a"]
    backend.close()


STRINGS = st.one_of(st.text(), st.text('a"\\n\n\t ', max_size=12), st.builds(json.dumps, st.text()))


@pytest.mark.parametrize("stream", [False, True])
def test_a_string_on_a_completion_model(api: Api, stream: bool) -> None:
    backend = sgl.OpenAI("m", is_chat_model=False, base_url=api.url, api_key="k")
    program = sgl.function(lambda s: s.__iadd__("Name: " + sgl.gen("a", dtype=str, max_tokens=9) + "."))

    @given(STRINGS.filter(lambda text: text.isprintable() or "\n" in text))
    def holds(text: str) -> None:
        made = openai_stream([text], "text") if stream else openai_completion(text)
        api.say = lambda path, body: made
        value = program.run(backend=backend, stream=stream)["a"]
        assert isinstance(json.loads(value), str)

    holds()
    for text, wanted in (
        ("Ann", "Ann"),
        ('"Ann"', "Ann"),
        ('Ann" and "Bob', "Ann"),
        ("a\nb", "a\nb"),
        ("", ""),
    ):
        made = openai_stream([text], "text") if stream else openai_completion(text)
        api.say = lambda path, body, made=made: made
        assert json.loads(program.run(backend=backend, stream=stream)["a"]) == wanted
    backend.close()


# -- BaseBackend ---------------------------------------------------------------------------------------------


class Parrot(BaseBackend):
    """As programs for sglang write one."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[dict[str, Any]], SglSamplingParams]] = []
        self.cleared = 0

    def generate(self, s: Any, sampling_params: SglSamplingParams) -> tuple[Any, dict[str, Any]]:
        self.seen.append((s.text_, s.messages_, sampling_params))
        said = f"<{len(self.seen)}>"
        return ([said] * sampling_params.n if sampling_params.n > 1 else said), {"by": "parrot"}

    def generate_stream(self, s: Any, sampling_params: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        for piece in ("a", "b", "c"):
            yield piece, {}

    def select(self, s: Any, choices: list[str], temperature: float, choices_method: Any = None) -> Any:
        return ChoicesDecision(decision=choices[-1], meta_info={"by": "parrot"})

    def flush_cache(self) -> bool:
        self.cleared += 1
        return True


def test_a_base_backend_can_be_made_and_subclassed() -> None:
    assert isinstance(BaseBackend(), BaseBackend)
    assert isinstance(sgl.MockBackend(), BaseBackend)
    parrot = Parrot()

    @sgl.function
    def program(s: Any) -> None:
        s += sgl.system("Be kind.") + sgl.user("Hello")
        s += sgl.assistant(sgl.gen("a", max_tokens=5, temperature=0, stop="x", regex="<.*>"))
        s += sgl.user("Which?") + sgl.assistant(sgl.select("c", ["left", "right"]))
        forks = s.fork(3)
        forks += sgl.user("n") + sgl.assistant(sgl.gen("b", n=2))
        forks.join()

    sgl.set_default_backend(parrot)
    try:
        state = program.run()
        assert (state["a"], state["c"]) == ("<1>", "right")
        assert [len(one) for one in state["b"]] == [2, 2, 2]
        assert state.get_meta_info("a")["by"] == state.get_meta_info("c")["by"] == "parrot"
        assert sgl.flush_cache()
    finally:
        sgl.set_default_backend(None)
    text, messages, params = parrot.seen[0]
    assert text == "SYSTEM:Be kind.\nUSER:Hello\nASSISTANT:"
    assert messages == [
        {"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}
    ]  # fmt: skip
    assert (params.max_new_tokens, params.temperature, params.regex) == (5, 0.0, "<.*>")
    assert tuple(params.stop) == ("x",)
    assert params.to_srt_kwargs()["max_new_tokens"] == 5
    assert parrot.cleared == 1


def test_a_base_backend_streams_fails_and_says_what_it_lacks() -> None:
    program = sgl.function(lambda s: s.__iadd__("x" + sgl.gen("a")))
    assert list(program.run(backend=Parrot(), stream=True).text_iter("a")) == ["a", "b", "c"]
    with pytest.raises(Unsupported, match="has no generate"):
        program.run(backend=BaseBackend())["a"]

    class Whole(BaseBackend):
        def generate(self, s: Any, sampling_params: Any) -> tuple[str, dict[str, Any]]:
            if "bad" in s.text_:
                raise OSError("cut off")
            return "whole", {}

    assert "".join(program.run(backend=Whole(), stream=True).text_iter()) == "xwhole"
    states = program.run_batch([{}] * 200, backend=Whole())
    assert {state["a"] for state in states} == {"whole"}
    with pytest.raises(BackendError, match="cut off"):
        run(Whole(), lambda s: s.__iadd__("bad" + sgl.gen("a")))
    with pytest.raises(Unsupported, match="ebnf"):
        run(Whole(), lambda s: s.__iadd__("x" + sgl.gen("a", ebnf='root ::= "a"')))


def test_a_base_backend_that_was_closed_answers_again() -> None:
    parrot = Parrot()
    program = sgl.function(lambda s: s.__iadd__("x" + sgl.gen("a")))
    for count in (1, 2):
        assert program.run(backend=parrot)["a"] == f"<{count}>"
        parrot.endpoint.close()


def test_sampling_parameters_as_programs_make_them() -> None:
    params = SglSamplingParams(max_new_tokens=3, top_k=-1, stop=["a"])
    assert params.to_anthropic_kwargs() == {
        "temperature": 1.0, "top_p": 1.0, "stop_sequences": ["a"], "max_tokens": 3,
    }  # fmt: skip
    other = params.clone()
    other.stop.append("b")  # type: ignore[union-attr]
    assert params.stop == ["a"]


def test_reasoning_taken_apart_by_its_class() -> None:
    backend = sgl.MockBackend(["<think>hm</think>yes"])
    state = run(backend, lambda s: s.__iadd__("x" + SglSeparateReasoning("qwen3", sgl.gen("a"))))
    assert (state["a"], state["a_reasoning_content"]) == ("yes", "hm")


# -- an endpoint that nobody serves --------------------------------------------------------------------------


def test_an_endpoint_that_nobody_serves_is_told_when_it_is_made(api: Api) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(BackendError, match="no connection") as caught:
            sgl.RuntimeEndpoint(url)
        assert "lazy=True" in str(caught.value)
        assert sgl.RuntimeEndpoint(url, lazy=True).base_url == url
    for wrong in ("http://name.invalid:1", "http://127.0.0.1:99999"):
        with pytest.raises((BackendError, ValueError)):
            sgl.RuntimeEndpoint(wrong)
    sgl.RuntimeEndpoint(api.url)
    assert not api.sent
