"""Random requests to a server, right and wrong ones, with what tells a whole answer from a broken one.

It knows the wire formats only as far as it must for that, and nothing of how requests are sent.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import random
import re
from collections.abc import Callable
from typing import Any, TypeAlias

LEAVE, INVALID = 0.10, 0.05

WORDS = [
    "river",
    "stone",
    "길",
    "harbour",
    "🙂",
    "lamp",
    "winter,",
    "copper",
    "서울",
    "quiet",
    "garden",
    "seven:",
    "orange",
    "—",
    "map\n",
]
SHARED = [f"Example {n}: " + " ".join(random.Random(n).choices(WORDS, k=60)) + "\n\n" for n in range(8)]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["a", "b", "longer name"]}, "count": {"type": "integer"}},
    "required": ["name", "count"],
    "additionalProperties": False,
}

Tokens: TypeAlias = tuple[int, int]
"""Of prompts and generated, each sample's prompt by itself."""


@dataclasses.dataclass
class Case:
    """A request. items: how many it is behind the frontend. check: raises AssertionError unless what came
    (JSON, or a stream's events) is whole and is its own answer. leaves: the client goes midway."""

    name: str
    path: str
    body: Any
    items: int = 1
    check: Callable[[Any], Tokens] = lambda found: (0, 0)
    stream: bool = False
    leaves: bool = False
    method: str = "POST"
    status: int = 200
    says: str = ""
    headers: dict[str, str] = dataclasses.field(default_factory=lambda: {"content-type": "application/json"})


