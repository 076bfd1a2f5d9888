"""Fields that users of sglang and vLLM send: each does what it does there, or is refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from runtime.config.serving.server import ServerConfig
from runtime.processes.pipeline.launch import Pipeline
from runtime.server.app import build_app

TURNS = [{"role": "user", "content": "Which river runs through Ostrel?"}]
CHAT: tuple[str, dict[str, Any]] = ("/v1/chat/completions", {"messages": TURNS})
TEXT: tuple[str, dict[str, Any]] = ("/v1/completions", {"prompt": "Q: Who rules Hesper?\nA:"})
SAID: tuple[str, dict[str, Any]] = ("/v1/responses", {"input": "Which river runs through Ostrel?"})
BOTH = pytest.mark.parametrize(("path", "prompt"), [CHAT, TEXT], ids=["chat", "text"])
ALL = pytest.mark.parametrize(("path", "prompt"), [CHAT, TEXT, SAID], ids=["chat", "text", "responses"])
GREEDY = {"temperature": 0, "max_tokens": 12}


def post(client: httpx.Client, path: str, prompt: dict[str, Any], **fields: Any) -> Any:
    body = {**prompt, **GREEDY, **fields}
    if path == "/v1/responses":
        body["max_output_tokens"] = body.pop("max_tokens")
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(client: httpx.Client, path: str, prompt: dict[str, Any], **fields: Any) -> dict[str, Any]:
    answer = client.post(path, json={**prompt, **fields})
    assert answer.status_code == 400, answer.text
    return dict(answer.json()["error"])


def text_of(answer: dict[str, Any]) -> str:
    if "output" in answer:
        return str(answer["output"][-1]["content"][0]["text"])
    [choice] = answer["choices"]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def chunks_of(client: httpx.Client, path: str, prompt: dict[str, Any], **fields: Any) -> list[Any]:
    with client.stream("POST", path, json={**prompt, **GREEDY, **fields, "stream": True}) as response:
        lines = [line for line in response.iter_lines() if line]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def ids_of(client: httpx.Client, text: str) -> list[int]:
    body = {"prompt": text, "add_special_tokens": False}
    return list(client.post("/tokenize", json=body).json()["tokens"])


@BOTH
def test_token_ids(client: httpx.Client, path: str, prompt: dict[str, Any]) -> None:
    whole = post(client, path, prompt, return_token_ids=True)
    plain = post(client, path, prompt)
    assert text_of(whole) == text_of(plain)
    [choice] = whole["choices"]
    native = prompt if "messages" in prompt else {"text": prompt["prompt"]}
    params = {"max_new_tokens": 12, "temperature": 0}
    said = client.post("/generate", json={**native, "sampling_params": params}).json()
    assert choice["token_ids"] == said["output_ids"]
    asked = client.post("/tokenize", json=prompt).json()["tokens"]
    assert (whole if "messages" in prompt else choice)["prompt_token_ids"] == asked
    chunks = chunks_of(client, path, prompt, return_token_ids=True)
    streamed = [token for chunk in chunks for one in chunk["choices"] for token in one["token_ids"]]
    assert streamed == said["output_ids"]
    first = chunks[0] if "messages" in prompt else chunks[0]["choices"][0]
    assert first["prompt_token_ids"] == asked
    assert "token_ids" not in json.dumps([plain, *chunks_of(client, path, prompt)])


@BOTH
@pytest.mark.parametrize("top", [0, 3])
def test_prompt_logprobs(client: httpx.Client, path: str, prompt: dict[str, Any], top: int) -> None:
    native = {"input_ids": client.post("/tokenize", json=prompt).json()["tokens"]}
    words = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": top,
             "sampling_params": {"max_new_tokens": 1}}  # fmt: skip
    meta = client.post("/generate", json={**native, **words}).json()["meta_info"]
    wanted = {"logprobs": 1} if path == TEXT[0] else {"logprobs": True, "top_logprobs": 1}
    answer = post(client, path, prompt, prompt_logprobs=top, **wanted)
    [choice] = answer["choices"]
    told = (answer if "messages" in prompt else choice)["prompt_logprobs"]
    assert told[0] is None
    for found, (logprob, token, _) in zip(told[1:], meta["input_token_logprobs"][1:], strict=True):
        assert found[str(token)]["logprob"] == pytest.approx(logprob, abs=1e-4)
        assert len(found) in (max(top, 1), top + 1)
        assert sorted(one["rank"] for one in found.values() if one["rank"]) == list(range(1, top + 1))
    tops = choice["logprobs"]["content"] if "messages" in prompt else choice["logprobs"]["top_logprobs"]
    assert all(len(one["top_logprobs"] if "messages" in prompt else one) == 1 for one in tops)
    for wrong in ({"prompt_logprobs": 1, "stream": True}, {"prompt_logprobs": -2}, {"prompt_logprobs": 999}):
        assert refused(client, path, prompt, **wrong)["param"] == "prompt_logprobs"


@ALL
def test_words_that_must_and_must_not_come(client: httpx.Client, path: str, prompt: dict[str, Any]) -> None:
    usual = text_of(post(client, path, prompt))
    word = "Queen" if path == TEXT[0] else "Sarn"
    assert word in usual
    without = text_of(post(client, path, prompt, bad_words=[word]))
    assert word not in without
    assert without
    ids = ids_of(client, " yes")
    only = text_of(post(client, path, prompt, allowed_token_ids=ids, max_tokens=3, ignore_eos=True))
    assert only
    assert set(ids_of(client, only)) <= set(ids)
    both = post(client, path, prompt, allowed_token_ids=[*ids, *ids_of(client, " no")], bad_words=["yes"],
                max_tokens=3)  # fmt: skip
    assert "yes" not in text_of(both)
    assert refused(client, path, prompt, allowed_token_ids=[10**8])["param"] == "allowed_token_ids"
    own = {"custom_logit_processor": "bad_words", "custom_params": {"banned_token_ids": ids}}
    assert refused(client, path, prompt, bad_words=["x"], **own)["param"] == "bad_words"


@ALL
def test_stops_penalties_and_names(client: httpx.Client, path: str, prompt: dict[str, Any]) -> None:
    word = "Queen" if path == TEXT[0] else "Sarn"
    usual = text_of(post(client, path, prompt))
    cut = text_of(post(client, path, prompt, stop=[word]))
    assert cut == usual[: usual.index(word)]
    kept = text_of(post(client, path, prompt, stop=word, include_stop_str_in_output=True))
    assert kept == cut + word
    [first] = ids_of(client, " the")[:1]
    pushed = text_of(post(client, path, prompt, logit_bias={str(first): 100}, max_tokens=2))
    assert pushed == client.post("/detokenize", json={"tokens": [first] * 2}).json()["text"]
    pushed_much = {"logit_bias": {str(first): 20}, "ignore_eos": True}
    same = text_of(post(client, path, prompt, **pushed_much))
    for penalty in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        assert refused(client, path, prompt, **{penalty: 9})["param"] == penalty
    some = {"presence_penalty": 2.0, "frequency_penalty": 2.0, "repetition_penalty": 2.0}
    assert text_of(post(client, path, prompt, **pushed_much, **some)) != same
    named = post(client, path, prompt, request_id="mine", cache_salt="s", priority=1, extra_key="k")
    assert path == SAID[0] or named["id"].endswith("-mine")
    wrong = refused(client, path, prompt, request_id="one", rid="two")
    assert wrong["param"] == "request_id"
    assert refused(client, path, prompt, stop=[""])["param"] == "stop"


@ALL
def test_a_salt_keeps_caches_apart(
    pipeline: Pipeline, serving: Any, path: str, prompt: dict[str, Any]
) -> None:
    config = ServerConfig(served_model_name="pocket", enable_cache_report=True)
    with (
        serving(build_app(pipeline.manager, config), config) as made,
        httpx.Client(base_url=made.url, timeout=300) as client,
    ):

        def cached(**fields: Any) -> int:
            usage = post(client, path, prompt, **fields)["usage"]
            details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
            return int(details["cached_tokens"])

        assert cached(cache_salt=f"one {path}") == 0
        assert cached(cache_salt=f"one {path}") > 0
        assert cached(cache_salt=f"two {path}") == 0


@ALL
def test_long_prompts_are_cut_where_that_is_asked_for(
    client: httpx.Client, path: str, prompt: dict[str, Any]
) -> None:
    name = "input_tokens" if path == SAID[0] else "prompt_tokens"
    assert post(client, path, prompt, truncate_prompt_tokens=5)["usage"][name] == 5
    assert refused(client, path, prompt, truncate_prompt_tokens=0)["param"] == "truncate_prompt_tokens"
    assert refused(client, path, prompt, truncate_prompt_tokens=10**7)["param"] == "truncate_prompt_tokens"
    if path != TEXT[0]:
        return
    length = client.get("/model_info").json()["max_model_len"]
    long = {"prompt": "so " * (2 * length)}
    assert "context length" in refused(client, path, long)["message"]
    usage = post(client, path, long, truncate_prompt_tokens=-1)["usage"]
    assert usage["prompt_tokens"] == length - 12
    ids = ids_of(client, "one two three four")
    for side, kept in (("left", ids[-2:]), ("right", ids[:2])):
        told = post(client, path, {"prompt": ids}, truncate_prompt_tokens=2, truncation_side=side,
                    return_token_ids=True)  # fmt: skip
        assert told["choices"][0]["prompt_token_ids"] == kept


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}},
          "required": ["a"], "additionalProperties": False}  # fmt: skip


@ALL
@pytest.mark.parametrize(
    ("fields", "right"),
    [
        ({"guided_json": SCHEMA, "guided_decoding_backend": "xgrammar"}, r'\{\s*"a"\s*:\s*[0-9]\s*\}'),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": ""}, r'\{"a":[0-9]\}'),
        ({"guided_regex": "[x-z]{3}"}, "[x-z]{3}"),
        ({"guided_choice": ["north", "south"]}, "north|south"),
        ({"guided_grammar": 'root ::= "a" [0-9] "b"'}, "a[0-9]b"),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True, "disable_fallback": True}},
         r'\{"a":[0-9]\}'),
        ({"structured_outputs": {"regex": "[x-z]{3}", "disable_any_whitespace": False}}, "[x-z]{3}"),
        ({"structured_outputs": {"choice": ["north", "south"]}}, "north|south"),
    ],
)  # fmt: skip
def test_constraints_in_vllms_words(
    client: httpx.Client, path: str, prompt: dict[str, Any], fields: dict[str, Any], right: str
) -> None:
    assert re.fullmatch(right, text_of(post(client, path, prompt, max_tokens=40, **fields)))


@pytest.mark.parametrize("kind", ["json_object", "json"])
def test_formats_in_the_words_of_hugging_faces_clients(client: httpx.Client, kind: str) -> None:
    said = text_of(post(client, *CHAT, response_format={"type": kind, "value": SCHEMA}, max_tokens=40))
    assert re.fullmatch(r'\{\s*"a"\s*:\s*[0-9]\s*\}', said)
    said = text_of(post(client, *TEXT, response_format={"type": "regex", "value": "[x-z]{3}"}))
    assert re.fullmatch("[x-z]{3}", said)
    for form, param in (
        ({"type": "regex"}, "response_format.value"),
        ({"type": "text", "value": SCHEMA}, "response_format.value"),
        ({"type": kind, "value": {"type": "nothing"}}, "response_format.value"),
    ):
        assert refused(client, *CHAT, response_format=form)["param"].startswith(param)


def test_what_contradicts_itself_is_refused(client: httpx.Client) -> None:
    for fields, name in (
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": "x+"}, "guided_whitespace_pattern"),
        ({"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True}},
         "structured_outputs.disable_additional_properties"),
        ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?", "disable_any_whitespace": True}},
         "structured_outputs.whitespace_pattern"),
        ({"thinking_token_budget": 3, "max_thinking_tokens": 4}, "thinking_token_budget"),
    ):  # fmt: skip
        assert refused(client, *CHAT, **fields)["param"] == name, fields
    assert text_of(post(client, *CHAT, structured_outputs={}))
    both = {**SAID[1], "text": {"format": {"type": "json_object"}}}
    assert refused(client, SAID[0], both, guided_regex="a")["param"] == "text.format"
    told = client.post(CHAT[0], json={**CHAT[1], "max_tokens": 1, "guided_decoding_backend": "outlines"})
    assert "guided_decoding_backend has no effect" in told.headers["warning"]


@pytest.mark.parametrize(("path", "prompt"), [CHAT, SAID], ids=["chat", "responses"])
def test_thoughts_can_be_left_out(client: httpx.Client, path: str, prompt: dict[str, Any]) -> None:
    budget = {"require_reasoning": True, "max_thinking_tokens": 3, "max_tokens": 16}
    shown = post(client, path, prompt, **budget)
    hidden = post(client, path, prompt, include_reasoning=False, **budget)
    other = post(client, path, prompt, require_reasoning=True, thinking_token_budget=3, max_tokens=16)
    if path == CHAT[0]:
        message = shown["choices"][0]["message"]
        assert message["reasoning_content"]
        assert other["choices"][0]["message"] == message
        assert hidden["choices"][0]["message"] == {**message, "reasoning_content": None}
        chunks = chunks_of(client, path, prompt, include_reasoning=False, **budget)
        assert "reasoning_content" not in json.dumps(chunks)
        texts = [one["delta"].get("content") or "" for chunk in chunks for one in chunk["choices"]]
        assert "".join(texts) == message["content"]
    else:
        assert [one["type"] for one in shown["output"]] == ["reasoning", "message"]
        assert [one["type"] for one in hidden["output"]] == ["message"]
        assert text_of(hidden) == text_of(shown) == text_of(other)
        body = {**prompt, "temperature": 0, "max_output_tokens": 16, "max_thinking_tokens": 3,
                "require_reasoning": True,
                "include_reasoning": False, "stream": True}  # fmt: skip
        with client.stream("POST", path, json=body) as response:
            assert not any("reasoning_text" in line for line in response.iter_lines())


def test_defaults_of_other_servers_are_taken(client: httpx.Client) -> None:
    sglang = {"return_routed_experts": False, "separate_reasoning": True, "stream_reasoning": True,
              "return_flat_raw_top_logprobs_b64": True, "routed_experts_start_len": 0, "n": None,
              "top_logprobs": 0, "logprobs": False, "stream": None, "stream_options": None}  # fmt: skip
    vllm = {"length_penalty": 1.0, "use_beam_search": False, "top_k": 0, "mm_payload": "tensors",
            "vllm_xargs": None, "bad_words": [], "allowed_token_ids": [], "add_special_tokens": False,
            "documents": [], "chat_template": None, "include_reasoning": True, "truncate_prompt_tokens": None,
            "structured_outputs": None}  # fmt: skip
    plain = post(client, *CHAT)
    assert post(client, *CHAT, model="dummy")["model"] == "pocket"  # Hugging Face's client, without a model
    assert text_of(post(client, *CHAT, **sglang, **vllm)) == text_of(plain)
    for name, value in (("length_penalty", 0.5), ("use_beam_search", True), ("chat_template", "x")):
        assert name in refused(client, *CHAT, **{name: value})["message"]
    params = {"max_new_tokens": 2, "top_k": 0, "beam_width": None, "stop_str_max_len": 0, "watermark": {}}
    assert client.post("/generate", json={"text": "a", "sampling_params": params}).status_code == 200


@pytest.fixture
def lenient(pipeline: Pipeline, serving: Callable[..., Any]) -> Iterator[httpx.Client]:
    config = ServerConfig(unknown_fields="ignore", served_model_name="pocket, second,*")
    with (
        serving(build_app(pipeline.manager, config), config) as made,
        httpx.Client(base_url=made.url, timeout=300) as client,
    ):
        yield client


def test_unknown_fields_are_ignored_with_a_warning(lenient: httpx.Client) -> None:
    body = {**CHAT[1], "max_tokens": 2, "use_beam_search": True, 'od"d\n': 1, "top_p": 1}
    answer = lenient.post(CHAT[0], json=body)
    assert answer.status_code == 200
    assert answer.headers["warning"] == '299 sglang-dsl "unknown fields ignored: use_beam_search, od?d?"'
    with lenient.stream("POST", CHAT[0], json={**body, "stream": True}) as response:
        assert "use_beam_search" in response.headers["warning"]
    nested = {"text": "a", "sampling_params": {"max_new_tokens": 1, "beam_width": 3}}
    told = lenient.post("/generate", json=nested)
    assert told.status_code == 200
    assert "sampling_params.beam_width" in told.headers["warning"]
    assert "warning" not in lenient.post(CHAT[0], json={**CHAT[1], "max_tokens": 2}).headers
    wrong = lenient.post(CHAT[0], json={**CHAT[1], "temperature": "hot"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "temperature")


def test_a_model_may_have_several_names_or_any(lenient: httpx.Client) -> None:
    listed = [one["id"] for one in lenient.get("/v1/models").json()["data"]]
    assert listed == ["pocket", "second"]
    for name in ("second", "gpt-4o"):
        answer = lenient.post(CHAT[0], json={**CHAT[1], "max_tokens": 1, "model": name})
        assert answer.json()["model"] == "pocket"
        assert lenient.get(f"/v1/models/{name}").json()["id"] == name
