"""Defects of sglang's backends for other people's APIs that must not be here, by their numbers (W28-W36).
They are tested against a server on a socket that answers as told; the last two on the mock and the bundled
model, too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import sglang_dsl as sgl
from sglang_dsl.backends.base import Backend
from tests.unit.sglang_dsl.conformance.parts import (
    Api,
    claude,
    event,
    openai_chat,
    openai_completion,
    openai_stream,
)


@contextmanager
def openai(api: Api, model: str = "gpt-4o", **words: Any) -> Iterator[Any]:
    backend = sgl.OpenAI(model, base_url=api.url + "/v1", api_key="k", **words)
    yield backend
    backend.close()


@contextmanager
def anthropic(api: Api) -> Iterator[Any]:
    backend = sgl.Anthropic("claude-x", base_url=api.url, api_key="k")
    yield backend
    backend.close()


@sgl.function
def chat(s: Any) -> None:
    s += sgl.system("Be brief.")
    s += sgl.user("One?") + sgl.assistant(sgl.gen("a", max_tokens=7))
    s += sgl.user("Two?") + sgl.assistant(sgl.gen("b", max_tokens=7))


LIMITS = {"max_tokens", "max_completion_tokens"}


def test_w28_a_stream_is_sent_one_limit(api: Api) -> None:
    api.say = lambda path, body: openai_stream(["fi", "ne"])
    with openai(api) as backend:
        state = chat.stream(backend=backend)
        assert "".join(state.text_iter("b")) == "fine"
    assert [LIMITS & body.keys() for body in api.bodies()] == [{"max_completion_tokens"}] * 2


def test_w29_completion_models_stream_and_generate_numbers_and_strings(api: Api) -> None:
    @sgl.function
    def program(s: Any, dtype: Any) -> None:
        s += "It is " + sgl.gen("x", dtype=dtype, max_tokens=5)

    with openai(api, "gpt-3.5-turbo-instruct") as backend:
        api.say = lambda path, body: openai_stream(["twen", "ty"], "text")
        streamed = program.stream(None, backend=backend)
        assert "".join(streamed.text_iter("x")) == streamed["x"] == "twenty"
        assert api.sent[-1][0] == "/v1/completions"
        assert LIMITS & api.sent[-1][1].keys() == {"max_tokens"}
        said = {int: " 24 hours", float: "3.5 km", bool: "True.", str: "a day", "string": ""}
        read = {int: "24", float: "3.5", bool: "True", str: '"a day"', "string": '""'}
        for dtype, text in said.items():
            api.say = lambda path, body, text=text: openai_completion(text)
            state = program.run(dtype, backend=backend)
            assert state["x"] == read[dtype]
            assert state.text() == "It is " + read[dtype]
            api.say = lambda path, body, text=text: openai_stream([text[:2], text[2:]], "text")
            assert "".join(program.stream(dtype, backend=backend).text_iter("x")) == read[dtype]
        # A quote is opened for the model, and its next one ends the text.
        assert (api.sent[-1][1]["prompt"], api.sent[-1][1]["stop"]) == ('It is "', ['"'])
        api.say = lambda path, body: openai_completion("about a day")
        with pytest.raises(sgl.InvalidValue, match="about a day") as caught:
            program.run(int, backend=backend)["x"]
        assert caught.value.retryable
        # No completion API takes a regular expression: refused, before anything is sent, and by name.
        sent = len(api.sent)
        with pytest.raises(sgl.Unsupported, match="regex"):
            sgl.function(lambda s: s.__iadd__("x" + sgl.gen("x", regex="[ab]+"))).run(backend=backend)["x"]
        assert len(api.sent) == sent


@pytest.mark.parametrize("model", ["o4-mini", "gpt-5", "gpt-4o", "o1", "some-new-model"])
def test_w30_models_of_any_name_get_the_limit_they_take_and_no_default(model: str, api: Api) -> None:
    api.say = lambda path, body: openai_chat("fine")
    with openai(api, model) as backend:
        assert chat.run(backend=backend)["b"] == "fine"
    assert set(api.bodies()[0]) == {"model", "messages", "max_completion_tokens"}


def test_w31_a_bad_request_is_sent_once_and_a_stream_repeats_nothing(api: Api) -> None:
    api.say = lambda path, body: (400, [json.dumps({"error": {"message": "no such thing"}}).encode()])
    with openai(api) as backend:
        with pytest.raises(sgl.BackendError, match="no such thing") as caught:
            chat.run(backend=backend)["a"]
        assert (caught.value.status, caught.value.retryable) == (400, False)
        assert len(api.sent) == 1
        _, pieces = openai_stream(["ab", "c"])
        api.say = lambda path, body: (200, pieces[:1])
        came: list[str] = []
        with pytest.raises(sgl.BackendError, match="broke off"):
            came.extend(chat.stream(backend=backend).text_iter("a"))
        assert len(api.sent) == 2


def test_w32_schemas_are_sent_and_what_cannot_be_is_refused(api: Api) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}

    @sgl.function
    def program(s: Any, words: dict[str, Any]) -> None:
        s += sgl.user("How many?") + sgl.assistant(sgl.gen("x", max_tokens=9, **words))

    with openai(api) as backend:
        api.say = lambda path, body: openai_chat('{"n": 3}')
        assert json.loads(program.run({"json_schema": schema}, backend=backend)["x"]) == {"n": 3}
        sent = api.bodies()[-1]["response_format"]
        assert (sent["type"], sent["json_schema"]["schema"]) == ("json_schema", schema)
        before = len(api.sent)
        for words in ({"top_k": 5}, {"min_tokens": 2}, {"regex": "[ab]+"}, {"ignore_eos": True}):
            with pytest.raises(sgl.Unsupported):
                program.run(words, backend=backend)["x"]
        assert len(api.sent) == before


def test_w33_chat_apis_choose_too_and_their_tokens_are_added_up(api: Api) -> None:
    @sgl.function
    def program(s: Any) -> None:
        for name in ("x", "y"):
            s += sgl.user("True?") + sgl.assistant(sgl.select(name, ["True", "False", "Unknown"]))

    with openai(api) as backend:
        api.say = lambda path, body: openai_chat('{"choice": "False"}')
        state = program.run(backend=backend)
        assert (state["x"], state["y"]) == ("False", "False")
        assert not state.choice("x").measured
        usage = backend.token_usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (10, 4)
    with anthropic(api) as backend:
        api.say = lambda path, body: claude('{"choice": "Unknown"}')
        assert program.run(backend=backend)["y"] == "Unknown"


def test_w34_anthropic_keeps_the_system_prompt_and_the_prefill(api: Api) -> None:
    @sgl.function
    def prefilled(s: Any) -> None:
        s += chat.run(backend=backend).text()[:0] + sgl.user("Go on:")
        s += sgl.assistant("Once upon" + sgl.gen("x", max_tokens=5))

    api.say = lambda path, body: claude("fine")
    with anthropic(api) as backend:
        state = chat.run(backend=backend)
        assert state["b"] == "fine"
        assert [m["role"] for m in state.messages()].count("system") == 1
        assert [body["system"] for body in api.bodies()] == ["Be brief."] * 2
        assert not {"temperature", "top_k", "top_p"} & set().union(*api.bodies())
        assert prefilled.run(backend=backend)["x"] == "fine"
        assert api.bodies()[-1]["messages"][-1] == {"role": "assistant", "content": "Once upon"}


def test_w35_the_meta_of_every_call_tells_usage_end_and_id(backend: Backend, api: Api) -> None:
    def tells(state: sgl.ProgramState) -> None:
        meta = state.get_meta_info("a")
        assert {"id", "finish_reason", "prompt_tokens", "completion_tokens"} <= meta.keys()
        assert meta["finish_reason"]["type"] in ("stop", "length")
        assert meta["prompt_tokens"] > 0

    tells(chat.run(backend=backend))
    cut = sgl.function(lambda s: s.__iadd__("Tell me a story:" + sgl.gen("a", max_tokens=1, ignore_eos=True)))
    assert cut.run(backend=backend).get_meta_info("a")["finish_reason"]["type"] == "length"
    with openai(api) as remote:
        api.say = lambda path, body: openai_chat("fine")
        tells(chat.run(backend=remote))
        api.say = lambda path, body: openai_stream(["fine"])
        tells(chat.stream(backend=remote))
    with anthropic(api) as remote:
        api.say = lambda path, body: claude("fine")
        tells(chat.run(backend=remote))


def test_w36_tokens_are_counted_exactly_by_many_programs_at_once(backend: Backend, api: Api) -> None:
    states = chat.run_batch([{}] * 12, backend=backend, num_threads=12)
    for state in states:
        metas = [state.get_meta_info(name) for name in "ab"]
        for counter in ("prompt_tokens", "completion_tokens"):
            assert state.usage()[counter] == sum(meta[counter] for meta in metas)
    with openai(api) as remote:
        api.say = lambda path, body: openai_chat("fine")
        chat.run_batch([{}] * 40, backend=remote, num_threads=40)
        assert (remote.token_usage.prompt_tokens, remote.token_usage.completion_tokens) == (400, 160)
        remote.token_usage.reset()
        assert remote.token_usage.prompt_tokens == 0


def test_w36_a_stream_without_a_last_count_is_no_error(api: Api) -> None:
    _, pieces = openai_stream(["fi", "ne"])
    uncounted = [piece for piece in pieces if b"usage" not in piece]
    api.say = lambda path, body: (200, uncounted)
    with openai(api) as backend:
        assert "".join(chat.stream(backend=backend).text_iter("a")) == "fine"
    assert event({}) == b"data: {}\n\n"
