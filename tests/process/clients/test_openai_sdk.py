"""The openai SDK against the real processes: chat, completions and embeddings, whole and streamed, and every
kind of refusal as the exception that the SDK has for it.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.process.patience import PATIENCE_S, go_on, held, hold, in_pieces

ASKED: Any = [{"role": "user", "content": "Which river runs through Ostrel?"}]
GREEDY: Any = {"model": "pocket", "temperature": 0, "max_tokens": 24}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a town",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}


class Weather(pydantic.BaseModel):
    town: Literal["Ostrel", "Thessen"]
    sunny: bool


@pytest.fixture(scope="module")
def client(shared_server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{shared_server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
    ) as made:
        yield made


def texts(stream: Any, count: int = 1) -> list[str]:
    """The texts of a chat stream's choices."""
    found = [""] * count
    for chunk in stream:
        for choice in chunk.choices:
            found[choice.index] += choice.delta.content or ""
    return found


def test_models(client: openai.OpenAI) -> None:
    [card] = client.models.list().data
    assert (card.id, card.object, card.owned_by) == ("pocket", "model", "sglang-dsl")
    assert card.model_extra is not None
    assert card.model_extra["max_model_len"] == 2048
    assert client.models.retrieve("pocket") == card
    with pytest.raises(openai.NotFoundError, match="the model 'no/such' does not exist") as caught:
        client.models.retrieve("no/such")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


# -- chat ----------------------------------------------------------------------------------------------------


def test_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=ASKED, **GREEDY)
    [choice] = whole.choices
    assert whole.object == "chat.completion"
    assert whole.id.startswith("chatcmpl-")
    assert (choice.message.role, choice.finish_reason, choice.index) == ("assistant", "stop", 0)
    assert choice.message.tool_calls is None
    assert choice.message.content
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert whole.usage.prompt_tokens_details is None
    chunks = in_pieces(
        lambda: list(client.chat.completions.create(messages=ASKED, stream=True, **GREEDY)), least=2 + 2
    )  # the first and the last have no text
    assert {(c.id, c.created, c.model, c.object) for c in chunks} == {
        (chunks[0].id, chunks[0].created, "pocket", "chat.completion.chunk")
    }
    first, *middle, last = [chunk.choices[0] for chunk in chunks]
    assert (first.delta.role, first.delta.content, first.finish_reason) == ("assistant", "", None)
    assert "".join(one.delta.content or "" for one in middle) == choice.message.content
    assert len(middle) > 1
    assert {one.finish_reason for one in middle} == {None}
    assert (last.finish_reason, last.delta.content) == ("stop", None)
    assert all(chunk.usage is None for chunk in chunks)


def test_a_reply_without_a_limit_may_fill_the_context(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="pocket", messages=ASKED)
    assert whole.choices[0].finish_reason == "stop"
    endless = client.chat.completions.create(
        model="pocket",
        messages=[{"role": "user", "content": "river " * 1900}],
        extra_body={"ignore_eos": True},
    )
    assert endless.choices[0].finish_reason == "length"
    assert endless.usage is not None
    assert endless.usage.total_tokens == 2048


def test_several_samples_with_a_seed(client: openai.OpenAI) -> None:
    words: Any = {**GREEDY, "temperature": 1.5, "seed": 7, "n": 3, "max_tokens": 12}
    asked: Any = [{"role": "user", "content": "Repeat tree house bird green."}]
    one, other = (client.chat.completions.create(messages=asked, **words) for _ in range(2))
    said = [choice.message.content for choice in one.choices]
    assert said == [choice.message.content for choice in other.choices]
    assert [choice.index for choice in one.choices] == [0, 1, 2]
    assert len(set(said)) > 1
    assert one.usage is not None
    assert 3 < one.usage.completion_tokens <= 36
    stream = client.chat.completions.create(messages=asked, stream=True, **words)
    assert texts(stream, 3) == said
    changed = client.chat.completions.create(messages=asked, **{**words, "seed": 8})
    assert [choice.message.content for choice in changed.choices] != said


