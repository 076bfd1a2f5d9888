"""/generate and /encode over a real socket and the bundled checkpoint."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.processes.pipeline.launch import Pipeline
from runtime.protocol.control import GetStateReq
from runtime.protocol.io_struct import GenerateReqInput, OutputDelta
from runtime.server.native.generate import SoFar, answer_of

GREEDY = {"temperature": 0.0, "max_new_tokens": 12}
ENDLESS = {"temperature": 0.0, "max_new_tokens": 1900, "ignore_eos": True}
PROMPT = "The capital of"


def events(response: httpx.Response) -> list[Any]:
    """The data of each event; [DONE] stays text."""
    return data_of(response.iter_lines())


def data_of(lines: Iterable[str]) -> list[Any]:
    found = []
    for line in lines:
        assert line == "" or line.startswith("data: ")
        if line:
            data = line.removeprefix("data: ")
            found.append(data if data == "[DONE]" else json.loads(data))
    return found


def streamed(client: httpx.Client, body: dict[str, Any]) -> list[Any]:
    with client.stream("POST", "/generate", json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        return events(response)


@pytest.fixture(scope="module")
def whole(server: Any) -> Any:
    """200 tokens of the prompt "a"."""
    body = {"text": "a", "sampling_params": {**ENDLESS, "max_new_tokens": 200}}
    return httpx.post(f"{server.url}/generate", json=body, timeout=300).json()


def engine_says(pipeline: Pipeline, **fields: Any) -> Any:
    return asyncio.run(pipeline.manager.submit(GenerateReqInput(**fields)))


def idle(pipeline: Pipeline) -> bool:
    state = pipeline.manager.control(GetStateReq(), 60).data
    return bool(state["running"] == state["waiting"] == 0 and state["protected"] == 0)


def test_one_prompt(client: httpx.Client, pipeline: Pipeline) -> None:
    answer = client.post("/generate", json={"text": PROMPT, "sampling_params": GREEDY, "rid": "mine"})
    assert answer.status_code == 200
    body = answer.json()
    assert set(body) == {"text", "output_ids", "meta_info"}
    expected = engine_says(pipeline, text=PROMPT, sampling_params=GREEDY)
    assert (body["text"], body["output_ids"]) == (expected.text, expected.output_ids)
    meta = body["meta_info"]
    assert meta["id"] == "mine"
    assert meta["finish_reason"]["type"] in ("stop", "length")
    assert meta["completion_tokens"] == len(body["output_ids"])
    assert {"prompt_tokens", "cached_tokens", "e2e_latency"} <= set(meta)


def test_put_is_post(client: httpx.Client) -> None:
    answer = client.put("/generate", json={"text": PROMPT, "sampling_params": GREEDY})
    assert answer.json()["text"]


def test_ids_and_messages_are_prompts_too(client: httpx.Client, pipeline: Pipeline) -> None:
    ids = pipeline.model.tokenizer.encode(PROMPT)
    by_text = client.post("/generate", json={"text": PROMPT, "sampling_params": GREEDY}).json()
    by_ids = client.post("/generate", json={"input_ids": ids, "sampling_params": GREEDY}).json()
    assert by_ids["output_ids"] == by_text["output_ids"]
    turns = [{"role": "user", "content": "What is 2 plus 3?"}]
    by_turns = client.post("/generate", json={"messages": turns, "sampling_params": GREEDY})
    assert by_turns.status_code == 200
    assert by_turns.json()["text"]


def test_a_batch_with_samples_comes_in_order(client: httpx.Client) -> None:
    prompts = ["One", "Two and", "Three or four"]
    alone = [
        client.post("/generate", json={"text": p, "sampling_params": GREEDY}).json()["text"] for p in prompts
    ]
    answer = client.post(
        "/generate", json={"text": prompts, "sampling_params": {**GREEDY, "n": 2}, "rid": "batch"}
    ).json()
    assert [item["text"] for item in answer] == alone * 2
    assert [item["meta_info"]["id"] for item in answer] == [f"batch_{index}" for index in range(6)]
    assert all("error" not in item and "index" not in item for item in answer)


def test_a_batch_of_one_is_a_list(client: httpx.Client) -> None:
    answer = client.post("/generate", json={"text": ["One"], "sampling_params": GREEDY}).json()
    assert [set(item) for item in answer] == [{"text", "output_ids", "meta_info"}]


def test_a_failed_item_says_so_and_the_others_are_answered(client: httpx.Client) -> None:
    params = [GREEDY, {"temperature": -1}, {"regex": "("}]
    answer = client.post("/generate", json={"text": ["One", "Two", "Three"], "sampling_params": params})
    assert answer.status_code == 200
    good, cold, broken = answer.json()
    assert good["text"]
    assert "temperature" in cold["error"]["message"]
    for failed in (cold, broken):
        assert failed["meta_info"]["finish_reason"]["type"] == "abort"
        assert failed["meta_info"]["finish_reason"]["status_code"] == 400
        assert failed["text"] == ""


def test_a_batch_that_fails_whole_is_one_error(client: httpx.Client) -> None:
    answer = client.post("/generate", json={"text": ["One", "Two"], "sampling_params": {"top_p": 7}})
    assert answer.status_code == 400
    assert "top_p" in answer.json()["error"]["message"]


def test_a_stream_grows_and_ends(client: httpx.Client, pace: Any) -> None:
    body = {"text": PROMPT, "sampling_params": GREEDY}
    whole = client.post("/generate", json=body).json()
    pace.hold(60, after=6)  # no more than that before something was read
    with client.stream("POST", "/generate", json={**body, "stream": True}) as response:
        lines = response.iter_lines()
        first = json.loads(next(lines).removeprefix("data: "))
        pace.free()
        *pieces, done = [first, *data_of(lines)]
    assert done == "[DONE]"
    assert 0 < len(first["output_ids"]) <= 6 < len(whole["output_ids"])
    texts = [piece["text"] for piece in pieces]
    assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
    assert (texts[-1], pieces[-1]["output_ids"]) == (whole["text"], whole["output_ids"])
    reasons = [piece["meta_info"]["finish_reason"] for piece in pieces]
    assert reasons[-1] == whole["meta_info"]["finish_reason"]
    assert set(map(str, reasons[:-1])) == {"None"}


@pytest.mark.parametrize("word", ["stream_output", "incremental_streaming_output"])
def test_an_incremental_stream_sends_what_is_new(client: httpx.Client, word: str) -> None:
    body = {"text": PROMPT, "sampling_params": GREEDY, "return_logprob": True, "top_logprobs_num": 2}
    whole = client.post("/generate", json=body).json()
    *pieces, done = streamed(client, {**body, word: True})
    assert done == "[DONE]"
    assert "".join(piece["text"] for piece in pieces) == whole["text"]
    assert [token for piece in pieces for token in piece["output_ids"]] == whole["output_ids"]
    for name in ("output_token_logprobs", "output_top_logprobs", "output_token_origins"):
        joined = [one for piece in pieces for one in piece["meta_info"][name]]
        expected = whole["meta_info"][name]
        assert [str(one)[:4] for one in joined] == [str(one)[:4] for one in expected]
    assert pieces[-1]["meta_info"]["completion_tokens"] == len(whole["output_ids"])


def test_a_batch_streams_by_index(client: httpx.Client) -> None:
    body = {"text": ["One", "Two and"], "sampling_params": {**GREEDY, "n": 2}}
    whole = client.post("/generate", json=body).json()
    *pieces, done = streamed(client, body)
    assert done == "[DONE]"
    last = {piece["index"]: piece for piece in pieces}
    assert [last[index]["text"] for index in range(4)] == [item["text"] for item in whole]
    assert all(last[index]["meta_info"]["finish_reason"] for index in range(4))


def test_a_failed_item_of_a_stream(client: httpx.Client) -> None:
    body = {"text": ["One", "Two"], "sampling_params": [GREEDY, {"temperature": -1}]}
    *pieces, done = streamed(client, body)
    assert done == "[DONE]"
    assert [piece["error"]["code"] for piece in pieces if piece["index"] == 1] == ["bad_request"]
    assert any(piece["index"] == 0 and piece["meta_info"]["finish_reason"] for piece in pieces)


def test_choices_and_logprobs(client: httpx.Client) -> None:
    scored = client.post("/generate", json={"text": "It is", "choices": [" good", " bad"]}).json()
    assert [one["text"] for one in scored["choices"]] == [" good", " bad"]
    body = {
        "text": PROMPT,
        "sampling_params": {"max_new_tokens": 2, "temperature": 0},
        "return_logprob": True,
    }
    body |= {"logprob_start_len": 0, "return_text_in_logprobs": True}
    meta = client.post("/generate", json=body).json()["meta_info"]
    assert meta["input_token_logprobs"][0][0] is None
    assert len(meta["input_token_logprobs"]) == meta["prompt_tokens"]
    assert all(isinstance(text, str) for _, _, text in meta["output_token_logprobs"])


def test_some_log_probabilities_can_be_asked_for_alone(client: httpx.Client) -> None:
    def meta(**fields: Any) -> Any:
        body = {"text": PROMPT, "sampling_params": {"max_new_tokens": 2, "temperature": 0}, **fields}
        return client.post("/generate", json=body).json()["meta_info"]

    assert not [name for name in meta(return_text_in_logprobs=True) if "logprobs" in name]
    told = meta(token_ids_logprob=[1, 2])
    assert [[token for _, token, _ in pairs] for pairs in told["output_token_ids_logprobs"]] == [[1, 2]] * 2
    told = meta(top_logprobs_num=3)
    assert [len(pairs) for pairs in told["output_top_logprobs"]] == [3, 3]
    assert (told["input_token_logprobs"], told["input_top_logprobs"]) == ([], []), "none of the prompt's"
    assert meta(return_logprob=True)["input_token_logprobs"] == []


def test_what_every_answer_tells(client: httpx.Client) -> None:
    answer = client.post("/generate", json={"text": PROMPT, "sampling_params": GREEDY}).json()
    assert {
        "id", "finish_reason", "prompt_tokens", "completion_tokens", "cached_tokens", "reasoning_tokens",
        "weight_version", "num_retractions", "e2e_latency", "dp_rank",
    } <= set(answer["meta_info"])  # fmt: skip


def test_fields_about_logs_and_routes_are_taken(client: httpx.Client) -> None:
    body = {
        "text": PROMPT, "sampling_params": GREEDY, "custom_labels": {"team": "x"}, "no_logs": True,
        "log_metrics": False, "routing_key": "k", "data_parallel_rank": 0, "priority": 3,
        "return_bytes": False, "lora_path": None, "image_data": [],
    }  # fmt: skip
    assert client.post("/generate", json=body).status_code == 200


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "should be provided"),
        ({"text": "a", "input_ids": [1], "input_embeds": [[0.1]]}, "should be provided"),
        ({"text": 7}, "text"),
        ({"text": []}, "cannot be empty"),
        ({"input_ids": []}, "cannot be empty"),
        ({"input_ids": [10**9]}, "input_ids[0]"),
        ({"input_ids": [-1]}, "input_ids[0]"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
        ({"text": "a", "sampling_params": {"max_new_token": 1}}, "max_new_tokens"),
        ({"text": "a", "sampling_params": {"regex": "(", "max_new_tokens": 2}}, "regex"),
        ({"text": "a", "sampling_params": 3}, "sampling_params"),
        ({"text": "a", "sampling_parms": {"n": 1}}, "'sampling_params'"),
        ({"text": "a", "stream": "yes"}, "stream"),
        ({"text": "a", "stream_output": 1}, "stream_output"),
        ({"text": "a", "http_worker_ipc": "x"}, "unknown field"),
        ({"text": "a", "type": "GenerateReqInput"}, "unknown field"),
        ({"text": "a " * 5000}, "2048"),
        ({"text": "a", "rid": ["x", "y"]}, "rid"),
        ({"text": ["a", "b"], "rid": ["x", "x"]}, "Duplicate"),
        ({"text": "a", "sampling_params": {"n": 10**6}}, "n"),
        ({"text": ["a"] * 65}, "at most 64"),
        ({"text": "a", "sampling_params": {"n": 65}}, "at most 64"),
        ({"text": "a", "priority": 2**64}, "64 bits"),
        ({"text": "a", "timeout_s": -1}, "timeout_s"),
        ({"text": "a", "return_hidden_states": "first"}, "return_hidden_states"),
        ({"text": "a", "lora_path": "x"}, "lora_path"),
        ({"text": "a", "image_data": "x.png"}, "image"),
        ({"text": "a", "logprob_start_len": 99, "return_logprob": True}, "logprob_start_len"),
        ({"text": "a", "custom_labels": {"a": 1}}, "custom_labels"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_is_said_with_its_place(
    client: httpx.Client, body: dict[str, Any], says: str, stream: bool
) -> None:
    answer = client.post("/generate", json={"stream": stream, **body})
    assert answer.status_code == 400, answer.text
    told = answer.json()["error"]
    assert says in told["message"]
    assert told["type"] == "invalid_request_error"
    assert told["retryable"] is False


def test_null_is_the_default(client: httpx.Client) -> None:
    fields = ["lora_path", "image_data", "return_logprob", "logprob_start_len", "top_logprobs_num", "rid",
              "session_params", "extra_key", "custom_logit_processor", "stream_output"]  # fmt: skip
    body = {"text": PROMPT, "sampling_params": {**GREEDY, "stop": None}, **dict.fromkeys(fields)}
    assert client.post("/generate", json=body).status_code == 200


def test_odd_text_does_no_harm(client: httpx.Client) -> None:
    for text in ("\x00", "🦊" * 50, "\\ud83d", "<|im_end|>" * 5, "\u2028", "é" * 300):
        body = json.dumps({"text": text, "sampling_params": {"max_new_tokens": 3}, "rid": None}).encode()
        answer = client.post("/generate", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 200, answer.text
    raw = b'{"text": "cut \\ud83d", "rid": "r\\udc00", "sampling_params": {"max_new_tokens": 2}}'
    answer = client.post("/generate", content=raw, headers={"content-type": "application/json"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["meta_info"]["id"] == "r�"


def test_a_client_that_leaves_a_stream_takes_its_request_along(
    client: httpx.Client, pipeline: Pipeline, wait_until: Callable[..., None]
) -> None:
    with client.stream(
        "POST", "/generate", json={"text": "a", "sampling_params": ENDLESS, "stream": True}
    ) as r:
        next(r.iter_lines())
    wait_until(lambda: pipeline.manager.live == 0)
    wait_until(lambda: idle(pipeline))


def test_a_client_that_leaves_an_answer_takes_its_request_along(
    server: Any, pipeline: Pipeline, wait_until: Callable[..., None]
) -> None:
    body = json.dumps({"text": ["a", "b"], "sampling_params": {**ENDLESS, "n": 2}}).encode()
    head = (
        f"POST /generate HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    )
    with server.connect() as link:
        link.sendall(head.encode() + b"\r\n\r\n" + body)
        wait_until(lambda: pipeline.manager.live >= 4)
    wait_until(lambda: pipeline.manager.live == 0)
    wait_until(lambda: idle(pipeline))


def test_a_stalled_reader_holds_nobody(server: Any, client: httpx.Client, pipeline: Pipeline) -> None:
    body = json.dumps(
        {"text": "a", "sampling_params": ENDLESS, "stream": True, "return_logprob": True}
    ).encode()
    head = (
        f"POST /generate HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    )
    with server.connect() as link:
        link.sendall(head.encode() + b"\r\n\r\n" + body)
        answer = client.post("/generate", json={"text": "b", "sampling_params": GREEDY})
        assert answer.status_code == 200


@pytest.mark.parametrize("incremental", [False, True])
def test_a_request_aborted_midway_ends_its_stream_with_what_there_is(
    client: httpx.Client, whole: Any, incremental: bool
) -> None:
    body = {"text": "a", "sampling_params": ENDLESS, "stream": True, "rid": "doomed",
            "stream_output": incremental}  # fmt: skip
    with client.stream("POST", "/generate", json=body) as response:
        lines = response.iter_lines()
        first = [next(lines)]
        assert client.post("/abort_request", json={"rid": "doomed"}).status_code == 200
        found = [line for line in (*first, *lines) if line]
    assert found[-1] == "data: [DONE]"
    *pieces, last = [json.loads(line.removeprefix("data: ")) for line in found[:-1]]
    assert {"message", "type", "code", "retryable"} <= set(last["error"])
    assert last["error"]["code"] == "aborted"
    reason = last["meta_info"]["finish_reason"]
    assert (reason["type"], reason["status_code"], reason["err_type"]) == ("abort", 499, "aborted")
    assert reason["message"] == "doomed: the request was cancelled", "the client's own id"
    assert all(piece["meta_info"]["finish_reason"] is None for piece in pieces)
    if incremental:
        ids = [token for piece in (*pieces, last) for token in piece["output_ids"]]
        text = "".join(piece["text"] for piece in (*pieces, last))
    else:
        ids, text = last["output_ids"], last["text"]
    assert len(ids) == last["meta_info"]["completion_tokens"] >= 1
    shared = min(len(ids), len(whole["output_ids"]))
    assert ids[:shared] == whole["output_ids"][:shared]
    told = min(10, len(text))  # it may have been aborted before it said so much
    assert text[:told] == whole["text"][:told]


def test_an_aborted_request_answers_with_what_there_is(
    client: httpx.Client, pipeline: Pipeline, whole: Any, wait_until: Callable[..., None]
) -> None:
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(
            client.post, "/generate", json={"text": "a", "sampling_params": ENDLESS, "rid": "doomed"}
        )
        wait_until(lambda: pipeline.manager.control(GetStateReq(), 60).data["running"] > 0)
        client.post("/abort_request", json={"rid": "doomed"})
        answer = held.result(300)
    assert answer.status_code == 200
    told = answer.json()
    assert told["error"]["code"] == "aborted"
    assert told["meta_info"]["finish_reason"]["type"] == "abort"
    assert told["meta_info"]["id"] == "doomed"
    shared = min(len(told["output_ids"]), 200)
    assert told["output_ids"][:shared] == whole["output_ids"][:shared]
    assert "\\u001f" not in answer.text, "ids behind the frontend stay there"


def test_aborted_items_of_a_batch_say_so_and_the_others_go_on(
    client: httpx.Client, pipeline: Pipeline, wait_until: Callable[..., None], pace: Any
) -> None:
    body = {
        "text": ["a", "b"],
        "sampling_params": [ENDLESS, {**ENDLESS, "max_new_tokens": 300}],
        "rid": "two",
    }
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(client.post, "/generate", json=body)
        wait_until(lambda: pipeline.manager.control(GetStateReq(), 60).data["running"] > 1)
        client.post("/abort_request", json={"rid": "two_0"})
        first, second = held.result(300).json()
        assert [first["meta_info"]["id"], second["meta_info"]["id"]] == ["two_0", "two_1"]
        assert first["meta_info"]["finish_reason"]["type"] == "abort"
        assert second["meta_info"]["finish_reason"] == {"type": "length", "length": 300}
        pace.hold()
        held = pool.submit(client.post, "/generate", json=body)
        wait_until(lambda: pipeline.manager.control(GetStateReq(), 60).data["running"] > 1)
        client.post("/abort_request", json={"rid": "two"})
        answer = held.result(300)
    assert answer.status_code == 200
    assert [one["meta_info"]["finish_reason"]["type"] for one in answer.json()] == ["abort", "abort"]


def test_a_live_id_cannot_be_used_twice(client: httpx.Client) -> None:
    body = {"text": "a", "sampling_params": ENDLESS, "stream": True, "rid": "twin"}
    with client.stream("POST", "/generate", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        answer = client.post("/generate", json={"text": "b", "rid": "twin"})
        assert answer.status_code == 400
        assert "twin" in answer.json()["error"]["message"]


def test_deadlines_reach_the_client(client: httpx.Client) -> None:
    answer = client.post("/generate", json={"text": "a", "sampling_params": ENDLESS, "timeout_s": 0.05})
    assert answer.status_code == 504
    assert answer.json()["error"]["retryable"] is True


def test_many_at_once(client: httpx.Client) -> None:
    def ask(index: int) -> list[int]:
        body = {"text": f"Number {index % 5}", "sampling_params": GREEDY}
        if index % 2:
            return list(streamed(client, body)[-2]["output_ids"])
        return list(client.post("/generate", json=body).json()["output_ids"])

    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(ask, range(40)))
    assert all(ids == found[index % 5] for index, ids in enumerate(found))


def test_vectors(client: httpx.Client) -> None:
    one = client.post("/encode", json={"text": "Hello there", "rid": "v"}).json()
    assert set(one) == {"embedding", "meta_info"}
    assert one["meta_info"]["prompt_tokens"] > 0
    assert sum(value * value for value in one["embedding"]) == pytest.approx(1.0, abs=1e-3)
    many = client.put("/encode", json={"text": ["Hello there", "Somebody else"]}).json()
    assert many[0]["embedding"] == pytest.approx(one["embedding"], abs=1e-4)
    assert many[1]["embedding"] != many[0]["embedding"]


def test_vectors_are_asked_for_properly(client: httpx.Client) -> None:
    for body in (
        {"text": "a", "txt": 1},
        {},
        {"text": "a", "input_ids": [1]},
        {"text": 3},
        {"text": ["a"] * 65},
    ):
        answer = client.post("/encode", json=body)
        assert answer.status_code == 400, answer.text
    answer = client.post("/classify", json={"text": "a"})
    assert answer.status_code == 400
    assert "not a classifier" in answer.json()["error"]["message"]


@pytest.mark.parametrize("incremental", [False, True])
def test_every_event_says_how_many_log_probabilities_there_are_in_all(
    client: httpx.Client, incremental: bool
) -> None:
    body = {"text": PROMPT, "sampling_params": {**GREEDY, "max_new_tokens": 8, "ignore_eos": True}}
    body |= {"stream": True, "stream_output": incremental}
    with client.stream("POST", "/generate", json={**body, "return_logprob": True}) as answer:
        lines = [line for line in answer.iter_lines() if line and "DONE" not in line]
    sent = 0
    for line in lines:
        meta = json.loads(line.removeprefix("data: "))["meta_info"]
        count = len(meta["output_token_logprobs"])
        sent = sent + count if incremental else count
        assert meta["output_token_logprobs_length"] == sent == meta["completion_tokens"]
    assert sent == 8
    whole = client.post("/generate", json={**body, "stream": False}).json()["meta_info"]
    assert "output_token_logprobs_length" not in whole


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.text(max_size=3), st.lists(st.integers(0, 99_999), max_size=3), st.integers(0, 2)),
        max_size=8,
    )
)
def test_what_is_added_as_json_is_all_so_far(deltas: list[tuple[str, list[int], int]]) -> None:
    """Whatever is taken back, each event holds what an event made of everything would hold."""
    so_far, text, ids = SoFar(), "", list[int]()
    for new_text, new_ids, replaced in deltas:
        kept = max(0, len(ids) - replaced)
        text, ids = text + new_text, ids[:kept] + new_ids
        meta = {"id": "r", "output_top_logprobs": [[[-1.0, one, "é"]] for one in new_ids]}
        answer = answer_of(OutputDelta(new_text, new_ids, meta, replaced=replaced), 3)
        told = json.loads(so_far.event(answer, replaced).removeprefix(b"data: "))
        entries = [[[-1.0, one, "é"]] for one in ids]
        assert told == {"text": text, "output_ids": ids, "index": 3,
                        "meta_info": {"id": "r", "output_top_logprobs": entries}}  # fmt: skip
