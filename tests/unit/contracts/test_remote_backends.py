"""What every backend for other people's APIs keeps: whatever it cannot say to its API raises Unsupported
before anything is sent, and its errors carry its name. A new one needs a line in MAKE."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import sglang_dsl as sgl
from runtime.protocol.constraint import Constraint
from runtime.protocol.messages import Message
from runtime.protocol.sampling import SamplingParams
from sglang_dsl.backends import BACKENDS, NEED_A_MODEL
from sglang_dsl.backends.base import Backend, Call, ChoiceCall, Prompt
from sglang_dsl.concurrency.loop import background
from sglang_dsl.errors import BackendError, Unsupported


@contextmanager
def nobody() -> Iterator[str]:
    """An address where nobody listens; held, so that nobody begins to."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


MAKE: dict[str, Callable[[str], Backend]] = {
    "openai": lambda url: sgl.OpenAI("m", base_url=url, api_key="k", max_retries=0),
    "crusoe": lambda url: sgl.Crusoe("m", base_url=url, api_key="k", max_retries=0),
    "anthropic": lambda url: sgl.Anthropic("m", base_url=url, api_key="k", max_retries=0),
    "gemini": lambda url: sgl.Gemini("m", base_url=url, api_key="k", max_retries=0),
    "vertexai": lambda url: sgl.VertexAI("m", base_url=url, access_token="t", project_id="p", max_retries=0),
    "litellm": lambda url: sgl.LiteLLM("openai/m", base_url=url, api_key="k", max_retries=0),
}


def test_all_of_them_are_here() -> None:
    assert set(MAKE) == NEED_A_MODEL
    assert set(BACKENDS.names()) >= NEED_A_MODEL


@pytest.fixture(params=sorted(NEED_A_MODEL))
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with nobody() as url:
        made = MAKE[request.param](url)
        yield made
        made.close()


def run(work: Any) -> Any:
    return background().run(work, 60)


ASK = Prompt((Message("user", "Hi"), Message("assistant", "", open=True)))
PLAIN = SamplingParams(max_new_tokens=4)


@pytest.mark.parametrize(
    "call",
    [
        Call(ASK, SamplingParams(max_new_tokens=4, min_p=0.5)),
        Call(ASK, SamplingParams(max_new_tokens=4, repetition_penalty=1.5)),
        Call(ASK, SamplingParams(max_new_tokens=4, ignore_eos=True)),
        Call(ASK, SamplingParams(max_new_tokens=4, stop_regex=("a+",))),
        Call(ASK, SamplingParams(max_new_tokens=4, stop_token_ids=(1,))),
        Call(ASK, SamplingParams(max_new_tokens=4, min_new_tokens=2)),
        Call(ASK, PLAIN, Constraint("regex", "[a-c]+")),
        Call(ASK, PLAIN, Constraint("ebnf", 'root ::= "a"')),
        Call(ASK, PLAIN, Constraint("json_schema", '{"type":"object"}', schema_format="annotation")),
        Call(ASK, PLAIN, Constraint("json_schema", '{"type":"object"}', whitespace="compact")),
        Call(ASK, PLAIN, logprob_start_len=0, return_logprob=True),
        Call(ASK, PLAIN, logprob_start_len=0),
        Call(ASK, PLAIN, options={"priority": 1}),
        Call(Prompt((Message("raw", "loose text"), *ASK.messages)), PLAIN),
        Call(Prompt((Message("user", "Hi", open=True),)), PLAIN),
    ],
    ids=lambda call: call.constraint.kind if call.constraint else "words",
)
def test_what_cannot_be_said_is_refused_whole_and_streamed(backend: Backend, call: Call) -> None:
    async def stream() -> list[Any]:
        return [delta async for delta in backend.stream(call)]

    with pytest.raises(Unsupported):
        run(backend.generate(call))
    with pytest.raises(Unsupported):
        run(stream())


def test_choices_without_their_prompt_are_refused(backend: Backend) -> None:
    with pytest.raises(Unsupported):
        run(backend.score(ChoiceCall(ASK, ("a", "b"), unconditional=True)))


def test_a_choice_takes_the_sampling_parameters_that_a_text_takes(backend: Backend) -> None:
    if backend.name == "litellm":
        pytest.skip("what a provider takes, the package says")

    def refused(work: Any) -> bool:
        with pytest.raises(BackendError) as caught:  # the others have no connection
            run(work)
        return isinstance(caught.value, Unsupported)

    text = refused(backend.generate(Call(ASK, SamplingParams(max_new_tokens=4, temperature=0.7, seed=3))))
    choice = refused(backend.score(ChoiceCall(ASK, ("a", "b"), temperature=0.7, seed=3)))
    assert text == choice == (backend.name == "anthropic")


def test_where_nobody_listens_an_error_says_so(backend: Backend) -> None:
    if backend.name == "litellm":
        pytest.skip("the package is asked in its own process: tests/process/programs/test_remote_backends.py")
    with pytest.raises(BackendError, match="no connection to http://127") as caught:
        run(backend.generate(Call(ASK, PLAIN)))
    assert (caught.value.backend, caught.value.retryable) == (backend.name, True)


def test_their_names_tell_them_apart_and_keys_are_not_shown(backend: Backend) -> None:
    assert backend.name in backend.identity
    assert backend.get_model_name().endswith("m")  # type: ignore[attr-defined]
    assert "'k'" not in repr(backend) + repr(vars(backend).get("_transport"))