def test_usage_in_a_stream(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=ASKED, **GREEDY).usage
    *chunks, last = client.chat.completions.create(
        messages=ASKED, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    assert (last.choices, last.usage) == ([], whole)
    assert all(chunk.usage is None for chunk in chunks)
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = in_pieces(
        lambda: list(
            client.chat.completions.create(messages=ASKED, stream=True, stream_options=options, **GREEDY)
        ),
        least=2 + 2,
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert len(counts) == len(chunks)
    assert counts == sorted(counts)
    assert chunks[-1].usage == whole
    assert counts[0] < counts[-1]


@pytest.mark.parametrize("stop", [" ", ["zzz", " "]])
def test_stop_strings(client: openai.OpenAI, stop: Any) -> None:
    text = client.chat.completions.create(messages=ASKED, **GREEDY).choices[0].message.content
    assert text is not None
    assert " " in text
    stopped = client.chat.completions.create(messages=ASKED, stop=stop, **GREEDY).choices[0]
    assert stopped.message.content == text.partition(" ")[0]
    assert stopped.finish_reason == "stop"
    assert stopped.model_extra == {"matched_stop": " "}
    assert texts(client.chat.completions.create(messages=ASKED, stop=stop, stream=True, **GREEDY)) == [
        stopped.message.content
    ]


def test_logprobs(client: openai.OpenAI) -> None:
    words: Any = {**GREEDY, "logprobs": True, "top_logprobs": 3}
    choice = client.chat.completions.create(messages=ASKED, **words).choices[0]
    assert choice.logprobs is not None
    entries = choice.logprobs.content
    assert entries
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token  # greedy
        assert entry.top_logprobs[0].logprob == entry.logprob <= 0
        assert sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1 + 1e-4
        assert entry.bytes == list(entry.token.encode())
    assert entries[-1].token == "<|im_end|>"
    assert "".join(entry.token for entry in entries[:-1]) == choice.message.content
    streamed = [
        entry
        for chunk in client.chat.completions.create(messages=ASKED, stream=True, **words)
        for entry in (chunk.choices[0].logprobs.content or [] if chunk.choices[0].logprobs else [])
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in entries]
    assert [entry.logprob for entry in streamed] == pytest.approx(
        [entry.logprob for entry in entries], abs=1e-4
    )


@pytest.mark.parametrize("interval", [1, 3, 100])
def test_a_chunks_tokens_are_its_text(client: openai.OpenAI, interval: int) -> None:
    """However many come at once: the one that ends the reply comes by itself."""
    more = {"stream_interval": interval}
    stream = client.chat.completions.create(
        messages=ASKED, stream=True, logprobs=True, extra_body=more, **GREEDY
    )
    chunks = [chunk.choices[0] for chunk in stream]
    spelled = [
        ("".join(entry.token for entry in chunk.logprobs.content or []), chunk.delta.content)
        for chunk in chunks
        if chunk.logprobs
    ]
    assert spelled.pop() == ("<|im_end|>", "")
    assert all(tokens == text for tokens, text in spelled)
    assert len(spelled) <= 2 or interval < 100
    assert chunks[-1].finish_reason == "stop"


def test_logit_bias_and_penalties(client: openai.OpenAI, shared_server: Any) -> None:
    plain = client.chat.completions.create(messages=ASKED, logprobs=True, **GREEDY).choices[0]
    told = client.post("/tokenize", body={"prompt": "Z"}, cast_to=dict[str, Any])  # /v1/tokenize
    [token] = told["tokens"]
    bent = client.chat.completions.create(messages=ASKED, logit_bias={str(token): 100}, **GREEDY).choices[0]
    assert bent.message.content == "Z" * 24
    assert bent.finish_reason == "length"
    barred = client.chat.completions.create(
        messages=ASKED, logit_bias={str(token): 100}, presence_penalty=2, frequency_penalty=-2, **GREEDY
    )
    assert barred.choices[0].message.content == "Z" * 24
    assert plain.message.content != bent.message.content


def test_constraints(client: openai.OpenAI) -> None:
    said = client.chat.completions.create(messages=ASKED, response_format={"type": "text"}, **GREEDY)
    assert said.choices[0].message.content
    pattern = r"[A-Z][a-z]{2,5} [0-9]{3}"
    bound = client.chat.completions.create(messages=ASKED, extra_body={"regex": pattern}, **GREEDY).choices[0]
    assert bound.message.content is not None
    assert re.fullmatch(pattern, bound.message.content)


def test_a_model_is_parsed(client: openai.OpenAI) -> None:
    asked: Any = [{"role": "user", "content": "What is the weather in Ostrel?"}]
    words: Any = {**GREEDY, "max_tokens": 100}
    done = client.chat.completions.parse(messages=asked, response_format=Weather, **words)
    found = done.choices[0].message.parsed
    assert isinstance(found, Weather)
    with client.chat.completions.stream(messages=asked, response_format=Weather, **words) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.parsed == found
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(messages=asked, response_format=Weather, **{**words, "max_tokens": 3})
    free = client.chat.completions.create(messages=asked, response_format={"type": "json_object"}, **words)
    if free.choices[0].finish_reason == "stop":
        pydantic.TypeAdapter(Any).validate_json(free.choices[0].message.content or "")


def test_tools_are_shown_to_the_model(client: openai.OpenAI) -> None:
    def prompt(**words: Any) -> int:
        usage = client.chat.completions.create(messages=ASKED, **words, **GREEDY).usage
        assert usage is not None
        return usage.prompt_tokens

    bare = prompt()
    assert prompt(tools=[TOOL]) == prompt(tools=[TOOL], tool_choice="auto") > bare
    assert prompt(tools=[TOOL], tool_choice="none") == bare
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        assert prompt(tools=[TOOL], tool_choice=choice) > bare
    with pytest.raises(openai.BadRequestError, match="not found in tools list"):
        prompt(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "other"}})
    with pytest.raises(openai.BadRequestError, match="Tools cannot be empty"):
        prompt(tool_choice="required")
    answered: Any = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
        ]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]  # fmt: skip
    after = client.chat.completions.create(messages=answered, tools=[TOOL], **GREEDY)
    assert after.usage is not None
    assert after.usage.prompt_tokens > prompt(tools=[TOOL])


