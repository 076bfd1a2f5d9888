"""Replies of other people's APIs that are not what was asked for, choices over chat APIs, and reasoning that
an API separates itself: against a real HTTP server on a socket that answers as told."""

from __future__ import annotations

import asyncio
import enum
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

import sglang_dsl as sgl
from sglang_dsl import InvalidValue, MockBackend, assistant, gen, select, user
from sglang_dsl.backends.common.openai_choices import drawn
from sglang_dsl.errors import BackendError, Unsupported
from sglang_dsl.ir.typed import json_in
from tests.unit.sglang_dsl.conformance.parts import Api, event, generated, serving


@pytest.fixture(scope="module")
def server() -> Iterator[Api]:
    yield from serving.__wrapped__()  # type: ignore[attr-defined]


@pytest.fixture
def api(server: Api) -> Api:
    server.sent.clear()
    return server


class Dialect:
    """An API: how a backend for it is made, and its answers, whole and as a stream, with reasoning or not."""

    def __init__(
        self, make: Callable[[str], Any], whole: Callable[..., Any], pieces: Callable[..., Any]
    ) -> None:
        self.make, self.whole, self.pieces = make, whole, pieces

    def answer(self, body: Any, path: str, text: str, thought: str = "", cut: bool = False) -> Any:
        if body.get("stream") or "stream" in path:
            events = self.pieces([text[at : at + 3] for at in range(0, len(text), 3)], thought, cut)
            return 200, [*map(event, events)]
        return 200, [json.dumps(self.whole(text, thought, cut)).encode()]