class Draw:
    """Random requests, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.count = 0

    def case(self) -> Case:
        self.count += 1
        dice = self.random.random()
        if dice < INVALID:
            return self.random.choice(REFUSED)
        if dice < INVALID + LEAVE:
            case = self.random.choice([native, native, completion, chat])(self, self.length(500, 700))
            case.leaves = True
            return case
        return self.random.choice(KINDS)(self, self.length(1, 24))

    def length(self, least: int, most: int) -> int:
        return self.random.randint(least, most)

    def text(self) -> str:
        own = " ".join(self.random.choices(WORDS, k=self.random.randint(1, 25)))
        return self.random.choice([*SHARED, "", ""]) + f"{self.random.randint(0, 999)} {own}"

    def flip(self, chance: float = 0.5) -> bool:
        return self.random.random() < chance


# -- kinds of requests --------------------------------------------------------------------------------------


def native(draw: Draw, length: int) -> Case:
    """/generate: one prompt or several, samples, streams of either form."""
    stream, prompts, samples = draw.flip(), draw.random.choice([1, 1, 1, 3]), draw.random.choice([1, 1, 2])
    texts = [draw.text() for _ in range(prompts)]
    params = {"max_new_tokens": length, "ignore_eos": True, "n": samples, "temperature": draw.random.random()}
    body: dict[str, Any] = {"text": texts if prompts > 1 else texts[0], "sampling_params": params}
    if draw.flip(0.3):
        body |= {"return_logprob": True, "top_logprobs_num": 2}
    if stream:
        body |= {"stream": True, "incremental_streaming_output": draw.flip()}
    items = prompts * samples
    if items == 1:
        body["rid"] = f"soak-{draw.count}"

    def check(found: Any) -> Tokens:
        if not stream:
            answers = found if items > 1 else [found]
        else:
            last: dict[int, Any] = {}
            done = found.pop()
            assert done == "[DONE]"
            for event in map(json.loads, found):
                index = event.get("index", 0)
                assert not ended(last.get(index)), "news after the end"
                last[index] = event
            assert sorted(last) == list(range(items))
            answers = list(last.values())
        assert len(answers) == items
        for answer in answers:
            meta = answer["meta_info"]
            assert ended(answer), answer
            assert meta["completion_tokens"] == length
            assert items > 1 or meta["id"] == body["rid"]
            assert "return_logprob" not in body or meta["output_token_logprobs"]
        return (
            sum(answer["meta_info"]["prompt_tokens"] for answer in answers),
            sum(answer["meta_info"]["completion_tokens"] for answer in answers),
        )

    return Case("native", "/generate", body, items, check, stream)


def ended(answer: Any) -> bool:
    return answer is not None and answer["meta_info"]["finish_reason"] is not None


def constrained(draw: Draw, length: int) -> Case:
    """/generate with a constraint that it must keep. Sets of patterns large enough that caches have work."""
    pattern = rf"({draw.random.choice('abcdefgh')}|[0-9]{{{draw.length(1, 9)}}}),(yes|no)"
    params = {"max_new_tokens": 40, "regex": pattern, "temperature": 1.0, "seed": draw.count}

    def check(found: Any) -> Tokens:
        assert re.fullmatch(pattern, found["text"]), found
        return found["meta_info"]["prompt_tokens"], found["meta_info"]["completion_tokens"]

    return Case("regex", "/generate", {"text": draw.text(), "sampling_params": params}, 1, check)


def choices(draw: Draw, length: int) -> Case:
    options = [" yes", " no", " perhaps", " 아니요"][: draw.length(2, 4)]

    def check(found: Any) -> Tokens:
        assert [one["text"] for one in found["choices"]] == options
        assert all(one["logprobs"] for one in found["choices"])
        return found["meta_info"]["prompt_tokens"], found["meta_info"]["completion_tokens"]

    return Case("choices", "/generate", {"text": draw.text(), "choices": options}, 1, check)


def completion(draw: Draw, length: int) -> Case:
    stream, prompts, samples = draw.flip(), draw.random.choice([1, 1, 2]), draw.random.choice([1, 1, 2])
    texts = [draw.text() for _ in range(prompts)]
    body: dict[str, Any] = {"model": "pocket", "prompt": texts if prompts > 1 else texts[0], "n": samples}
    body |= {"max_tokens": length, "ignore_eos": True, "stop": None}
    if length < 100 and draw.flip():  # those who leave must find it going on
        body["stop"] = ["\n\n\n\n\n\n"]
    return openai("completions", "/v1/completions", body, prompts * samples, samples, length, stream)


def chat(draw: Draw, length: int) -> Case:
    stream, samples = draw.flip(), draw.random.choice([1, 1, 1, 2])
    said = [{"role": "system", "content": draw.random.choice(SHARED)}] if draw.flip() else []
    said.append({"role": "user", "content": draw.text()})
    body: dict[str, Any] = {"model": "pocket", "messages": said, "n": samples, "temperature": 0.7}
    body |= {"max_completion_tokens": length, "ignore_eos": True}
    if draw.flip(0.2):
        body |= {"logprobs": True, "top_logprobs": 2}
    return openai("chat", "/v1/chat/completions", body, samples, samples, length, stream)


def openai(
    name: str, path: str, body: dict[str, Any], items: int, samples: int, length: int, stream: bool
) -> Case:
    """Completions and chat completions look the same from afar."""
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}

    def check(found: Any) -> Tokens:
        if not stream:
            assert sorted(choice["index"] for choice in found["choices"]) == list(range(items))
            assert all(choice["finish_reason"] for choice in found["choices"])
            usage = found["usage"]
        else:
            assert found.pop() == "[DONE]"
            events = [json.loads(event) for event in found]
            ends = collections.Counter[int]()
            for event in events:
                for choice in event["choices"]:
                    assert not ends[choice["index"]], "news after the end"
                    ends[choice["index"]] += choice["finish_reason"] is not None
            assert dict(ends) == dict.fromkeys(range(items), 1)
            usage = events[-1]["usage"]
        assert usage["completion_tokens"] <= items * length
        return usage["prompt_tokens"] * samples, usage["completion_tokens"]

    return Case(name, path, body, items, check, stream)


def structured(draw: Draw, length: int) -> Case:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    said = [{"role": "user", "content": draw.text()}]
    body = {"messages": said, "response_format": form, "max_tokens": 60, "temperature": 1}

    def check(found: Any) -> Tokens:
        choice = found["choices"][0]
        if choice["finish_reason"] == "stop":
            assert set(json.loads(choice["message"]["content"])) == {"name", "count"}
        return found["usage"]["prompt_tokens"], found["usage"]["completion_tokens"]

    return Case("json schema", "/v1/chat/completions", body, 1, check)


def anthropic(draw: Draw, length: int) -> Case:
    stream = draw.flip()
    said = [{"role": "user", "content": draw.text()}]
    body = {"model": "pocket", "messages": said, "max_tokens": length, "stream": stream}

    def check(found: Any) -> Tokens:
        if not stream:
            assert found["stop_reason"] in ("max_tokens", "end_turn"), found
            return found["usage"]["input_tokens"], found["usage"]["output_tokens"]
        events = [json.loads(event) for event in found]
        kinds = [event["type"] for event in events]
        assert kinds[0] == "message_start"
        assert kinds[-2:] == ["message_delta", "message_stop"]
        assert kinds.count("message_stop") == kinds.count("message_delta") == 1
        return events[0]["message"]["usage"]["input_tokens"], events[-2]["usage"]["output_tokens"]

    return Case("anthropic", "/v1/messages", body, 1, check, stream)


def responses(draw: Draw, length: int) -> Case:
    stream = draw.flip()
    body = {"input": draw.text(), "max_output_tokens": max(16, length), "stream": stream}

    def check(found: Any) -> Tokens:
        if stream:
            events = [json.loads(event) for event in found if event != "[DONE]"]
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            found = events[-1]["response"]
        assert found["status"] in ("completed", "incomplete")
        return found["usage"]["input_tokens"], found["usage"]["output_tokens"]

    return Case("responses", "/v1/responses", body, 1, check, stream)


def vectors(draw: Draw, length: int) -> Case:
    texts = [draw.text() for _ in range(draw.random.choice([1, 1, 4]))]
    form = draw.random.choice(["float", "base64"])

    def check(found: Any) -> Tokens:
        assert [one["index"] for one in found["data"]] == list(range(len(texts)))
        assert all(one["embedding"] for one in found["data"])
        return found["usage"]["prompt_tokens"], 0

    body = {"model": "pocket", "input": texts, "encoding_format": form}
    return Case("embeddings", "/v1/embeddings", body, len(texts), check)


def encoded(draw: Draw, length: int) -> Case:
    def check(found: Any) -> Tokens:
        assert abs(sum(value * value for value in found["embedding"]) - 1) < 1e-3
        return found["meta_info"]["prompt_tokens"], 0

    return Case("encode", "/encode", {"text": draw.text()}, 1, check)


def tokenized(draw: Draw, length: int) -> Case:
    def check(found: Any) -> Tokens:
        assert len(found["tokens"]) == found["count"] > 0
        return 0, 0

    return Case("tokenize", "/tokenize", {"prompt": draw.text()}, 0, check)


KINDS = (
    native, native, native, constrained, choices, completion, completion, chat, chat, chat, structured,
    anthropic, anthropic, responses, vectors, encoded, tokenized,
)  # fmt: skip


def refused(name: str, path: str, body: Any, status: int, says: str, **more: Any) -> Case:
    return Case(f"refused: {name}", path, body, 0, status=status, says=says, **more)


_SAID = [{"role": "user", "content": "x"}]
REFUSED = (
    refused("temperature", "/generate", {"text": "x", "sampling_params": {"temperature": -1}}, 400, "temp"),
    refused("field", "/generate", {"text": "x", "samplng_params": {"n": 2}}, 400, "sampling_params"),
    refused("type", "/generate", {"text": "x", "sampling_params": {"n": "many"}}, 400, "n"),
    refused("no prompt", "/generate", {"sampling_params": {}}, 400, "text"),
    refused("two prompts", "/generate", {"text": "x", "input_ids": [1]}, 400, "input_ids"),
    refused("token id", "/generate", {"input_ids": [10**9]}, 400, "input_ids"),
    refused("too long", "/generate", {"text": "word " * 9000}, 400, "2048"),
    refused("regex", "/generate", {"text": "x", "sampling_params": {"regex": "(["}}, 400, "regex"),
    refused("stream", "/generate", {"text": "x", "stream": True, "sampling_params": {"top_p": 3}}, 400, "to"),
    refused("json", "/generate", b'{"text": "x"', 400, "JSON"),
    refused("json of other kind", "/generate", b"[1]", 400, "object"),
    refused("form", "/generate", b"text=x", 415, "content type", headers={}),
    refused("path", "/generates", {}, 404, "path"),
    refused("method", "/generate", {}, 405, "method", method="DELETE"),
    refused("model", "/v1/chat/completions", {"model": "gpt", "messages": _SAID}, 404, "gpt"),
    refused("role", "/v1/chat/completions", {"messages": [{"role": "x", "content": "y"}]}, 400, "role"),
    refused("n", "/v1/completions", {"prompt": "x", "n": 0}, 400, "n"),
    refused("schema", "/v1/chat/completions", {"messages": _SAID, "response_format": {
        "type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}}, 400, "type"),
    refused("max_tokens", "/v1/messages", {"model": "pocket", "messages": _SAID}, 400, "max_tokens"),
    refused("no messages", "/v1/messages", {"model": "pocket", "max_tokens": 3}, 400, "messages"),
    refused("embedding", "/v1/embeddings", {"input": ""}, 400, "input"),
    refused("session", "/close_session", {"session_id": "none such"}, 400, "session"),
)  # fmt: skip