def test_text_parts_unicode_and_turns(client: openai.OpenAI) -> None:
    def ids(content: Any) -> int:
        asked: Any = [
            {"role": "developer", "content": "Kurz, bitte: 한국어 😀 e\u0301"},
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Hi."},
            {"role": "user", "content": content},
        ]
        usage = client.chat.completions.create(messages=asked, **GREEDY).usage
        assert usage is not None
        return usage.prompt_tokens

    text = "한국어 😀 naïve \u202e\x00 \U0010ffff"
    assert ids(text) == ids([{"type": "text", "text": text}])
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(openai.BadRequestError, match="image"):
        ids([image])


def test_a_reply_may_be_continued(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=ASKED, **GREEDY).choices[0].message.content
    assert whole is not None
    begun: Any = [*ASKED, {"role": "assistant", "content": whole[:9]}]
    more = client.chat.completions.create(
        messages=begun,
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
        **GREEDY,
    )
    usage = client.chat.completions.create(messages=ASKED, **GREEDY).usage
    assert usage is not None
    assert more.usage is not None
    assert more.usage.prompt_tokens > usage.prompt_tokens
    assert more.choices[0].finish_reason in ("stop", "length")


# -- completions ---------------------------------------------------------------------------------------------


def test_completions_of_several_prompts(client: openai.OpenAI) -> None:
    words: Any = {"model": "pocket", "temperature": 0, "max_tokens": 6}
    prompts = ["The Queen", "Hello"]
    singles = [client.completions.create(prompt=prompt, **words) for prompt in prompts]
    both = client.completions.create(prompt=prompts, **words)
    assert [choice.text for choice in both.choices] == [one.choices[0].text for one in singles]
    assert [choice.index for choice in both.choices] == [0, 1]
    assert both.id.startswith("cmpl-")
    assert both.object == "text_completion"
    assert both.usage is not None
    assert both.usage.completion_tokens == 12
    ids = [
        client.post("/tokenize", body={"prompt": one}, cast_to=dict[str, Any])["tokens"] for one in prompts
    ]
    assert client.completions.create(prompt=ids[0], **words).choices[0].text == singles[0].choices[0].text
    by_ids = client.completions.create(prompt=ids, **words)
    assert [choice.text for choice in by_ids.choices] == [choice.text for choice in both.choices]
    sampled = client.completions.create(prompt=prompts, n=2, seed=3, **{**words, "temperature": 1.2})
    assert [choice.index for choice in sampled.choices] == [0, 1, 2, 3]
    found = [""] * 4
    for chunk in client.completions.create(
        prompt=prompts, n=2, seed=3, stream=True, **{**words, "temperature": 1.2}
    ):
        for choice in chunk.choices:
            found[choice.index] += choice.text
    assert found == [choice.text for choice in sampled.choices]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [[-300], [1 << 40], [[5], [-300]]])
