"""The backends for other people's APIs, against real processes that speak those APIs: the bundled server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import sglang_dsl as sgl
from sglang_dsl.backends.anthropic import Anthropic
from sglang_dsl.backends.openai import OpenAI
from sglang_dsl.errors import BackendError, Unsupported
from tests.process.patience import PROGRAM_S

TOWN = {
    "type": "object",
    "properties": {"town": {"enum": ["Ostrel", "Thessen"]}},
    "required": ["town"],
    "additionalProperties": False,
}


@sgl.function
def qa(s: Any, question: str) -> None:
    s += sgl.system("Answer briefly.")
    s += sgl.user(question)
    s += sgl.assistant(sgl.gen("answer", max_tokens=24, temperature=0))
    s += sgl.user("And once more?")
    s += sgl.assistant(sgl.gen("again", max_tokens=16, temperature=0))


@pytest.fixture(scope="module")
def makers(shared_server: Any) -> dict[str, Callable[[], Any]]:
    url = shared_server.url
    return {
        "openai": lambda: OpenAI("pocket", base_url=f"{url}/v1", api_key="none", extensions="all"),
        "anthropic": lambda: Anthropic("pocket", base_url=url, api_key="none"),
    }


NAMES = ["openai", "anthropic"]


@pytest.mark.parametrize("name", NAMES)
def test_a_conversation_says_what_the_native_endpoint_says(
    name: str, makers: dict[str, Callable[[], Any]], shared_server: Any
) -> None:
    question = "Which river runs through Ostrel?"
    native = qa.run(question, backend=sgl.RuntimeEndpoint(shared_server.url))
    backend = makers[name]()
    state = qa.run(question, backend=backend)
    assert (state["answer"], state["again"]) == (native["answer"], native["again"])
    meta = state.get_meta_info("answer")
    assert meta["finish_reason"]["type"] in ("stop", "length")
    assert meta["prompt_tokens"] > 5
    both = [state.get_meta_info(variable) for variable in ("answer", "again")]
    assert backend.token_usage.prompt_tokens == sum(one["prompt_tokens"] for one in both)
    assert backend.token_usage.completion_tokens == sum(one["completion_tokens"] for one in both)
    backend.token_usage.reset()
    assert backend.token_usage.prompt_tokens == 0
    # The system turn stays in the messages, and what was said is there verbatim.
    assert [turn["role"] for turn in state.messages()] == ["system", "user", "assistant", "user", "assistant"]


@pytest.mark.parametrize("name", NAMES)
def test_streams_add_up(name: str, makers: dict[str, Callable[[], Any]]) -> None:
    backend = makers[name]()
    whole = qa.run("Who are you?", backend=backend)
    streamed = qa.stream("Who are you?", backend=backend)
    assert "".join(streamed.text_iter("answer")) == whole["answer"]
    assert "".join(streamed.text_iter("again")) == whole["again"]
    assert streamed.get_meta_info("answer")["prompt_tokens"] == whole.get_meta_info("answer")["prompt_tokens"]


def test_schemas_choices_and_dtypes_over_chat(makers: dict[str, Callable[[], Any]]) -> None:
    @sgl.function
    def structured(s: Any) -> None:
        s += sgl.user("Where do you live?")
        s += sgl.assistant(sgl.gen("town", json_schema=TOWN, max_tokens=40))
        s += sgl.user("How old are you?")
        s += sgl.assistant(sgl.gen_int("age", max_tokens=40))
        s += sgl.user("Which one?")
        s += sgl.assistant(sgl.select("pick", ["red", "green"]))

    strict = OpenAI("pocket", base_url=makers["openai"]()._transport.base_url, api_key="none")
    state = structured.run(backend=strict)
    assert json.loads(state["town"])["town"] in ("Ostrel", "Thessen")
    assert str(int(state["age"])) == state["age"]
    assert state["pick"] in ("red", "green")
    assert state.get_meta_info("pick")["exact"] is False
    streamed = structured.stream(backend=strict)
    assert "".join(streamed.text_iter("age")) == streamed["age"]


def test_completions_score_options_as_the_native_endpoint_does(
    makers: dict[str, Callable[[], Any]], shared_server: Any
) -> None:
    @sgl.function
    def pick(s: Any, method: Any) -> None:
        s += "The sea is"
        s += sgl.select("color", [" blue", " bluish", " a bicycle"], choices_method=method)

    for method in (sgl.token_length_normalized, sgl.greedy_token_selection):
        native = pick.run(method, backend=sgl.RuntimeEndpoint(shared_server.url))
        remote = pick.run(method, backend=makers["openai"]())
        assert remote["color"] == native["color"]
        ours, theirs = (state.get_meta_info("color")["scores"] for state in (remote, native))
        assert ours == pytest.approx(theirs, abs=1e-3)


@pytest.mark.parametrize("method", [sgl.token_length_normalized, sgl.unconditional_likelihood_normalized])
def test_choices_in_a_chat_are_measured_by_the_bundled_server(
    method: Any, makers: dict[str, Callable[[], Any]], shared_server: Any
) -> None:
    @sgl.function
    def pick(s: Any) -> None:
        s += sgl.system("Answer briefly.") + sgl.user("Which color has the sea?")
        s += sgl.assistant(
            "It is " + sgl.select("color", ["blue", "bluish", "a bicycle"], choices_method=method)
        )

    native = pick.run(backend=sgl.RuntimeEndpoint(shared_server.url)).choice("color")
    backend = makers["openai"]()
    state = pick.run(backend=backend)
    found = state.choice("color")
    assert found.measured
    assert (found.text, found.logprobs) == (native.text, native.logprobs)
    assert backend.token_usage.prompt_tokens == state.get_meta_info("color")["prompt_tokens"] > 0
    drawn = sgl.function(
        lambda s: s.__iadd__(sgl.user("?") + sgl.assistant(sgl.select("x", ["a", "b"], 1.0, seed=2)))
    )
    assert drawn.run(backend=backend)["x"] == drawn.run(backend=sgl.RuntimeEndpoint(shared_server.url))["x"]


def test_n_regex_logprobs_and_extensions(makers: dict[str, Callable[[], Any]]) -> None:
    @sgl.function
    def many(s: Any) -> None:
        s += sgl.user("Say a number.")
        s += sgl.assistant(sgl.gen("number", regex="[0-9]{2}", n=3, top_k=5, max_tokens=8))
        s += sgl.user("Again.")
        s += sgl.assistant(sgl.gen("one", max_tokens=4, return_logprob=True, top_logprobs_num=2))

    state = many.run(backend=makers["openai"]())
    assert [len(text) for text in state["number"]] == [2, 2, 2]
    meta = state.get_meta_info("one")
    assert len(meta["output_token_logprobs"]) == meta["completion_tokens"]
    assert all(len(tops) == 2 for tops in meta["output_top_logprobs"])


def test_what_an_api_cannot_do_is_refused(makers: dict[str, Callable[[], Any]]) -> None:
    @sgl.function
    def prefilled(s: Any) -> None:
        s += sgl.user("Hello")
        s += sgl.assistant("I am" + sgl.gen("x", max_tokens=4))

    @sgl.function
    def regular(s: Any) -> None:
        s += sgl.user("Hello")
        s += sgl.assistant(sgl.gen("x", regex="[a-c]+", max_tokens=4))

    @sgl.function
    def narrow(s: Any) -> None:
        s += sgl.user("Hello")
        s += sgl.assistant(sgl.gen("x", min_p=0.5, max_tokens=4))

    @sgl.function
    def outside(s: Any) -> None:
        s += "Hello" + sgl.user("you") + sgl.assistant(sgl.gen("x", max_tokens=4))

    plain = OpenAI("pocket", base_url=makers["openai"]()._transport.base_url, api_key="none")
    for program, words in (
        (prefilled, "cannot continue a reply that has begun"),
        (regular, "cannot enforce regex"),
        (narrow, "does not take min_p"),
    ):
        for backend in (plain, makers["anthropic"]()):
            if program is prefilled and backend is not plain:
                continue  # Anthropic's API goes on with a last assistant turn
            with pytest.raises(Unsupported, match=words):
                program.run(backend=backend)["x"]
    with pytest.raises(Unsupported, match="is outside of a turn"):
        outside.run(backend=makers["anthropic"]())["x"]
    # With the extension, a reply goes on where it was begun.
    assert prefilled.run(backend=makers["openai"]()).messages()[-1]["content"].startswith("I am")


LITELLM = """
import json, sys
import sglang_dsl as sgl
from sglang_dsl.backends.litellm import LiteLLM

