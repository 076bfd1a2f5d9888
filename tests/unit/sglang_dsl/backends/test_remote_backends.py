"""Backends for other people's APIs against a real HTTP server on a socket that answers as told: what is sent,
and what becomes of streams cut anywhere, broken streams, errors and refusals."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sglang_dsl as sgl
from runtime.protocol.constraint import Constraint
from runtime.protocol.messages import Message
from runtime.protocol.sampling import SamplingParams
from sglang_dsl.backends.anthropic import Anthropic
from sglang_dsl.backends.base import Call, Prompt
from sglang_dsl.backends.common.remote import json_form
from sglang_dsl.backends.gemini import Gemini, VertexAI
from sglang_dsl.backends.openai import Crusoe, OpenAI
from sglang_dsl.concurrency.loop import background
from sglang_dsl.errors import BackendError, InvalidValue, Unsupported
from tests.exploring import tries

Answer = tuple[int, list[bytes]]


class Api:
    """What was sent, and what to answer: `say` gets (path, body) and gives a status and the pieces."""

    def __init__(self) -> None:
        self.url = ""
        self.sent: list[tuple[str, dict[str, str], Any]] = []
        self.say: Callable[[str, Any], Answer] = lambda path, body: (500, [b"{}"])

    @property
    def body(self) -> Any:
        return self.sent[-1][2]


@pytest.fixture(scope="module")
def server() -> Iterator[Api]:
    api = Api()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            api.sent.append((self.path, dict(self.headers), body))
            status, pieces = api.say(self.path, body)
            self.send_response(status)
            self.end_headers()
            for piece in pieces:
                self.wfile.write(piece)
                self.wfile.flush()

        def log_message(self, *args: Any) -> None:
            pass

    serving = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=serving.serve_forever, daemon=True)
    thread.start()
    api.url = f"http://127.0.0.1:{serving.server_port}"
    yield api
    serving.shutdown()
    serving.server_close()
    thread.join(5)


@pytest.fixture
def api(server: Api) -> Api:
    server.sent.clear()
    return server


@contextmanager
def closing(backend: Any) -> Iterator[Any]:
    try:
        yield backend
    finally:
        backend.close()


@sgl.function
def two_turns(s: Any) -> None:
    s += sgl.system("Be brief.")
    s += sgl.user("  Hello,\n  you")
    s += sgl.assistant(sgl.gen("a", max_tokens=7, stop=["x"], temperature=0.5))
    s += sgl.user("And?")
    s += sgl.assistant(sgl.gen("b", max_tokens=7))


def openai_chat(text: str, **more: Any) -> Answer:
    message = {"role": "assistant", "content": text}
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}}
    choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
    return 200, [json.dumps({"id": "r1", "choices": choices, "usage": usage} | more).encode()]


def claude(text: str, reason: str = "end_turn") -> Answer:
    usage = {"input_tokens": 5, "output_tokens": 2, "cache_read_input_tokens": 3}
    blocks = [{"type": "text", "text": text}]
    return 200, [json.dumps({"id": "m1", "content": blocks, "stop_reason": reason, "usage": usage}).encode()]


def gemini(text: str, reason: str = "STOP") -> Answer:
    candidate = {"content": {"parts": [{"text": text}], "role": "model"}, "finishReason": reason}
    usage = {"promptTokenCount": 5, "candidatesTokenCount": 2, "thoughtsTokenCount": 4}
    return 200, [json.dumps({"candidates": [candidate], "usageMetadata": usage, "responseId": "g1"}).encode()]


def test_openai_is_sent_exactly_what_was_said(api: Api) -> None:
    api.say = lambda path, body: openai_chat(" fine ")
    with closing(OpenAI("o4-mini", base_url=api.url + "/v1", api_key="sk-1")) as backend:
        state = two_turns.run(backend=backend)
        assert state["a"] == " fine "
        meta = state.get_meta_info("a")
        assert state["b"] == " fine "
        assert (backend.token_usage.prompt_tokens, backend.token_usage.completion_tokens) == (10, 4)
    path, headers, body = api.sent[0]
    assert (path, headers["Authorization"]) == ("/v1/chat/completions", "Bearer sk-1")
    assert body == {
        "model": "o4-mini",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "  Hello,\n  you"},
        ],
        "temperature": 0.5,
        "stop": ["x"],
        "max_completion_tokens": 7,
    }
    assert meta["finish_reason"] == {"type": "stop"}
    assert (meta["id"], meta["prompt_tokens"], meta["cached_tokens"]) == ("r1", 5, 3)
    # The second call: nothing at its default is sent, and one of the two limits only.
    assert set(api.body) == {"model", "messages", "max_completion_tokens"}


def test_azure_and_crusoe_are_addressed_as_they_want(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    api.say = lambda path, body: openai_chat("ok")
    with closing(OpenAI("m", is_azure=True, base_url=api.url + "/dep", api_key="k", api_version="v9")) as one:
        assert two_turns.run(backend=one)["b"] == "ok"
    path, headers, _ = api.sent[-1]
    assert path == "/dep/chat/completions?api-version=v9"
    assert (headers["api-key"], headers.get("Authorization")) == ("k", None)
    named = {"azure_endpoint": api.url, "api_version": "2023-07-01-preview", "is_azure": True}
    monkeypatch.setenv("AZURE_OPENAI_API_KEY", "a-1")
    with closing(OpenAI(model_name="azure gpt", **named)) as resource:
        assert two_turns.run(backend=resource)["b"] == "ok"
    path, headers, _ = api.sent[-1]
    assert path == "/openai/deployments/azure%20gpt/chat/completions?api-version=2023-07-01-preview"
    assert headers["api-key"] == "a-1"
    monkeypatch.setenv("AZURE_OPENAI_ENDPOINT", api.url + "/")
    with closing(OpenAI("m", is_azure=True, azure_deployment="d", api_key="k")) as other:
        assert two_turns.run(backend=other)["b"] == "ok"
    assert api.sent[-1][0].startswith("/openai/deployments/d/chat/completions?api-version=2")
    monkeypatch.delenv("AZURE_OPENAI_ENDPOINT")
    for wrong, hint in (({"is_azure": True}, "needs azure_endpoint"), ({"azure_endpoint": "x"}, "is_azure")):
        with pytest.raises(ValueError, match=hint):
            OpenAI("m", **wrong)
    monkeypatch.setenv("CRUSOE_API_KEY", "c-1")
    with closing(Crusoe("m", base_url=api.url)) as two:
        assert two_turns.run(backend=two)["b"] == "ok"
    assert api.sent[-1][1]["Authorization"] == "Bearer c-1"


def test_anthropic_is_sent_the_system_prompt_every_time(api: Api) -> None:
    api.say = lambda path, body: claude("fine", "max_tokens")
    with closing(Anthropic("claude-x", base_url=api.url, api_key="a-1")) as backend:
        state = two_turns.run(backend=backend)
        assert (state["a"], state["b"]) == ("fine", "fine")
    first, second = (body for _, _, body in api.sent)
    assert first == {
        "model": "claude-x",
        "max_tokens": 7,
        "temperature": 0.5,
        "stop_sequences": ["x"],
        "messages": [{"role": "user", "content": "  Hello,\n  you"}],
        "system": "Be brief.",
    }
    assert second["system"] == "Be brief."
    assert [turn["role"] for turn in second["messages"]] == ["user", "assistant", "user"]
    assert state.messages()[0] == {"role": "system", "content": "Be brief."}
    assert api.sent[0][1]["x-api-key"] == "a-1"
    meta = state.get_meta_info("a")
    assert (meta["finish_reason"]["type"], meta["prompt_tokens"], meta["cached_tokens"]) == ("length", 8, 3)


def test_gemini_and_vertex_are_sent_parts(api: Api) -> None:
    api.say = lambda path, body: gemini("fine")
    with closing(Gemini("g-2", {"HARM": "NONE"}, base_url=api.url, api_key="g-1")) as backend:
        state = two_turns.run(backend=backend)
        assert (state["a"], state["b"]) == ("fine", "fine")
    path, headers, body = api.sent[0]
    assert (path, headers["x-goog-api-key"]) == ("/v1beta/models/g-2:generateContent", "g-1")
    assert body == {
        "contents": [{"role": "user", "parts": [{"text": "  Hello,\n  you"}]}],
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
        "generationConfig": {"maxOutputTokens": 7, "temperature": 0.5, "stopSequences": ["x"]},
        "safetySettings": [{"category": "HARM", "threshold": "NONE"}],
    }
    assert [turn["role"] for turn in api.sent[1][2]["contents"]] == ["user", "model", "user"]
    assert state.get_meta_info("a")["reasoning_tokens"] == 4
    words: Any = {"project_id": "p", "location": "l", "access_token": lambda: "t-1", "base_url": api.url}
    with closing(VertexAI("g-2", **words)) as vertex:
        assert two_turns.run(backend=vertex)["b"] == "fine"
    path, headers, _ = api.sent[-1]
    assert path == "/v1/projects/p/locations/l/publishers/google/models/g-2:generateContent"
    assert headers["Authorization"] == "Bearer t-1"


def test_pictures_and_sounds_in_each_dialect(api: Api) -> None:
    @sgl.function
    def look(s: Any) -> None:
        s += sgl.user("See " + sgl.image(b"\x89PNG\r\n\x1a\n") + sgl.image("https://a/b.png"))
        s += sgl.assistant(sgl.gen("a", max_tokens=4))

    @sgl.function
    def hear(s: Any) -> None:
        s += sgl.user(sgl.audio(b"ID3") + "what?")
        s += sgl.assistant(sgl.gen("a", max_tokens=4))

    data = "iVBORw0KGgo="
    parts = {
        "openai": lambda body: body["messages"][0]["content"],
        "anthropic": lambda body: body["messages"][0]["content"],
        "gemini": lambda body: body["contents"][0]["parts"],
    }
    wanted = {
        "openai": [
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
            {"type": "image_url", "image_url": {"url": "https://a/b.png"}},
        ],
        "anthropic": [
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}},
            {"type": "image", "source": {"type": "url", "url": "https://a/b.png"}},
        ],
        "gemini": [
            {"inlineData": {"mimeType": "image/png", "data": data}},
            {"fileData": {"fileUri": "https://a/b.png"}},
        ],
    }
    replies = {"openai": openai_chat, "anthropic": claude, "gemini": gemini}
    for kind, (make, _) in KINDS.items():
        api.say = lambda path, body, kind=kind: replies[kind]("ok")
        with closing(make(api.url)) as backend:
            assert look.run(backend=backend)["a"] == "ok"
            assert parts[kind](api.body)[1:] == wanted[kind]
            if kind == "openai":
                assert hear.run(backend=backend)["a"] == "ok"
                sound = {"type": "input_audio", "input_audio": {"data": "SUQz", "format": "mp3"}}
                assert parts[kind](api.body)[0] == sound
            else:
                with pytest.raises(Unsupported, match="supports text and images"):
                    hear.run(backend=backend)["a"]


# -- tools ---------------------------------------------------------------------------------------------------


def get_weather(city: str) -> dict[str, Any]:
    """Weather of a city"""
    return {"degrees": 21, "city": city}


@sgl.function
def tooled(s: Any, **words: Any) -> None:
    s += sgl.tools([get_weather])
    s += sgl.user("Where is it warm?")
    with s.tool_loop(**words):
        s += sgl.assistant(sgl.gen("a", max_tokens=7))
    s += sgl.user("As JSON.")
    s += sgl.assistant(sgl.gen("b", json_schema={"type": "object"}, max_tokens=7))


CITIES = ("Oslo", "Lima")
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def openai_calls() -> Answer:
    calls = [
        {
            "id": f"c{n}",
            "type": "function",
            "function": {"name": "get_weather", "arguments": f'{{"city": "{city}"}}'},
        }
        for n, city in enumerate(CITIES)
    ]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    choices = [{"index": 0, "message": message, "finish_reason": "tool_calls"}]
    return 200, [json.dumps({"id": "r0", "choices": choices}).encode()]


def claude_calls() -> Answer:
    blocks: list[dict[str, Any]] = [{"type": "text", "text": "I look."}]
    for n, city in enumerate(CITIES):
        blocks.append({"type": "tool_use", "id": f"c{n}", "name": "get_weather", "input": {"city": city}})
    told = {"id": "m0", "content": blocks, "stop_reason": "tool_use", "usage": {}}
    return 200, [json.dumps(told).encode()]


def gemini_calls() -> Answer:
    parts: list[dict[str, Any]] = [
        {"functionCall": {"name": "get_weather", "args": {"city": city}}} for city in CITIES
    ]
    parts[0]["thoughtSignature"] = "c2lnbmVk"
    parts[1]["functionCall"]["id"] = "own"
    candidate = {"content": {"parts": parts, "role": "model"}, "finishReason": "STOP"}
    return 200, [json.dumps({"candidates": [candidate]}).encode()]


def results() -> list[dict[str, Any]]:
    return [{"degrees": 21, "city": city} for city in CITIES]


def test_openai_is_told_of_tools_in_its_own_words(api: Api) -> None:
    answers = [openai_calls(), openai_chat("Both."), openai_chat("{}")]
    api.say = lambda path, body: answers[len(api.sent) - 1]
    with closing(OpenAI("m", base_url=api.url, api_key="k")) as backend:
        state = tooled.run(tool_choice="get_weather", parallel=False, backend=backend)
        assert (state["a"], state["b"]) == ("Both.", "{}")
    first, second, third = (body for _, _, body in api.sent)
    function = {"name": "get_weather", "description": "Weather of a city", "parameters": SCHEMA}
    assert first["tools"] == [{"type": "function", "function": function}]
    assert first["tool_choice"] == {"type": "function", "function": {"name": "get_weather"}}
    assert first["parallel_tool_calls"] is False
    assert second["tool_choice"] == "auto"
    said, *told = second["messages"][1:]
    assert [call["id"] for call in said["tool_calls"]] == ["c0", "c1"]
    assert [(turn["role"], turn["tool_call_id"]) for turn in told] == [("tool", "c0"), ("tool", "c1")]
    assert [json.loads(turn["content"]) for turn in told] == results()
    assert (third["tools"], third["tool_choice"]) == (first["tools"], "none")


def test_openai_is_asked_for_strict_tools_where_they_can_be(api: Api) -> None:
    closed = {**SCHEMA, "additionalProperties": False}
    tool = sgl.Tool("get_weather", parameters=closed, run=lambda city: city)

    @sgl.function
    def program(s: Any) -> None:
        s += sgl.tools(tool)
        s += sgl.user("Go")
        s += sgl.assistant(sgl.gen("a"))

    api.say = lambda path, body: openai_chat("ok")
    with closing(OpenAI("m", base_url=api.url, api_key="k")) as backend:
        assert program.run(backend=backend)["a"] == "ok"
    assert api.body["tools"][0]["function"] == {"name": "get_weather", "parameters": closed, "strict": True}


def test_anthropic_is_told_of_tools_in_its_own_words(api: Api) -> None:
    answers = [claude_calls(), claude("Both."), claude("{}")]
    api.say = lambda path, body: answers[len(api.sent) - 1]
    with closing(Anthropic("m", base_url=api.url, api_key="k")) as backend:
        state = tooled.run(tool_choice="required", parallel=False, backend=backend)
        assert (state["a"], state["b"]) == ("Both.", "{}")
    first, second, third = (body for _, _, body in api.sent)
    tool = {"name": "get_weather", "description": "Weather of a city", "input_schema": SCHEMA}
    assert first["tools"] == [tool]
    assert first["tool_choice"] == {"type": "any", "disable_parallel_tool_use": True}
    assert second["tool_choice"] == {"type": "auto", "disable_parallel_tool_use": True}
    said, told = second["messages"][1:]
    assert said["content"][0] == {"type": "text", "text": "I look."}
    assert [block["input"] for block in said["content"][1:]] == [{"city": city} for city in CITIES]
    assert (told["role"], [one["tool_use_id"] for one in told["content"]]) == ("user", ["c0", "c1"])
    assert [json.loads(one["content"]) for one in told["content"]] == results()
    assert (third["tools"], third["tool_choice"]) == ([tool], {"type": "none"})


def test_gemini_is_told_of_tools_in_its_own_words(api: Api) -> None:
    answers = [gemini_calls(), gemini("Both."), gemini("{}")]
    api.say = lambda path, body: answers[len(api.sent) - 1]
    with closing(Gemini("m", base_url=api.url, api_key="k")) as backend:
        state = tooled.run(tool_choice="get_weather", backend=backend)
        assert (state["a"], state["b"]) == ("Both.", "{}")
        first, second, third = (body for _, _, body in api.sent)
        with pytest.raises(Unsupported, match="one call per reply"):
            tooled.run(parallel=False, backend=backend)["a"]
    declared = {"name": "get_weather", "description": "Weather of a city", "parametersJsonSchema": SCHEMA}
    assert first["tools"] == [{"functionDeclarations": [declared]}]
    named = {"mode": "ANY", "allowedFunctionNames": ["get_weather"]}
    assert first["toolConfig"] == {"functionCallingConfig": named}
    assert second["toolConfig"] == {"functionCallingConfig": {"mode": "AUTO"}}
    said, told = second["contents"][1:]
    assert said["parts"] == [
        {"functionCall": {"name": "get_weather", "args": {"city": "Oslo"}}, "thoughtSignature": "c2lnbmVk"},
        {"functionCall": {"id": "own", "name": "get_weather", "args": {"city": "Lima"}}},
    ]
    assert told["parts"] == [
        {"functionResponse": {"name": "get_weather", "response": results()[0]}},
        {"functionResponse": {"id": "own", "name": "get_weather", "response": results()[1]}},
    ]
    assert third["toolConfig"] == {"functionCallingConfig": {"mode": "NONE"}}


def test_text_completions_refuse_tools(api: Api) -> None:
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
    call = Call(Prompt((Message("raw", "Where is it warm?", open=True),), (tool,)), SamplingParams())
    with (
        closing(OpenAI("m", base_url=api.url, api_key="k")) as backend,
        pytest.raises(Unsupported, match="text completions take no tools"),
    ):
        background().run(backend.generate(call), 60)
    assert not api.sent


def test_replies_with_tools_are_streamed_whole(api: Api) -> None:
    whole = {"openai": openai_calls, "anthropic": claude_calls, "gemini": gemini_calls}
    after = {"openai": openai_chat, "anthropic": claude, "gemini": gemini}
    for kind, (make, _) in KINDS.items():
        api.sent.clear()
        answers = [whole[kind](), after[kind]("Both.")]
        api.say = lambda path, body, answers=answers: answers[min(len(api.sent), 2) - 1]
        with closing(make(api.url)) as backend:
            state = tooled.stream(backend=backend)
            assert "".join(state.text_iter("a")) == "Both."
            assert len(state.tool_calls("a")) == 2
            state.error()


# -- streams -------------------------------------------------------------------------------------------------


def openai_events(pieces: list[str]) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = [
        {"id": "r1", "choices": [{"index": 0, "delta": {"content": p}, "finish_reason": None}]}
        for p in pieces
    ]
    told.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
    return [*told, {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}]


def claude_events(pieces: list[str]) -> list[dict[str, Any]]:
    start = {"id": "m1", "usage": {"input_tokens": 5, "output_tokens": 1}}
    deltas = [{"type": "content_block_delta", "delta": {"type": "text_delta", "text": p}} for p in pieces]
    end = {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}, "usage": {"output_tokens": 2}}
    ping = {"type": "ping"}
    return [{"type": "message_start", "message": start}, ping, *deltas, end, {"type": "message_stop"}]


def gemini_events(pieces: list[str]) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = [{"candidates": [{"content": {"parts": [{"text": p}]}}]} for p in pieces]
    usage = {"promptTokenCount": 5, "candidatesTokenCount": 2}
    return [*told, {"candidates": [{"finishReason": "MAX_TOKENS"}], "usageMetadata": usage}]


KINDS: dict[str, tuple[Callable[[str], Any], Callable[[list[str]], list[dict[str, Any]]]]] = {
    "openai": (lambda url: OpenAI("m", base_url=url, api_key="k"), openai_events),
    "anthropic": (lambda url: Anthropic("m", base_url=url, api_key="k"), claude_events),
    "gemini": (lambda url: Gemini("m", base_url=url, api_key="k"), gemini_events),
}


@sgl.function
def one_turn(s: Any) -> None:
    s += sgl.user("Hello")
    s += sgl.assistant(sgl.gen("a", max_tokens=7))


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=tries(25))
@given(st.data())
def test_streams_lose_nothing_however_they_are_cut(kind: str, server: Api, data: st.DataObject) -> None:
    make, events = KINDS[kind]
    text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    pieces = data.draw(st.lists(text, max_size=5))
    wire = b"".join(f"data: {json.dumps(event)}\n\n".encode() for event in events(pieces))
    wire += b"data: [DONE]\n\n" if kind == "openai" else b""
    cuts = sorted(data.draw(st.sets(st.integers(0, len(wire)), max_size=6)))
    server.say = lambda path, body: (200, [wire[a:b] for a, b in zip([0, *cuts], [*cuts, len(wire)])])
    with closing(make(server.url)) as backend:
        state = one_turn.stream(backend=backend)
        assert "".join(state.text_iter("a")) == state["a"] == "".join(pieces)
        meta = state.get_meta_info("a")
        assert (meta["finish_reason"]["type"], meta["prompt_tokens"]) == ("length", 5)
        assert (backend.token_usage.prompt_tokens, backend.token_usage.completion_tokens) == (5, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_that_breaks_off_is_an_error_after_what_came(kind: str, api: Api) -> None:
    make, events = KINDS[kind]
    told = events(["one ", "two"])
    wire = [f"data: {json.dumps(event)}\n\n".encode() for event in told]
    last = next(at for at, event in enumerate(told) if "two" in json.dumps(event))
    api.say = lambda path, body: (200, wire[: last + 1])
    with closing(make(api.url)) as backend:
        state = one_turn.stream(backend=backend)
        came = []
        with pytest.raises(BackendError, match="broke off after 7 characters"):
            came += list(state.text_iter("a"))
        with pytest.raises(BackendError, match="broke off"):
            state["a"]
        assert len(api.sent) == 1  # what has begun is never sent again


@pytest.mark.parametrize(
    ("kind", "event"),
    [
        ("openai", {"error": {"message": "overloaded"}}),
        ("anthropic", {"type": "error", "error": {"type": "overloaded_error", "message": "overloaded"}}),
        ("gemini", {"error": {"code": 503, "message": "overloaded"}}),
    ],
)
def test_an_error_inside_a_stream_is_raised(kind: str, event: dict[str, Any], api: Api) -> None:
    make, _ = KINDS[kind]
    api.say = lambda path, body: (200, [f"data: {json.dumps(event)}\n\n".encode()])
    with closing(make(api.url)) as backend, pytest.raises(BackendError, match="overloaded"):
        one_turn.stream(backend=backend)["a"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_request_is_not_sent_again_and_a_busy_server_is(kind: str, api: Api) -> None:
    make, _ = KINDS[kind]
    api.say = lambda path, body: (400, [json.dumps({"error": {"message": "no such thing"}}).encode()])
    with closing(make(api.url)) as backend:
        with pytest.raises(BackendError, match="no such thing") as caught:
            one_turn.run(backend=backend)["a"]
        assert (caught.value.status, caught.value.retryable, len(api.sent)) == (400, False, 1)
        fine = {"openai": openai_chat, "anthropic": claude, "gemini": gemini}[kind]
        api.say = lambda path, body: (429, [b"{}"]) if len(api.sent) == 2 else fine("ok")
        assert one_turn.run(backend=backend)["a"] == "ok"
        assert len(api.sent) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_gemini_are_read(api: Api, stream: bool) -> None:
    yes, no = ({"token": text, "tokenId": at, "logProbability": -0.5 - at} for at, text in enumerate("yn"))
    logprobs = {"chosenCandidates": [yes], "topCandidates": [{"candidates": [yes, no]}]}
    candidate = {"content": {"parts": [{"text": "y"}]}, "finishReason": "STOP", "logprobsResult": logprobs}
    answer = json.dumps({"candidates": [candidate]}).encode()
    api.say = lambda path, body: (200, [b"data: %s\n\n" % answer if stream else answer])
    program = sgl.function(
        lambda s: s.__iadd__(sgl.user("?") + sgl.assistant(sgl.gen("a", top_logprobs_num=2)))
    )
    with closing(Gemini("m", base_url=api.url, api_key="k")) as backend:
        meta = program.run(backend=backend, stream=stream).get_meta_info("a")
    assert api.body["generationConfig"]["responseLogprobs"] is True
    assert api.body["generationConfig"]["logprobs"] == 2
    assert meta["output_token_logprobs"] == [(-0.5, 0, "y")]
    assert meta["output_top_logprobs"] == [[(-0.5, 0, "y"), (-1.5, 1, "n")]]


# -- structure -----------------------------------------------------------------------------------------------


def test_structured_output_is_asked_for_in_each_dialect(api: Api) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += sgl.user("How old?")
        s += sgl.assistant(sgl.gen("age", dtype=int, max_tokens=20))

    replies = {"openai": openai_chat, "anthropic": claude, "gemini": gemini}
    where = {
        "openai": ("response_format", "json_schema", "schema"),
        "anthropic": ("output_config", "format", "schema"),
        "gemini": ("generationConfig", "responseJsonSchema"),
    }
    for kind, (make, _) in KINDS.items():
        api.say = lambda path, body, kind=kind: replies[kind]('{"value": 42}')
        with closing(make(api.url)) as backend:
            assert program.run(backend=backend)["age"] == "42"
        body = api.body
        schema = body
        for key in where[kind]:
            schema = schema[key]
        assert schema["properties"]["value"] == {"type": "integer"}
        assert "stop" not in json.dumps(body)  # the dtype's own stops are about the number, not the JSON


def test_a_reply_that_breaks_the_promise_is_an_error(api: Api) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += sgl.user("Which?")
        s += sgl.assistant(sgl.gen("town", json_schema={"type": "string", "enum": ["Rome", "Bern"]}))

    with closing(OpenAI("m", base_url=api.url, api_key="k")) as backend:
        for text in ('{"value": "Paris"}', "Rome", '{"other": "Rome"}', "?"):
            api.say = lambda path, body, text=text: openai_chat(text)
            state = program.run(backend=backend)
            with pytest.raises(InvalidValue, match="is not what its json_schema requires"):
                state["town"]
            assert state.messages()[-1]["content"]  # the reply was said, and the state goes on
        api.say = lambda path, body: openai_chat('{"value": "Rome"}')
        assert json.loads(program.run(backend=backend)["town"]) == "Rome"
        refusal = {"role": "assistant", "content": None, "refusal": "I may not"}
        choice = {"index": 0, "message": refusal, "finish_reason": "stop"}
        api.say = lambda path, body: (200, [json.dumps({"choices": [choice]}).encode()])
        with pytest.raises(BackendError, match="the model refused: I may not"):
            program.run(backend=backend)["town"]


def test_references_keep_their_meaning_inside_the_wrapper() -> None:
    schema = {"$ref": "#/$defs/node", "$defs": {"node": {"type": "array", "items": {"$ref": "#/$defs/node"}}}}
    form = json_form(Constraint("json_schema", json.dumps(schema)))
    assert form is not None
    assert form.wrapped
    assert form.schema["$defs"] == schema["$defs"]
    assert form.schema["properties"]["value"] == {"$ref": "#/$defs/node"}
    assert form.read('{"value": [[], []]}', Constraint("json_schema", json.dumps(schema))) == "[[], []]"


def test_what_no_schema_says_is_refused(api: Api) -> None:
    assert json_form(Constraint("regex", "a+")) is None
    assert json_form(Constraint("ebnf", 'root ::= "a"')) is None

    @sgl.function
    def program(s: Any) -> None:
        s += sgl.user("Say a")
        s += sgl.assistant(sgl.gen("a", regex="a+"))

    for make, _ in KINDS.values():
        with closing(make(api.url)) as backend, pytest.raises(Unsupported, match="cannot enforce regex"):
            program.run(backend=backend)["a"]
    assert not api.sent