def test_ids_that_are_none_cannot_be_echoed(client: openai.OpenAI, prompt: Any, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError, match="must be a token id from 0 to"):
        for _ in client.completions.create(model="pocket", prompt=prompt, echo=True, stream=stream):
            pass


def test_echo_and_logprobs(client: openai.OpenAI) -> None:
    words: Any = {"model": "pocket", "temperature": 0, "prompt": "The 한 Queen", "echo": True, "logprobs": 2}
    choice = client.completions.create(max_tokens=4, **words).choices[0]
    told = choice.logprobs
    assert told is not None
    assert told.tokens is not None
    assert told.token_logprobs is not None
    assert told.top_logprobs is not None
    assert told.text_offset is not None
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == len(told.text_offset)
    assert choice.text.startswith("The 한 Queen")
    assert (told.token_logprobs[0], told.top_logprobs[0]) == (None, None)
    assert all(value <= 0 for value in told.token_logprobs[1:])
    assert all(1 <= len(top) <= 2 for top in told.top_logprobs[1:])
    for token, offset in zip(told.tokens, told.text_offset, strict=True):
        assert token.startswith("bytes:\\x") or choice.text[offset : offset + len(token)] == token
    assert sum(token.startswith("bytes:") for token in told.tokens) == len("한".encode())
    streamed: list[str] = []
    for chunk in client.completions.create(max_tokens=4, stream=True, **words):
        logprobs = chunk.choices[0].logprobs
        streamed += (logprobs.tokens or []) if logprobs else []
    assert streamed == told.tokens
    alone = client.completions.create(max_tokens=0, **words).choices[0]
    assert alone.text == "The 한 Queen"
    assert alone.logprobs is not None
    assert alone.logprobs.tokens == told.tokens[:-4]
    assert alone.logprobs.token_logprobs is not None
    assert alone.logprobs.token_logprobs[1:] == pytest.approx(told.token_logprobs[1:-4], abs=1e-3)
    unasked = client.completions.create(max_tokens=1, **{**words, "logprobs": 0}).choices[0].logprobs
    assert unasked is not None
    assert unasked.top_logprobs is None


def test_the_best_of_several(client: openai.OpenAI) -> None:
    words: Any = {"model": "pocket", "prompt": "The Queen", "temperature": 1.0, "seed": 5, "max_tokens": 6}
    done = client.completions.create(best_of=4, n=2, logprobs=1, **words)
    assert len(done.choices) == 2
    means = []
    for choice in done.choices:
        assert choice.logprobs is not None
        values = choice.logprobs.token_logprobs or []
        means.append(sum(values) / len(values))
    assert means == sorted(means, reverse=True)
    assert done.usage is not None
    assert done.usage.completion_tokens > 12
    for wrong in ({"best_of": 1, "n": 2}, {"best_of": 3, "stream": True}):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(**wrong, **words)
        assert caught.value.param == "best_of"


def test_a_suffix_needs_a_model_that_fills_in(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="fill-in-the-middle") as caught:
        client.completions.create(model="pocket", prompt="def f(", suffix="return x")
    assert caught.value.param == "suffix"
    assert "completion_template" in caught.value.message


# -- embeddings ----------------------------------------------------------------------------------------------