@sgl.function
def qa(s, question):
    s += sgl.system("Answer briefly.")
    s += sgl.user(question)
    s += sgl.assistant(sgl.gen("answer", max_tokens=24, temperature=0))
    s += sgl.user("How old are you?")
    s += sgl.assistant(sgl.gen_int("age", max_tokens=40))
    s += sgl.user("Which one?")
    s += sgl.assistant(sgl.select("pick", ["red", "green"]))

question = "Which river runs through Ostrel?"
native = qa.run(question, backend=sgl.RuntimeEndpoint(sys.argv[1]))
backend = LiteLLM("openai/pocket", base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0)
state = qa.run(question, backend=backend)
streamed = qa.stream(question, backend=backend)
told = {
    "same": state["answer"] == native["answer"] == "".join(streamed.text_iter("answer")),
    "age": int(state["age"]),
    "pick": state["pick"] in ("red", "green"),
    "usage": backend.token_usage.prompt_tokens > 0 and backend.token_usage.completion_tokens > 0,
    "meta": state.get_meta_info("answer")["prompt_tokens"] > 5,
}
try:
    wrong = LiteLLM("openai/none", base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0)
    qa.run(question, backend=wrong)["answer"]
except sgl.BackendError as error:
    told["status"] = error.status
    print(str(error), file=sys.stderr)
try:
    qa.run(question, min_p=0.5, backend=backend)["answer"]
except sgl.Unsupported as error:
    told["refused"] = "min_p" in str(error)
print(json.dumps(told))
"""


def test_litellm(shared_server: Any) -> None:
    # In a process of its own: it leaves sockets open, and reads its settings when it is imported.
    done = subprocess.run(
        [sys.executable, "-c", LITELLM, shared_server.url],
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONWARNINGS": "ignore"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert told.pop("age") is not None
    assert told.pop("status") == 404, done.stderr[-2000:]
    assert all(told.values()), told


def test_errors_carry_status_and_text(makers: dict[str, Callable[[], Any]], shared_server: Any) -> None:
    wrong = OpenAI("no/such", base_url=f"{shared_server.url}/v1", api_key="none")
    with pytest.raises(BackendError, match="does not exist") as caught:
        qa.run("Hello", backend=wrong)["answer"]
    assert (caught.value.status, caught.value.retryable) == (404, False)
    assert sgl.get_server_info(makers["openai"]())["id"] == "pocket"
