"""Reasoning before a constraint, constraints compiled ahead, what is told of them: over real processes."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest

import sglang_dsl as sgl
from sglang_dsl.backends.endpoint import RuntimeEndpoint
from tests.process.patience import PATIENCE_S, metrics, until

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}},
    "required": ["a"],
    "additionalProperties": False,
}
CHAT: dict[str, Any] = {
    "model": "default",
    "messages": [{"role": "user", "content": "Hi"}],
    "temperature": 0,
    "max_tokens": 60,
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
}


@pytest.fixture(scope="module")
def client(shared_server: Any) -> Any:
    with httpx.Client(base_url=shared_server.url, timeout=PATIENCE_S) as made:
        yield made


def chat(client: httpx.Client, **fields: Any) -> httpx.Response:
    return client.post("/v1/chat/completions", json={**CHAT, **fields})


def chunks(response: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_the_reply_holds_the_answer_alone(client: httpx.Client) -> None:
    message = chat(client, require_reasoning=True, max_thinking_tokens=6).json()["choices"][0]["message"]
    assert json.loads(message["content"])["a"] in ("x", "y")
    assert message["reasoning_content"]
    plain = chat(client).json()["choices"][0]["message"]
    assert json.loads(plain["content"])["a"] in ("x", "y")
    assert plain["reasoning_content"] is None


def test_streamed_it_is_the_same_in_pieces(client: httpx.Client) -> None:
    fields = {"require_reasoning": True, "max_thinking_tokens": 6}
    whole = chat(client, **fields).json()["choices"][0]["message"]
    with client.stream("POST", "/v1/chat/completions", json={**CHAT, **fields, "stream": True}) as response:
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks(response)]
    for name in ("content", "reasoning_content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == whole[name]
    first = next(at for at, delta in enumerate(deltas) if delta.get("content"))
    assert not any(delta.get("reasoning_content") for delta in deltas[first:])


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"max_thinking_tokens": -1}, "max_thinking_tokens"),
        ({"require_reasoning": False, "max_thinking_tokens": 3}, "max_thinking_tokens"),
        ({"require_reasoning": "yes"}, "require_reasoning"),
        (
            {"require_reasoning": True, "chat_template_kwargs": {"enable_thinking": False}},
            "require_reasoning",
        ),
    ],
)
def test_nonsense_is_a_400_that_names_it(client: httpx.Client, fields: dict[str, Any], where: str) -> None:
    answer = chat(client, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == where


def test_native_gives_the_whole_text_and_where_the_answer_starts(client: httpx.Client) -> None:
    body = {
        "text": "Hi<think>", "require_reasoning": None, "max_thinking_tokens": 4,
        "sampling_params": {"temperature": 0, "max_new_tokens": 40, "regex": "(yes|no)"},
    }  # fmt: skip
    for special in (True, False):
        body["sampling_params"]["skip_special_tokens"] = special
        made = client.post("/generate", json=body).json()
        assert made["text"][made["meta_info"]["answer_start"] :] in ("yes", "no")
        assert made["meta_info"]["grammar"]["backend"] == "outlines"
        assert made["meta_info"]["finish_reason"] == {"type": "stop"}
    body["sampling_params"]["max_new_tokens"] = 2
    made = client.post("/generate", json=body).json()
    assert made["meta_info"]["finish_reason"]["unfinished"] == "reasoning"
    assert made["meta_info"]["answer_start"] is None


def test_responses_have_an_item_of_reasoning(client: httpx.Client) -> None:
    body = {
        "model": "default", "input": "Hi", "temperature": 0, "max_output_tokens": 60,
        "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
    }  # fmt: skip
    made = client.post("/v1/responses", json=body).json()
    assert [item["type"] for item in made["output"]] == ["message"], "the template does not open any"
    assert json.loads(made["output"][0]["content"][0]["text"])["a"] in ("x", "y")


def test_constraints_are_compiled_ahead(client: httpx.Client) -> None:
    spec = f"[ab]{{3}}{time.time_ns()}"
    asked = [
        {"kind": "regex", "spec": spec},
        {"kind": "regex", "spec": "("},
        {"kind": "json_schema", "spec": "{"},
    ]
    told = client.post("/precompile", json={"constraints": asked}).json()["constraints"]
    assert [one["ok"] for one in told] == [True, False, False]
    assert (told[0]["backend"], told[0]["exact"], told[0]["cached"]) == ("outlines", True, False)
    assert "position 0" in told[1]["error"]["message"]
    params = {"max_new_tokens": 40, "regex": spec}
    made = client.post("/generate", json={"text": "a", "sampling_params": params}).json()
    assert made["meta_info"]["grammar"]["cached"]
    many = [{"kind": "regex", "spec": "a"}] * 1025
    assert client.post("/precompile", json={"constraints": many}).status_code == 400
    assert client.post("/precompile", json={"constraints": asked, "timeout": 0}).status_code == 400


def test_a_huge_schema_is_refused_before_it_is_read(client: httpx.Client) -> None:
    params = {"max_new_tokens": 4, "json_schema": " " * 2_000_000}
    answer = client.post("/generate", json={"text": "a", "sampling_params": params})
    assert answer.status_code == 400
    assert "2000000 bytes" in answer.json()["error"]["message"]


def test_metrics_tell_of_grammars(client: httpx.Client) -> None:
    client.post("/generate", json={"text": "a", "sampling_params": {"max_new_tokens": 4, "regex": "[ab]{2}"}})
    client.post("/generate", json={"text": "a", "sampling_params": {"max_new_tokens": 4, "regex": "("}})
    lines = metrics(str(client.base_url).rstrip("/")).splitlines()

    def value(begin: str, holds: str = "") -> float:
        found = [line for line in lines if line.startswith(f"sglang_dsl:{begin}") and holds in line]
        assert found, begin
        return float(found[0].rpartition(" ")[2])

    for name in ("num_grammar_cache_miss_total", "num_grammar_kept", "grammar_kept_bytes"):
        assert value(name) > 0
    for name in ("num_grammar_timeout_total", "num_grammar_stuck", "num_grammar_compiling"):
        assert value(name) >= 0  # others ask this server, too
    assert value("num_grammar_refused_total", 'code="bad_constraint",kind="regex"') >= 1
    assert value("grammar_compile_seconds_count") >= value("grammar_compile_seconds_bucket", 'le="0.001"')
    assert value("grammar_mask_seconds_count") > 0


def test_a_traced_program_tells_its_constraints_ahead(shared_server: Any) -> None:
    pattern = f"[cd]{{2}}{time.time_ns()}"

    @sgl.function
    def program(s: Any, q: str) -> None:
        s += "Q: " + q + sgl.gen("x", regex=pattern, max_tokens=40)

    def counters() -> Any:
        told = httpx.get(f"{shared_server.url}/server_info", timeout=PATIENCE_S).json()
        told = told["internal_states"][0]
        return told["num_grammar_cache_miss_total"], told["num_grammar_compiling"]

    until(lambda: counters()[1] == 0, counters)  # nothing of an earlier test is under way
    before, _ = counters()
    backend = RuntimeEndpoint(shared_server.url)
    program.trace(backend=backend)
    until(lambda: counters() == (before + 1, 0), counters)
    state = program.run(q="?", backend=backend)
    assert state.get_meta_info("x")["grammar"]["cached"]


OPENS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n"
    "{% if enable_thinking is defined and not enable_thinking %}\n</think>\n\n{% endif %}{% endif %}"
)
"""A template that opens the reasoning of every reply, unless it is switched off."""


def test_a_template_that_opens_the_reasoning_says_it(start_server: Any, tmp_path: Any) -> None:
    (tmp_path / "opens.jinja").write_text(OPENS)
    server = start_server(
        "--chat-template", str(tmp_path / "opens.jinja"), "--log-level", "warning"
    ).wait_ready()
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:

        def message(**fields: Any) -> Any:
            return chat(client, **fields).json()["choices"][0]["message"]

        said = message()
        assert json.loads(said["content"])["a"] in ("x", "y")
        assert said["reasoning_content"]
        for fields in ({"chat_template_kwargs": {"enable_thinking": False}}, {"require_reasoning": False}):
            said = message(**fields)
            assert json.loads(said["content"])["a"] in ("x", "y")
            assert said["reasoning_content"] is None
        assert message(response_format=None)["reasoning_content"] is None, "nobody asked"
        form = {"type": "json_schema", "name": "x", "schema": SCHEMA}
        body = {"model": "default", "input": "Hi", "temperature": 0, "max_output_tokens": 40,
                "text": {"format": form}}  # fmt: skip
        whole = client.post("/v1/responses", json=body).json()["output"]
        assert [item["type"] for item in whole] == ["reasoning", "message"]
        assert json.loads(whole[1]["content"][0]["text"])["a"] in ("x", "y")
        with client.stream("POST", "/v1/responses", json={**body, "stream": True}) as response:
            events = chunks(response)
        for kind, item in (("reasoning_text", whole[0]), ("output_text", whole[1])):
            pieces = [one["delta"] for one in events if one["type"] == f"response.{kind}.delta"]
            assert "".join(pieces) == item["content"][0]["text"]
        assert [item["type"] for item in events[-1]["response"]["output"]] == ["reasoning", "message"]


def test_programs_ask_for_reasoning_first(shared_server: Any) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "Q: " + sgl.gen(
            "x", regex="(yes|no)", max_tokens=40, require_reasoning=True, max_thinking_tokens=3
        )
        s += "\n" + sgl.gen("n", int, max_tokens=40, require_reasoning=True, max_thinking_tokens=2)

    state = program.run(backend=RuntimeEndpoint(shared_server.url))
    start = state.get_meta_info("x")["answer_start"]
    assert start > 0
    assert state["x"][start:] in ("yes", "no")
    assert isinstance(state["n"], int)
    for words in ({"require_reasoning": 1}, {"max_thinking_tokens": -1}, {"max_thinking_tokens": "few"}):
        with pytest.raises(sgl.errors.BadProgram):
            sgl.gen("x", **words)