def test_embeddings(client: openai.OpenAI) -> None:
    usual = client.embeddings.create(model="pocket", input="A river")  # asks for base64, and decodes it
    plain = client.embeddings.create(model="pocket", input="A river", encoding_format="float")
    assert usual.data[0].embedding == pytest.approx(plain.data[0].embedding, abs=1e-6)
    assert len(plain.data[0].embedding) == 192
    assert math.hypot(*plain.data[0].embedding) == pytest.approx(1, abs=1e-4)
    assert usual.usage.prompt_tokens == usual.usage.total_tokens > 0
    many = client.embeddings.create(model="pocket", input=["A river", "Another"])
    assert [one.index for one in many.data] == [0, 1]
    assert many.data[0].embedding == pytest.approx(plain.data[0].embedding, abs=1e-5)
    ids = client.post("/tokenize", body={"prompt": "A river"}, cast_to=dict[str, Any])["tokens"]
    for given in (ids, [ids]):
        by_ids = client.embeddings.create(model="pocket", input=given)
        assert by_ids.data[0].embedding == pytest.approx(plain.data[0].embedding, abs=1e-5)
    for wrong in ("", [], [""]):
        with pytest.raises(openai.BadRequestError) as caught:
            client.embeddings.create(model="pocket", input=wrong)
        assert caught.value.param is not None
        assert caught.value.param.startswith("input")


# -- refusals ------------------------------------------------------------------------------------------------

BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": -1}, "temperature", "at least 0"),
    ({"temperature": "warm"}, "temperature", "float"),
    ({"top_p": 0}, "top_p", "must be in"),
    ({"n": 0}, "n", "at least 1"),
    ({"n": 2000}, "n", "at most 1024"),
    ({"max_tokens": -1}, "max_tokens", "at least 0"),
    ({"max_tokens": 5000}, "max_tokens", "context length is 2048"),
    ({"stop": ["a"] * 40}, "stop", "at most"),
    ({"logit_bias": {"100000": 1}}, "logit_bias", "vocabulary"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "token id"),
    ({"top_logprobs": 3}, "top_logprobs", "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "0 to 20"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
    ({"messages": []}, "messages", "empty"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "must be one of"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "a number"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
    ({"extra_body": {"regex": "("}}, "", ""),
    ({"extra_body": {"temprature": 1}}, "temprature", "did you mean 'temperature'"),
    ({"functions": [{"name": "f"}]}, "functions", "use tools"),
    ({"modalities": ["audio", "text"]}, "modalities", "only text"),
]


@pytest.mark.parametrize(("words", "param", "message"), BAD)
def test_what_is_wrong_is_told(client: openai.OpenAI, words: Any, param: str, message: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"messages": ASKED, **GREEDY, **words})
    error = caught.value
    assert error.status_code == 400
    assert error.type == "invalid_request_error"
    assert param in (error.param or "")
    assert message in error.message
    assert "sampling_params" not in error.message


def test_a_prompt_that_is_too_long(client: openai.OpenAI) -> None:
    asked: Any = [{"role": "user", "content": "river " * 4000}]
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="the context length is 2048") as caught:
            client.chat.completions.create(messages=asked, stream=stream, **GREEDY)
        assert caught.value.code == "context_length_exceeded"


def test_errors_have_their_exceptions(client: openai.OpenAI, shared_server: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="'gpt' does not exist"):
        client.chat.completions.create(**{**GREEDY, "messages": ASKED, "model": "gpt"})
    with pytest.raises(openai.NotFoundError):
        client.post("/no/such/path", body={}, cast_to=dict[str, Any])
    with pytest.raises(openai.BadRequestError, match="not valid JSON"):
        client.post("/chat/completions", content=b"{", cast_to=dict[str, Any])
    with pytest.raises(openai.APIStatusError) as caught:
        client.get("/chat/completions", cast_to=dict[str, Any])
    assert caught.value.status_code == 405
    with (
        openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="x", max_retries=0) as nowhere,
        pytest.raises(openai.APIConnectionError),
    ):
        nowhere.models.list()


