"""Defects of sglang's frontend that must not be here, by their numbers (W13-W27): states, forks, arguments,
reasoning, tracing, streams."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

import sglang_dsl as sgl
from sglang_dsl.backends.base import Backend, Call
from tests.unit.sglang_dsl.conformance.parts import (
    Api,
    Watched,
    event,
    generated,
    openai_chat,
    openai_completion,
    within,
)

PNG = b"\x89PNG\r\n\x1a\n"


def test_w13_adding_a_turn_of_the_state_adds_it_once(backend: Backend) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += s.system("Be brief.")
        s.user("Hi")
        s += s.assistant(sgl.gen("x", max_tokens=3))

    messages = program.run(backend=backend).messages()
    assert [(m["role"], m["content"]) for m in messages[:2]] == [("system", "Be brief."), ("user", "Hi")]
    assert len(messages) == 3


def test_w14_a_join_takes_names_that_the_parent_has(backend: Backend) -> None:
    @sgl.function
    def rounds(s: Any) -> None:
        s["thought"] = "none yet"
        for number in range(2):
            forks = s.fork(2)
            forks += lambda i, number=number: f" {number}{i}" + sgl.gen("thought", max_tokens=2)
            forks.join()
            s[f"round {number}"] = s["thought"]

    state = rounds.run(backend=backend)
    assert all(isinstance(state[name], list) and len(state[name]) == 2 for name in ("round 0", "round 1"))
    assert state["thought"] == state["round 1"]


def test_w15_the_last_setter_of_a_name_is_read_and_unnamed_ones_are_apart(backend: Backend) -> None:
    watched = Watched(backend, texts=["first", "second", "loose", "more"])

    @sgl.function
    def program(s: Any) -> None:
        s += "a" + sgl.gen("x") + "b" + sgl.gen("x") + "c" + sgl.gen() + "d" + sgl.gen()

    state = program.run(backend=watched)
    assert state["x"] == "second"
    assert state.text() == "afirstbsecondclooseddmore".replace("dd", "d")
    assert state.stream_executor.variables == {"x": "second"}


def test_w16_an_exception_inside_a_turn_closes_it(backend: Backend) -> None:
    @sgl.function
    def program(s: Any) -> None:
        with contextlib.suppress(ZeroDivisionError), s.user():
            s += "half"
            1 / 0  # noqa: B018
        with s.assistant():
            s += sgl.gen("x", max_tokens=2)

    state = program.run(backend=backend)
    assert state["x"] is not None
    assert [m["role"] for m in state.messages()] == ["user", "assistant"]


def test_w17_parameters_may_be_named_like_sampling_words(backend: Backend) -> None:
    @sgl.function
    def parallel_sample(s: Any, question: str, n: int, stop: str, temperature: float, stream: bool) -> None:
        s += f"{question} {stop} {temperature} {stream}"
        forks = s.fork(n)
        forks += sgl.gen("answer", max_tokens=3)
        forks.join()

    state = parallel_sample.run(
        question="Who?", n=3, stop="never", temperature=7.5, stream=True, backend=backend
    )
    assert len(state["answer"]) == 3
    assert state.text() == "Who? never 7.5 True"


def test_w18_bound_arguments_are_defaults_and_nothing_is_written_into_the_callers(backend: Backend) -> None:
    @sgl.function(temperature=0)
    def program(s: Any, a: str, b: str = "b") -> None:
        s += f"{a}{b}" + sgl.gen("x", max_tokens=1)

    watched = Watched(backend)
    bound = program.bind(b="bound")
    items = [{"a": "1"}, {"a": "2", "b": "given"}]
    states = bound.run_batch(items, backend=watched, num_threads=1)
    assert [state.text().removesuffix(state["x"]) for state in states] == ["1bound", "2given"]
    assert items == [{"a": "1"}, {"a": "2", "b": "given"}]
    assert bound.run("3", backend=watched).text().startswith("3bound")
    assert bound.run("3", "4", backend=watched).text().startswith("34")
    assert {call.sampling.temperature for call in watched.calls if isinstance(call, Call)} == {0.0}
    with pytest.raises(sgl.BadProgram, match="has no parameter"):
        program.bind(c=1)


def test_w19_forks_keep_pictures_meta_and_settings(backend: Backend) -> None:
    watched = Watched(backend, texts=["red", "seen", "seen"])

    @sgl.function
    def program(s: Any) -> None:
        s += sgl.assistant(sgl.gen("before"))
        s += sgl.user_begin() + sgl.image(PNG) + "What is it?"
        forks = s.fork(2)
        forks += sgl.user_end() + sgl.assistant(sgl.gen("x"))
        s["meta"] = forks[1].get_meta_info("before")
        forks.join()

    # The picture is in the warm-up too, which no text model takes: it is left out here.
    watched.commit = lambda prompt: asyncio.sleep(0)  # type: ignore[assignment,method-assign]
    state = program.run(backend=watched)
    assert state["x"] == ["seen", "seen"]
    assert state["meta"]["finish_reason"] == {"type": "stop"}
    for call in watched.calls[1:]:
        content: Any = next(m.content for m in call.prompt.messages if m.role == "user")
        assert content[0]["image_url"]["url"].startswith("data:image/png;base64,")


def test_w19_the_bundled_text_model_refuses_a_picture_instead_of_dropping_it(pocket: Any) -> None:
    program = sgl.function(
        lambda s: s.__iadd__(sgl.user(sgl.image(PNG) + "What?") + sgl.assistant(sgl.gen("x")))
    )
    with pytest.raises(sgl.BackendError, match="image"):
        program.run(backend=pocket)["x"]


THOUGHT = "<think>first this</think>"


def test_w20_reasoning_is_taken_apart_and_nothing_else_is_touched(backend: Backend) -> None:
    @sgl.function
    def program(s: Any, n: int | None) -> None:
        s += sgl.user("Why?")
        inner = "Prefill. " + sgl.gen("a", n=n, max_tokens=5) + " And: " + sgl.gen("b", max_tokens=5)
        s += sgl.separate_reasoning(sgl.assistant(inner), model_type="qwen3")
        s += sgl.user("So?")

    for stream in (False, True):
        texts = [THOUGHT + "because", THOUGHT + "therefore"]
        state = program.run(None, stream=stream, backend=Watched(backend, texts=texts))
        assert (state["a"], state["a_reasoning_content"]) == ("because", "first this")
        assert (state["b"], state["b_reasoning_content"]) == ("therefore", "first this")
        roles = [(m["role"], m["content"]) for m in state.messages()]
        assert roles[1] == ("assistant", "Prefill. because And: therefore")
        assert roles[2] == ("user", "So?")
    two = [THOUGHT + "p", THOUGHT + "q", "no thoughts"]
    several = program.run(2, backend=Watched(backend, texts=two))
    assert several["a"] == ["p", "q"]
    assert several["a_reasoning_content"] == ["first this"] * 2
    # And with what the model itself says, which does not reason.
    plain = program.run(None, backend=backend)
    assert isinstance(plain["a"], str)
    assert plain["b_reasoning_content"] == ""


@sgl.function(num_api_spec_tokens=64)
def profile(s: Any, who: str) -> None:
    s += sgl.user(f"Who is {who}?")
    s += sgl.assistant("Name: " + sgl.gen("name", stop="\n") + "\nAge: " + sgl.gen("age", stop="\n"))


def test_w21_speculation_is_no_matter_of_the_backend(backend: Backend) -> None:
    state = profile.run("Ann", backend=backend, temperature=0)
    assert state.messages()[1]["content"] == f"Name: {state['name']}\nAge: {state['age']}"


def test_w21_programs_at_once_have_a_turn_each_and_a_reply_that_does_not_follow_is_an_error(api: Api) -> None:
    def reply(path: str, body: Any) -> Any:
        who = body["messages"][0]["content"].removeprefix("Who is ").rstrip("?")
        return openai_chat(f"Name: {who}\nAge: {len(who)}\n")

    api.say = reply
    backend = sgl.OpenAI("m", base_url=api.url, api_key="k")
    names = ["Ann", "Bartholomew", "Cy", "Dora", "Eleonore", "Q"]
    states = profile.run_batch([(name,) for name in names], backend=backend, num_threads=6)
    assert [(s["name"], s["age"]) for s in states] == [(name, str(len(name))) for name in names]
    assert len(api.sent) == len(names)
    api.say = lambda path, body: openai_chat("I would rather not say.")
    with pytest.raises(sgl.BackendError):
        profile.run("Ann", backend=backend)["age"]
    backend.close()


def test_w21_the_rest_of_a_reply_is_its_own_states(api: Api) -> None:
    names = ["Ann", "Bartholomew", "Cy", "Dora"]
    together = threading.Barrier(len(names))

    @sgl.function(num_api_spec_tokens=64)
    def form(s: Any, who: str) -> None:
        s += f"{who}\nName:" + sgl.gen("name", stop="\n")
        assert s["name"]
        together.wait(300)  # all replies are there, and none is used up
        s += "\nAge:" + sgl.gen("age", stop="\n")

    def reply(path: str, body: Any) -> Any:
        who = body["prompt"].partition("\n")[0]
        return openai_completion(f" {who}\nAge: {len(who)}\n")

    api.say = reply
    backend = sgl.OpenAI("m", is_chat_model=False, base_url=api.url, api_key="k")
    states = form.run_batch([(name,) for name in names], backend=backend, num_threads=len(names))
    assert [(s["name"], s["age"]) for s in states] == [(f" {name}", f" {len(name)}") for name in names]
    assert len(api.sent) == len(names)
    backend.close()


def test_w22_every_program_can_be_traced_and_a_batch_runs_each_body_once(backend: Backend) -> None:
    ran: list[str] = []

    @sgl.function
    def program(s: Any, city: str) -> None:
        ran.append(str(city))
        with s.user():
            s += f"About {city}:" + sgl.image(PNG)
        with s.assistant(), s.var_scope("all"):
            s += sgl.gen("x", max_tokens=2)
        assert len(s.text()) > 0

    traced = program.trace()
    assert traced.variables == ("x", "all")
    assert "Media(image" in str(traced)
    ran.clear()

    @sgl.function
    def looks_up(s: Any, city: str) -> None:
        ran.append(city)
        country = {"Rome": "Italy", "Oslo": "Norway"}[city]
        s += f"About {city} in {country}:" + sgl.gen("x", max_tokens=2)

    states = looks_up.run_batch([{"city": "Rome"}, {"city": "Oslo"}], backend=backend)
    assert sorted(ran) == ["Oslo", "Rome"]
    assert all(state["x"] is not None for state in states)


def test_w23_tracing_in_one_thread_leaves_the_others_alone(backend: Backend) -> None:
    inside, go_on = threading.Event(), threading.Event()

    @sgl.function
    def slow(s: Any) -> None:
        inside.set()
        assert go_on.wait(300)
        s += sgl.gen("x")

    ordinary = sgl.function(lambda s: s.__iadd__("Hi" + sgl.gen("x", max_tokens=2)))
    tracing = threading.Thread(target=slow.trace, daemon=True)
    tracing.start()
    assert inside.wait(300)
    state = ordinary(backend=backend)
    assert isinstance(state, sgl.ProgramState)
    assert not state["x"].startswith("{")
    go_on.set()
    tracing.join(300)
    assert not tracing.is_alive()


def test_w24_waiting_for_a_variable_stalls_no_event_loop(backend: Backend) -> None:
    begin = threading.Event()

    @sgl.function
    def program(s: Any) -> None:
        assert begin.wait(300)
        s += "Now:" + sgl.gen("x", max_tokens=3)

    async def read() -> tuple[str, int]:
        ticks = 0

        async def others() -> None:
            nonlocal ticks
            for _ in range(20):
                await asyncio.sleep(0)
                ticks += 1
            begin.set()  # never reached on a loop that is stalled

        state = program.stream(backend=backend)
        beside = asyncio.create_task(others())
        text = "".join([piece async for piece in state.text_async_iter("x")])
        await beside
        return text, ticks

    text, ticks = within(lambda: asyncio.run(read()))
    assert ticks == 20
    assert isinstance(text, str)


def test_w24_waiting_for_a_variable_takes_no_cpu(backend: Backend) -> None:
    begin = threading.Event()

    @sgl.function
    def program(s: Any) -> None:
        assert begin.wait(300)
        s += "Now:" + sgl.gen("x", max_tokens=3)

    state = program.stream(backend=backend)
    threading.Timer(0.5, begin.set).start()
    before = time.thread_time()
    pieces = state.text_iter("x")
    first = next(pieces, "")
    spent = time.thread_time() - before
    assert first + "".join(pieces) == state["x"]
    assert spent < 0.05  # of its own time; one that spins takes its share of half a second


def test_w25_what_goes_wrong_in_a_stream_is_raised(backend: Backend) -> None:
    @sgl.function
    def program(s: Any, fail: bool) -> None:
        s += "Say:" + sgl.gen("x", max_tokens=8)
        if fail:
            raise LookupError("the body's own")

    broken = program.stream(False, backend=Watched(backend, errors={0: OSError("cut")}, fail_after=1))
    came: list[str] = []
    with pytest.raises(sgl.BackendError, match="cut"):
        came.extend(broken.text_iter("x"))
    assert isinstance(broken.error(), sgl.BackendError)
    raised = program.stream(True, backend=backend)
    with pytest.raises(LookupError, match="the body's own"):
        list(raised.text_iter())


def test_w25_an_error_event_of_the_server_is_that_error(api: Api) -> None:
    told = [event(generated("so far")), event({"error": {"code": "internal", "message": "out of memory"}})]
    api.say = lambda path, body: (200, told)
    endpoint = sgl.RuntimeEndpoint(api.url)
    state = sgl.function(lambda s: s.__iadd__("Say:" + sgl.gen("x"))).stream(backend=endpoint)
    with pytest.raises(sgl.BackendError, match="out of memory"):
        list(state.text_iter("x"))
    endpoint.close()


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_w26_events_are_read_whole_however_the_bytes_come(
    size: int, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang_dsl.console.server_process import Runtime

    whole = httpx.Response.aiter_bytes

    async def cut(answer: httpx.Response) -> AsyncIterator[bytes]:
        # The network joins what was sent apart: here it is taken apart again.
        async for piece in whole(answer):
            for at in range(0, len(piece), size):
                yield piece[at : at + size]

    monkeypatch.setattr(httpx.Response, "aiter_bytes", cut)
    texts = ["Grüße", "Grüße, 世界", "Grüße, 世界 🌍!"]
    told = [event(generated(text, at == 2)) for at, text in enumerate(texts)]
    wire = b"".join([*told, b"data: [DONE]\n\n"])
    api.say = lambda path, body: (200, [wire[at : at + size] for at in range(0, len(wire), size)])
    runtime = object.__new__(Runtime)  # the reading half of one, without a server of its own
    runtime.endpoint = sgl.RuntimeEndpoint(api.url)

    async def read() -> list[str]:
        try:
            return [piece async for piece in runtime.async_generate("Hello", {"max_new_tokens": 4})]
        finally:
            await runtime.endpoint.aclose()

    assert "".join(asyncio.run(read())) == texts[-1]


def test_w27_the_text_of_a_turn_is_kept_to_the_letter(backend: Backend) -> None:
    text = "\n    def f():\n        return 1  \n"
    watched = Watched(backend)
    program = sgl.function(
        lambda s: s.__iadd__(sgl.user(text) + sgl.assistant("  " + sgl.gen("x", max_tokens=2)))
    )
    state = program.run(backend=watched)
    assert state.messages()[0]["content"] == text
    assert state.messages()[1]["content"] == "  " + state["x"]
    assert watched.calls[0].prompt.messages[0].content == text
