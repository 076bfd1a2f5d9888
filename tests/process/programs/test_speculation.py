"""num_api_spec_tokens against a real server that speaks OpenAI's and Anthropic's APIs: the bundled one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import sglang_dsl as sgl
from sglang_dsl.backends.anthropic import Anthropic
from sglang_dsl.backends.openai import OpenAI
from sglang_dsl.errors import BackendError


@sgl.function(temperature=0, max_tokens=24)
def card(s: Any) -> None:
    s += "Gotek\nLeril\nVala\nWevond\nGotek\n"  # a list that pocket copies
    s += (
        sgl.gen("first", stop="\n") + "\n" + sgl.gen("second", stop="\n") + "\n" + sgl.gen("third", stop="\n")
    )


@sgl.function(temperature=0, max_tokens=24)
def river(s: Any, town: str) -> None:
    s += sgl.user(f"Which river runs through {town}?")
    s += sgl.assistant(
        "The river of" + sgl.gen("town", stop=" is") + " is" + sgl.gen("river", stop=".") + "."
    )
    s += sgl.user("Who are you?")
    s += sgl.assistant(sgl.gen("me"))


@sgl.function(num_api_spec_tokens=48, temperature=0)
def astray(s: Any) -> None:
    s += sgl.user("Which river runs through Ostrel?")
    s += sgl.assistant("Answer: " + sgl.gen("a", stop="\n") + "\nReason: " + sgl.gen("b", stop="\n"))


@pytest.fixture(scope="module")
def openai(shared_server: Any) -> Callable[..., OpenAI]:
    def make(**words: Any) -> OpenAI:
        return OpenAI("pocket", base_url=f"{shared_server.url}/v1", api_key="none", **words)

    return make


def test_completions_say_the_same_with_fewer_prompt_tokens(openai: Callable[..., OpenAI]) -> None:
    plain, ahead = openai(), openai()
    by_itself = card.run(backend=plain)
    by_itself.sync()
    together = card.run(backend=ahead, num_api_spec_tokens=72)
    assert together.text() == by_itself.text()
    assert ahead.token_usage.prompt_tokens < plain.token_usage.prompt_tokens
    assert together.usage()["calls"] < by_itself.usage()["calls"] == 3


def test_a_chat_turn_is_one_call_and_says_the_same(openai: Callable[..., OpenAI]) -> None:
    plain, ahead = openai(extensions="all"), openai()
    by_itself = river.run("Ostrel", backend=plain)
    by_itself.sync()
    together = river.run("Ostrel", backend=ahead, num_api_spec_tokens=48)
    assert together.messages() == by_itself.messages()
    assert (together["town"], together["river"]) == (" Ostrel", " Sarn")
    assert (together.usage()["calls"], by_itself.usage()["calls"]) == (2, 3)
    assert ahead.token_usage.prompt_tokens < plain.token_usage.prompt_tokens
    # The same form cannot be kept at all without num_api_spec_tokens where turns cannot be gone on with.
    with pytest.raises(BackendError, match="cannot continue"):
        river.run("Ostrel", backend=openai()).sync()


def test_turns_are_gone_on_with_where_the_server_takes_that(
    openai: Callable[..., OpenAI], shared_server: Any
) -> None:
    by_itself = river.run("Thessen", backend=sgl.RuntimeEndpoint(shared_server.url))
    expected = by_itself.messages()
    for backend in (
        openai(extensions="all"),
        Anthropic("pocket", base_url=shared_server.url, api_key="none"),
    ):
        together = river.run("Thessen", backend=backend, num_api_spec_tokens=48)
        assert together.messages() == expected, backend
        assert together.usage()["calls"] <= 3


def test_a_model_that_does_not_follow_is_told(openai: Callable[..., OpenAI]) -> None:
    backend = openai()
    with pytest.raises(BackendError, match="did not follow the assistant's turn: 'Answer: ' was to come"):
        _ = astray.run(backend=backend)["a"]


def test_the_bundled_backends_run_it_as_it_is(shared_server: Any) -> None:
    backend = sgl.RuntimeEndpoint(shared_server.url)
    plain = river.run("Ostrel", backend=backend)
    ahead = river.run("Ostrel", backend=backend, num_api_spec_tokens=48)
    assert ahead.messages() == plain.messages()
    assert ahead.usage()["calls"] == 3


def test_many_conversations_at_once(openai: Callable[..., OpenAI]) -> None:
    towns = ["Ostrel", "Thessen"] * 8
    states = river.run_batch([(town,) for town in towns], backend=openai(), num_api_spec_tokens=48)
    assert [state["town"] for state in states] == [f" {town}" for town in towns]