def test_the_key_is_asked_for_and_too_many_are_turned_away(
    guarded_server: tuple[Any, str], wait_idle: Callable[..., None]
) -> None:
    server, key = guarded_server
    url = f"{server.url}/v1"
    for wrong in ("", "other", key + "x", key[:-1], "ключ"):
        with openai.OpenAI(base_url=url, api_key=wrong or "x", max_retries=0) as client:
            headers: Any = {"Authorization": openai.Omit()} if not wrong else None
            if wrong == "ключ":
                headers = {"Authorization": b"Bearer \xd0\xba"}
            with pytest.raises(openai.AuthenticationError) as caught:
                client.models.list(extra_headers=headers)
            assert caught.value.code == "invalid_api_key"
            assert key not in str(caught.value)
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=PATIENCE_S) as client:
        endless: Any = {**GREEDY, "max_tokens": 1900, "extra_body": {"ignore_eos": True}, "stream": True}
        streams = [client.chat.completions.create(messages=ASKED, **endless) for _ in range(2)]
        for stream in streams:
            next(iter(stream))
        with pytest.raises(openai.InternalServerError) as refused:
            client.chat.completions.create(messages=ASKED, **GREEDY)
        assert refused.value.status_code == 503
        assert refused.value.code == "overloaded"
        assert refused.value.response.headers["retry-after"]
        for stream in streams:
            stream.close()
        wait_idle(server, Authorization=f"Bearer {key}")
        warm = client.chat.completions.create(messages=ASKED, **GREEDY).usage
        assert warm is not None
        assert warm.prompt_tokens_details is not None
        assert warm.prompt_tokens_details.cached_tokens


def test_who_goes_away_takes_the_request_along(
    client: openai.OpenAI, shared_server: Any, wait_idle: Callable[..., None]
) -> None:
    words: Any = {**GREEDY, "max_tokens": 1900, "extra_body": {"ignore_eos": True}}
    with held(shared_server.url):
        with pytest.raises(openai.APITimeoutError):
            client.chat.completions.create(messages=ASKED, timeout=0.3, n=4, **words)
        wait_idle(shared_server)
    with client.chat.completions.create(messages=ASKED, stream=True, n=4, **words) as stream:
        for chunk, _ in zip(stream, range(9), strict=False):
            assert chunk.choices
    wait_idle(shared_server)
    late: Any = {**words, "extra_body": {"ignore_eos": True, "timeout_s": 0.05}}
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(messages=ASKED, **late)
    assert (caught.value.status_code, caught.value.code) == (504, "deadline_exceeded")
    wait_idle(shared_server)


# -- asynchronous --------------------------------------------------------------------------------------------


def test_the_asynchronous_client(
    shared_server: Any, client: openai.OpenAI, wait_idle: Any, wait_live: Any
) -> None:
    async def run() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{shared_server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
        ) as made:
            one, stream, vectors, models = await asyncio.gather(
                made.chat.completions.create(messages=ASKED, **GREEDY),
                made.chat.completions.create(messages=ASKED, stream=True, **GREEDY),
                made.embeddings.create(model="pocket", input=["a", "b"]),
                made.models.list(),
            )
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
            assert "".join(pieces) == one.choices[0].message.content
            assert len(vectors.data) == 2
            assert models.data[0].id == "pocket"
            many = await asyncio.gather(
                *(made.chat.completions.create(messages=ASKED, **GREEDY) for _ in range(16))
            )
            assert {done.choices[0].message.content for done in many} == {one.choices[0].message.content}
            endless: Any = {**GREEDY, "max_tokens": 1900, "extra_body": {"ignore_eos": True}}
            for under_way in (False, True):
                await asyncio.to_thread(hold, shared_server.url)
                try:
                    task = asyncio.create_task(made.chat.completions.create(messages=ASKED, **endless))
                    await asyncio.to_thread(wait_live, shared_server, 1)
                    if under_way:
                        await asyncio.to_thread(go_on, shared_server.url)
                    task.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await task
                    await asyncio.to_thread(wait_idle, shared_server)
                finally:
                    await asyncio.to_thread(go_on, shared_server.url)
            with pytest.raises(openai.BadRequestError):
                await made.chat.completions.create(messages=[], **GREEDY)

    asyncio.run(run())
    wait_idle(shared_server)