def openai_whole(text: str, thought: str, cut: bool, field: str = "reasoning_content") -> Any:
    message = {"role": "assistant", "content": text} | ({field: thought} if thought else {})
    choice = {"index": 0, "message": message, "finish_reason": "length" if cut else "stop"}
    return {"id": "r", "choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}


def openai_pieces(pieces: list[str], thought: str, cut: bool, field: str = "reasoning_content") -> Any:
    deltas = [{field: one} for one in thought.split("|")] if thought else []
    deltas += [{"content": one} for one in pieces]
    said: list[Any] = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    return [*said, {"choices": [{"index": 0, "delta": {}, "finish_reason": "length" if cut else "stop"}]}]


def claude_whole(text: str, thought: str, cut: bool) -> Any:
    blocks = [{"type": "thinking", "thinking": thought}] if thought else []
    reason = "max_tokens" if cut else "end_turn"
    return {
        "id": "m",
        "content": [*blocks, {"type": "text", "text": text}],
        "stop_reason": reason,
        "usage": {},
    }


def claude_pieces(pieces: list[str], thought: str, cut: bool) -> Any:
    deltas = [{"type": "thinking_delta", "thinking": one} for one in thought.split("|")] if thought else []
    deltas += [{"type": "text_delta", "text": one} for one in pieces]
    end = {"type": "message_delta", "delta": {"stop_reason": "max_tokens" if cut else "end_turn"}}
    said = [{"type": "content_block_delta", "delta": delta} for delta in deltas]
    return [{"type": "message_start", "message": {"id": "m"}}, *said, end, {"type": "message_stop"}]


def gemini_whole(text: str, thought: str, cut: bool) -> Any:
    parts = [{"text": thought, "thought": True}] if thought else []
    content = {"parts": [*parts, {"text": text}], "role": "model"}
    return {"candidates": [{"content": content, "finishReason": "MAX_TOKENS" if cut else "STOP"}]}


def gemini_pieces(pieces: list[str], thought: str, cut: bool) -> Any:
    parts = [{"text": one, "thought": True} for one in thought.split("|")] if thought else []
    parts += [{"text": one} for one in pieces]
    said: list[Any] = [{"candidates": [{"content": {"parts": [part]}}]} for part in parts]
    return [*said, {"candidates": [{"finishReason": "MAX_TOKENS" if cut else "STOP"}]}]


KEYED: dict[str, Any] = {"api_key": "k", "max_retries": 0}
APIS = {
    "openai": Dialect(
        lambda url: sgl.OpenAI("m", base_url=f"{url}/v1", **KEYED), openai_whole, openai_pieces
    ),
    "reasoning": Dialect(
        lambda url: sgl.OpenAI("m", base_url=f"{url}/v1", **KEYED),
        lambda *a: openai_whole(*a, field="reasoning"),
        lambda *a: openai_pieces(*a, field="reasoning"),
    ),
    "anthropic": Dialect(lambda url: sgl.Anthropic("m", base_url=url, **KEYED), claude_whole, claude_pieces),
    "gemini": Dialect(lambda url: sgl.Gemini("m", base_url=url, **KEYED), gemini_whole, gemini_pieces),
    "vertexai": Dialect(
        lambda url: sgl.VertexAI("m", base_url=url, project_id="p", access_token="t", max_retries=0),
        gemini_whole,
        gemini_pieces,
    ),
}


@dataclass
class Crate:
    weight: int


class Tint(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Label(BaseModel):
    text: str
    tint: Tint


GOOD = '{"weight": 4}'
UNFIT = {
    "wrong type": '{"weight": "four"}',
    "a bool": '{"weight": true}',
    "missing": "{}",
    "more": '{"weight": 4, "color": "red"}',
    "cut off": '{"weight":',
    "cut in a fence": '```json\n{"weight": ',
    "a part of what was cut": '[{"weight": 4}, {"wei',
    "two": 'Either {"weight": 3} or {"weight": 4}.',
    "fenced": '```json\n{"weight": "four"}\n```',
    "no character": '{"weight": "\\ud800"}',
    "prose": "About four.",
    "nothing": "",
    "another kind": "[4]",
}
READ = {
    "as it is": GOOD,
    "blanks": f"\n  {GOOD}\n",
    "fenced": f"```json\n{GOOD}\n```",
    "a bare fence": f"```\n{GOOD}```",
    "a fence in prose": f"Here it is:\n\n```json\n{GOOD}\n```\nIt is heavy.",
    "prose before": f"The crate: {GOOD}",
    "prose behind": f"{GOOD}\nI hope that this helps!",
}


@sgl.function
def weigh(s: Any, kind: Any, retries: int | None) -> None:
    s += user("How heavy?")
    s += assistant(gen("it", kind, retries=retries, max_tokens=50))
    s += user("Thanks.") + assistant(gen("rest", max_tokens=9))


def replies(api: Api, dialect: Dialect, *texts: str, cut: bool = False) -> None:
    """Those, one after the other, and "fine" from then on."""
    left = [*texts]

    def say(path: str, body: Any) -> Any:
        ended = cut and bool(left)
        return dialect.answer(body, path, left.pop(0) if left else "fine", cut=ended)

    api.sent.clear()
    api.say = say


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", APIS)
def test_the_model_is_asked_again_for_what_does_not_fit(api: Api, name: str, stream: bool) -> None:
    backend = APIS[name].make(api.url)
    for kind, text in UNFIT.items():
        replies(api, APIS[name], text, GOOD)
        state = weigh.run(Crate, 2, backend=backend, stream=stream)
        assert (kind, state["it"], state["rest"]) == (kind, Crate(4), "fine")
        assert len(api.sent) == 3
        (rejected,) = state.get_meta_info("it")["rejected"]
        assert rejected["text"] == text
        assert "That is not a valid Crate" in json.dumps(api.sent[1][1])
    backend.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", APIS)
def test_what_never_fits_is_the_error_of_its_variable_alone(api: Api, name: str, stream: bool) -> None:
    backend = APIS[name].make(api.url)
    for retries, (kind, text) in zip([None, 1] * len(UNFIT), UNFIT.items()):
        replies(api, APIS[name], *[text] * (1 + (retries or 0)))
        state = weigh.run(Crate, retries, backend=backend, stream=stream)
        assert (kind, state["rest"]) == (kind, "fine")
        with pytest.raises(InvalidValue, match="is not a valid Crate") as caught:
            state["it"]
        assert caught.value.variable == "it"
        assert caught.value.source is not None
        assert caught.value.source.file == __file__
        assert "".join(state.text_iter("rest")) == "fine"
        assert state.raw("it") == (text.lstrip() if stream else text)
        assert len(api.sent) == 2 + (retries or 0)
    replies(api, APIS[name], '{"weight":', cut=True)
    state = weigh.run(Crate, None, backend=backend, stream=stream)
    assert state["rest"] == "fine"
    with pytest.raises(InvalidValue, match="increase max_tokens"):
        state["it"]
    backend.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", APIS)
def test_one_value_in_a_fence_or_in_prose_is_read(api: Api, name: str, stream: bool) -> None:
    backend = APIS[name].make(api.url)
    for text in READ.values():
        replies(api, APIS[name], text)
        state = weigh.run(Crate, None, backend=backend, stream=stream)
        assert (state["it"], state["rest"]) == (Crate(4), "fine")
        assert state.raw("it") == GOOD
        if stream:
            assert "".join(state.text_iter("it")) == GOOD
            assert list(state.object_iter("it"))[-1] == Crate(4)
        assert state.messages()[1]["content"] == GOOD
        assert state.get_meta_info("it").get("reply", text) == text
        assert len(api.sent) == 2
    backend.close()


@pytest.mark.parametrize(
    ("kind", "good", "bad", "value"),
    [
        (int, ['{"value": 4}', "4", "```\n4\n```"], ['{"value": "four"}', "four", '{"value": 4.5}'], 4),
        (float, ['{"value": 0.5}', "0.5"], ['{"value": null}'], 0.5),
        (bool, ['{"value": "True"}', "True", '"True"'], ['{"value": "maybe"}', "maybe"], True),
        (Literal["red", "blue"], ['{"value": "red"}', "red", '"red"', "```\nred\n```"], ["Red!", ""], "red"),
        (Tint, ['{"value": "blue"}', " blue\n"], ['{"value": "green"}', '{"tint": "blue"}'], Tint.BLUE),
        (list[int], ['{"value": [1]}', "[1]", "So: [1]"], ['{"value": ["a"]}', "1"], [1]),
        (int | None, ['{"value": null}', "null"], ['{"value": "no"}'], None),
        (
            Label,
            ['{"text": "a", "tint": "red"}'],
            ['{"text": "a", "tint": "no"}'],
            Label(text="a", tint=Tint.RED),
        ),
    ],
    ids=str,
)
def test_values_that_are_no_objects(api: Api, kind: Any, good: list[str], bad: list[str], value: Any) -> None:
    backend = APIS["openai"].make(api.url)
    for stream in (False, True):
        for text in good:
            replies(api, APIS["openai"], text)
            state = weigh.run(kind, None, backend=backend, stream=stream)
            assert (state["it"], state["rest"]) == (value, "fine")
        for text in bad:
            replies(api, APIS["openai"], text, good[0])
            state = weigh.run(kind, 1, backend=backend, stream=stream)
            assert (state["it"], state["rest"]) == (value, "fine")
            replies(api, APIS["openai"], text)
            state = weigh.run(kind, None, backend=backend, stream=stream)
            with pytest.raises(InvalidValue, match="is not a valid"):
                state["it"]
            assert state["rest"] == "fine"
    backend.close()


def test_an_untyped_text_that_does_not_fit_is_its_variables_error_too(api: Api) -> None:
    def body(s: Any) -> None:
        s += user("Hi") + assistant(gen("a", json_schema={"type": "object"}))
        s += user("Hi") + assistant(gen("b", dtype=int)) + user("Hi") + assistant(gen("c"))

    backend = APIS["openai"].make(api.url)
    replies(api, APIS["openai"], "none", "```\n7\n```")
    state = sgl.function(body).run(backend=backend)
    assert (state["b"], state["c"]) == ("7", "fine")
    with pytest.raises(InvalidValue, match="is not what its json_schema requires: it is not JSON"):
        state["a"]
    backend.close()


def test_of_several_texts_each_is_looked_at(api: Api) -> None:
    def say(path: str, body: Any) -> Any:
        texts = [GOOD, f"```{GOOD}```", GOOD if len(api.sent) > 1 else '{"weight": []}']
        choices = [
            openai_whole(text, "", False)["choices"][0] | {"index": at} for at, text in enumerate(texts)
        ]
        return 200, [json.dumps({"choices": choices}).encode()]

    api.say = say
    backend = APIS["openai"].make(api.url)
    program = sgl.function(lambda s: s.__iadd__(user("?") + assistant(gen("it", Crate, n=3, retries=1))))
    state = program.run(backend=backend)
    assert state["it"] == [Crate(4)] * 3
    assert state.get_meta_info("it")["rejected"][0]["text"] == '{"weight": []}'
    backend.close()


@pytest.mark.parametrize("stream", [False, True])
def test_the_mock_and_the_endpoint_do_the_same(api: Api, stream: bool) -> None:
    endpoint = sgl.RuntimeEndpoint(api.url)
    for kind, text in UNFIT.items():
        left = [text, GOOD, "fine"]
        api.say = lambda path, body, left=left: (
            200,
            [event(generated(left.pop(0), end=True))]
            if body.get("stream")
            else [json.dumps(generated(left.pop(0), end=True)).encode()],
        )
        for backend in (MockBackend([text, GOOD, "fine"]), endpoint):
            if backend is endpoint and kind in ("a bool", "more"):
                continue  # its grammar is relied on where the type is content
            state = weigh.run(Crate, 2, backend=backend, stream=stream)
            assert (kind, state["it"], state["rest"]) == (kind, Crate(4), "fine")
            state = weigh.run(Crate, None, backend=MockBackend([text, "fine"]), stream=stream)
            assert isinstance(state.error(), InvalidValue)
            assert state["rest"] == "fine"
    for text in READ.values():
        assert weigh.run(Crate, None, backend=MockBackend([text, "fine"]), stream=stream)["it"] == Crate(4)
    endpoint.close()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
PROSE = st.text().filter(lambda text: not set(text) & set("[]{}`"))


@given(
    st.lists(JSON, max_size=3) | st.dictionaries(st.text(), JSON, max_size=3),
    PROSE,
    PROSE,
    st.integers(0, 40),
)
def test_json_in_prose_is_found_whole_or_not_at_all(value: Any, before: str, behind: str, cut: int) -> None:
    text = json.dumps(value)
    assert json_in(f"{before}{text}{behind}") == text
    assert json_in(f"{before}```json\n{text}\n```{behind}") == text
    assert json_in(f"{before}{text}{behind}{text}") is None
    part = json_in(before + text[: min(cut, len(text) - 1)])
    assert part is None or not set(part) & set("[]{}")  # never a part of what was cut


# -- choices over chat APIs ----------------------------------------------------------------------------------


@sgl.function
def pick(s: Any, heat: float = 0.0, drawn_by: int | None = None) -> None:
    s += user("Is it raining?")
    s += assistant(select("x", ["yes", "no"], heat, seed=drawn_by))
    s += user("Thanks.") + assistant(gen("rest", max_tokens=9))


@sgl.function
def one_choice(s: Any) -> None:
    s += user("Is it?") + assistant(select("x", ["no"]))


def ended(program: Any, backend: Any) -> Any:
    state = program.run(backend=backend)
    state.sync()
    return state


def temperature_of(name: str, body: Any) -> Any:
    return (body["generationConfig"] if name in ("gemini", "vertexai") else body).get("temperature")


@pytest.mark.parametrize("name", APIS)
def test_a_choice_is_asked_for_at_its_temperature(api: Api, name: str) -> None:
    backend = APIS[name].make(api.url)
    for heat in (0.0, 0.7):
        replies(api, APIS[name], '{"choice": "no"}')
        seeded = heat > 0 and name != "anthropic"  # whose API takes no seed
        state = pick.run(heat, 3 if seeded else None, backend=backend)
        assert (state["x"], state["rest"]) == ("no", "fine")
        assert temperature_of(name, api.sent[0][1]) == heat
        assert ("seed" in json.dumps(api.sent[0][1])) == seeded
        assert not state.choice("x").measured
    if name == "anthropic":
        with pytest.raises(Unsupported, match="does not take seed"):
            pick.run(0.7, 3, backend=backend)["x"]
    backend.close()


@pytest.mark.parametrize("name", APIS)
def test_a_reply_that_is_no_choice_is_the_error_of_its_variable(api: Api, name: str) -> None:
    backend = APIS[name].make(api.url)
    for text in ('```json\n{"choice": "no"}\n```', 'I say: {"choice": "no"}', "no", '"no"'):
        replies(api, APIS[name], text)
        state = pick.run(backend=backend)
        assert (state["x"], state["rest"]) == ("no", "fine")
    for text in ('{"choice": "maybe"}', "perhaps", '{"x": "no"}', '{"choice": 3}'):
        replies(api, APIS[name], text)
        state = pick.run(backend=backend)
        with pytest.raises(InvalidValue, match="none of the choices") as caught:
            state["x"]
        assert caught.value.variable == "x"
        assert (state.raw("x"), state["rest"]) == (text, "fine")
    backend.close()


@pytest.mark.parametrize("name", ["openai", "anthropic"])
def test_a_model_that_takes_no_temperature_says_so(api: Api, name: str) -> None:
    wrong = {"message": "Unsupported value: 'temperature' does not support 0.0", "param": "temperature"}

    def say(path: str, body: Any) -> Any:
        if "temperature" in body:
            return 400, [json.dumps({"error": wrong}).encode()]
        room = body.get("max_completion_tokens", body.get("max_tokens"))
        text = "fine" if room == 9 else '{"choice": "no"}' if room > 4096 else ""
        return APIS[name].answer(body, path, text, cut=not text)

    api.say = say
    backend = APIS[name].make(api.url)
    with pytest.warns(UserWarning, match="takes no temperature") as told:
        state = ended(pick, backend)
    assert (state["x"], state["rest"]) == ("no", "fine")
    assert told[0].filename == __file__
    assert state.get_meta_info("x")["temperature"] is None
    assert [("temperature" in body) for _, body in api.sent] == [True, False, False]
    with pytest.warns(UserWarning, match="takes no temperature"):
        ended(one_choice, backend)
    assert "temperature" not in api.sent[-1][1]  # remembered
    with pytest.raises(Unsupported, match=r"draws nothing at temperature 0\.5"):
        pick.run(0.5, backend=backend)["x"]
    api.say = lambda path, body: (400, [json.dumps({"error": {"message": "no such model"}}).encode()])
    with pytest.raises(BackendError, match="no such model"):
        pick.run(0.5, backend=backend)["x"]
    backend.close()


def test_a_reply_that_was_cut_while_it_reasoned_gets_more_room(api: Api) -> None:
    def say(path: str, body: Any) -> Any:
        room = body["generationConfig"]["maxOutputTokens"]
        return APIS["gemini"].answer(body, path, '{"choice": "no"}' if room > 4096 else "", cut=room <= 4096)

    api.say = say
    backend = APIS["gemini"].make(api.url)
    assert one_choice.run(backend=backend)["x"] == "no"
    assert [temperature_of("gemini", body) for _, body in api.sent] == [0.0, 0.0]
    backend.close()


def test_a_completion_model_is_never_sent_to_chat(api: Api) -> None:
    backend = sgl.OpenAI("m", is_chat_model=False, base_url=f"{api.url}/v1", **KEYED)
    logprobs = {"tokens": [" no"], "token_logprobs": [-0.1], "top_logprobs": [{" no": -0.1, " yes": -2.0}]}
    choice = {"index": 0, "text": " no", "finish_reason": "stop", "logprobs": logprobs}
    api.say = lambda path, body: (200, [json.dumps({"choices": [choice]}).encode()])
    for heat in (0.0, 0.9):
        program = sgl.function(
            lambda s, heat: s.__iadd__("Is it? " + select("x", ["yes", "no"], temperature=heat))
        )
        assert program.run(heat, backend=backend)["x"] == "no"
        assert api.sent[-1][1]["temperature"] == heat
    with pytest.raises(Unsupported, match="takes text; this prompt has turns"):
        pick.run(backend=backend)["x"]
    assert {path for path, _ in api.sent} == {"/v1/completions"}
    backend.close()


def test_above_0_an_option_is_drawn_by_its_share() -> None:
    """By whatever token the model drew, or another where that leaves all options."""
    numbers = random.Random(5)
    take, weights = drawn(1.0, numbers), {"a": -1.0, "b": -2.0}
    rest = {"a": 0.3, "b": 0.3 / 2.718281828}
    rest["other"] = 1 - sum(rest.values())
    counts = Counter(
        take(weights, numbers.choices(list(rest), list(rest.values()))[0]) for _ in range(20_000)
    )
    assert counts["a"] / 20_000 == pytest.approx(1 / (1 + 1 / 2.718281828), abs=0.02)
    assert set(counts) == {"a", "b"}


# -- reasoning -----------------------------------------------------------------------------------------------


async def events_of(state: Any, name: str) -> list[tuple[str, dict[str, Any]]]:
    return [one async for one in state.text_async_iter(name, return_meta_data=True)]


def asks(**words: Any) -> Any:
    def body(s: Any) -> None:
        s += user("2 + 2?")
        node = gen("a", max_tokens=9)
        s += assistant(sgl.separate_reasoning(node, words["kind"]) if words else node)

    return sgl.function(body)


@pytest.mark.parametrize("name", APIS)
def test_reasoning_that_an_api_separates_is_streamed_apart(api: Api, name: str, tmp_path: Any) -> None:
    thought, backend = "well, |two and |two", APIS[name].make(api.url)
    api.say = lambda path, body: APIS[name].answer(body, path, "It is 4.", thought)
    for program in (asks(), asks(kind="auto"), asks(kind="deepseek-r1")):
        state = program.run(backend=backend)
        assert state["a"] == "It is 4."
        assert state.get_meta_info("a")["reasoning_content"] == thought
        streamed = program.stream(backend=backend)
        told = asyncio.run(events_of(streamed, "a"))
        assert [meta["reasoning_content"] for text, meta in told if not text] == thought.split("|")
        assert "".join(text for text, _ in told) == "".join(streamed.text_iter("a")) == "It is 4."
        assert not any("reasoning_content" in meta for text, meta in told if text)
        assert streamed.get_meta_info("a")["reasoning_content"] == thought.replace("|", "")
        if "a_reasoning_content" in state:
            assert state["a_reasoning_content"] == thought
            assert list(streamed.text_iter("a_reasoning_content")) == thought.split("|")
            assert streamed["a_reasoning_content"] == thought.replace("|", "")
    for _ in range(2):  # asked, and from the record
        replayed = asks(kind="auto").stream(backend=backend, cache_dir=tmp_path)
        told = asyncio.run(events_of(replayed, "a"))
        assert "".join(meta.get("reasoning_content", "") for _, meta in told) == thought.replace("|", "")
        assert replayed["a_reasoning_content"] == thought.replace("|", "")
    backend.close()


def test_reasoning_in_the_text_is_told_in_the_same_way() -> None:
    backend = MockBackend(["<think>two and two</think>4"], split=4)
    state = asks(kind="qwen3").stream(backend=backend)
    told = asyncio.run(events_of(state, "a"))
    assert "".join(meta.get("reasoning_content", "") for text, meta in told if not text) == "two and two"
    assert "".join(text for text, _ in told) == state["a"] == "4"
    assert state["a_reasoning_content"] == "two and two"
