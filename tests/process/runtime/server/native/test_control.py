"""Orders, questions and token routes over a real socket and the bundled checkpoint."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from runtime.config.engine import EngineConfig
from runtime.config.serving.server import ServerConfig
from runtime.processes.pipeline.launch import Pipeline, launch
from runtime.protocol.control import GetStateReq
from runtime.protocol.errors import EngineDead
from runtime.server.app import build_app
from runtime.server.native import control
from runtime.server.native.control import NOT_HERE

GREEDY = {"temperature": 0.0, "max_new_tokens": 4}
ENDLESS = {"temperature": 0.0, "max_new_tokens": 1900, "ignore_eos": True}
TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 plus 3?"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@contextlib.contextmanager
def running(client: httpx.Client, rid: str) -> Iterator[Iterator[str]]:
    """A long request while the block runs."""
    body = {"text": "a", "sampling_params": ENDLESS, "stream": True, "rid": rid}
    with client.stream("POST", "/generate", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        yield lines


def samples_of(client: httpx.Client) -> list[Any]:
    """A scrape in which the scheduler had its say; the server leaves it out where it is silent for 2 s."""
    deadline = time.monotonic() + 60
    while True:
        answer = client.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        found = [one for family in text_string_to_metric_families(answer.text) for one in family.samples]
        if any(one.name == "sglang_dsl:scheduler_up" and one.value for one in found):
            return found
        assert time.monotonic() < deadline


def last_error(lines: Iterator[str]) -> Any:
    rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    return json.loads(rest[-2].removeprefix("data: "))["error"]


# -- tokens ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
def test_tokens_of_texts(client: httpx.Client, pipeline: Pipeline, path: str) -> None:
    encode = pipeline.model.tokenizer.encode
    one = client.post(path, json={"prompt": "Hello there", "model": "pocket"}).json()
    assert one == {"tokens": encode("Hello there"), "count": len(one["tokens"]), "max_model_len": 2048}
    many = client.post(path, json={"prompt": ["Hello", "", "you"]}).json()
    assert many["tokens"] == [encode("Hello"), encode(""), encode("you")]
    assert many["count"] == [len(ids) for ids in many["tokens"]]
    assert client.post(path, json={"prompt": []}).json()["tokens"] == []
    bare = client.post(path, json={"prompt": "a", "add_special_tokens": False}).json()
    assert bare["tokens"] == encode("a", False)


def test_tokens_of_a_conversation_are_those_a_chat_is_prompted_with(client: httpx.Client) -> None:
    found = client.post("/tokenize", json={"messages": TURNS}).json()
    body = {"messages": TURNS, "max_tokens": 1, "return_prompt_token_ids": True}
    told = client.post("/v1/chat/completions", json=body).json()
    assert found["tokens"] == told["choices"][0]["prompt_token_ids"]
    assert found["count"] == told["usage"]["prompt_tokens"]
    body = {"messages": TURNS, "sampling_params": GREEDY, "return_prompt_token_ids": True}
    meta = client.post("/generate", json=body).json()["meta_info"]
    closed = client.post("/tokenize", json={"messages": TURNS, "add_generation_prompt": False}).json()
    assert closed["tokens"] == meta["prompt_token_ids"], "the native route adds nothing to the messages"
    assert found["tokens"][: closed["count"]] == closed["tokens"]
    begun = [*TURNS, {"role": "assistant", "content": "It is"}]
    going_on = client.post("/tokenize", json={"messages": begun, "continue_final_message": True}).json()
    assert going_on["tokens"][: found["count"]] == found["tokens"]
    assert going_on["count"] > found["count"]
    with_tools = client.post("/tokenize", json={"messages": TURNS, "tools": [TOOL]}).json()
    without = client.post(
        "/tokenize", json={"messages": TURNS, "tools": [TOOL], "tool_choice": "none"}
    ).json()
    assert without["tokens"] == found["tokens"]
    assert with_tools["count"] >= found["count"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"prompt": 3}, "prompt"),
        ({"prompt": ["a", 3]}, "prompt[1]"),
        ({"prompt": None}, "prompt or messages"),
        ({}, "prompt or messages"),
        ({"prompt": "a", "messages": TURNS}, "prompt or messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"prompt": "a", "add_special_token": True}, "'add_special_tokens'"),
        ({"messages": TURNS, "tool_choice": "required"}, "Tools cannot be empty"),
    ],
)
def test_what_cannot_be_tokenised(client: httpx.Client, body: dict[str, Any], says: str) -> None:
    answer = client.post("/tokenize", json=body)
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]


@pytest.mark.parametrize("text", ["Hello there", "서울 🦊", "<|im_start|>user\nhi<|im_end|>", ""])
def test_there_and_back(client: httpx.Client, text: str) -> None:
    ids = client.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
    back = client.post("/detokenize", json={"tokens": ids, "skip_special_tokens": False}).json()
    assert back == {"text": text}
    assert client.post(
        "/v1/detokenize", json={"tokens": [ids, ids], "skip_special_tokens": False}
    ).json() == {"text": [text, text]}


@pytest.mark.parametrize("tokens", [[10**6], [-1], [[1], [10**6]], ["a"], "a", 3, [[1], 2], [1.5], [True]])
def test_what_is_no_token(client: httpx.Client, tokens: Any) -> None:
    assert client.post("/detokenize", json={"tokens": tokens}).status_code == 400


def test_long_texts_are_tokenised_beside_the_loop(client: httpx.Client) -> None:
    assert client.post("/tokenize", json={"prompt": "word " * 20_000}).json()["count"] > 20_000


# -- orders ------------------------------------------------------------------------------------------------


def test_the_cache_is_flushed_when_nothing_runs(
    client: httpx.Client, wait_until: Callable[..., None]
) -> None:
    prompt = {"text": "The cache remembers this prompt", "sampling_params": GREEDY}
    client.post("/generate", json=prompt)
    assert client.post("/generate", json=prompt).json()["meta_info"]["cached_tokens"] > 0
    wait_until(lambda: client.post("/flush_cache", json={}).status_code == 200)
    assert client.post("/generate", json=prompt).json()["meta_info"]["cached_tokens"] == 0


def test_the_cache_is_not_flushed_under_a_request(client: httpx.Client) -> None:
    with running(client, "flush-1"):
        answer = client.post("/flush_cache", json={})
        assert answer.status_code == 400
        assert answer.headers["content-type"].startswith("text/plain")
        assert answer.text == (
            "The cache was not flushed: 1 request is not finished. ?timeout=SECONDS waits for them.\n"
        )
        # The scheduler may let go of the request before the wait is over.
        timer = threading.Timer(0.2, lambda: client.post("/abort_request", json={"rid": "flush-1"}))
        timer.start()
        assert client.post("/flush_cache?timeout=90", json={}).status_code == 200
        timer.join()
    for wrong in ("-1", "x", "nan", "inf", "1e9"):
        assert client.post(f"/flush_cache?timeout={wrong}", json={}).status_code == 400


@pytest.mark.parametrize(
    ("order", "hit"),
    [({"rid": "stop"}, True), ({"rid": "st"}, False), ({"rid": "st", "prefix": True}, True),
     ({"rid": ["other", "stop"]}, True), ({"abort_all": True}, True)],
)  # fmt: skip
def test_requests_are_cancelled(client: httpx.Client, order: dict[str, Any], hit: bool) -> None:
    with running(client, "stop") as lines:
        assert client.post("/abort_request", json=order).status_code == 200
        if not hit:
            assert next(line for line in lines if line).startswith('data: {"text"')
            client.post("/abort_request", json={"rid": "stop"})
        assert last_error(lines)["code"] == "aborted"


def test_a_batch_is_cancelled_by_its_name(client: httpx.Client) -> None:
    body = {"text": ["a", "b"], "sampling_params": ENDLESS, "stream": True, "rid": "pair"}
    with client.stream("POST", "/generate", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        client.post("/abort_request", json={"rid": "pair"})
        found = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert {piece["index"] for piece in found if "error" in piece} == {0, 1}


@pytest.mark.parametrize("order", [{}, {"rid": ""}, {"rid": []}, {"rid": 3}, {"id": "x"}, {"rid": [""]}])
def test_an_abort_needs_to_know_what(client: httpx.Client, order: dict[str, Any]) -> None:
    assert client.post("/abort_request", json=order).status_code == 400


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_pause_holds_requests_and_lets_them_go_on(client: httpx.Client, mode: str) -> None:
    body = {"text": "One two three", "sampling_params": {**GREEDY, "max_new_tokens": 60, "ignore_eos": True}}
    expected = client.post("/generate", json=body).json()["output_ids"]
    with ThreadPoolExecutor(1) as pool:
        assert client.post("/pause_generation", json={"mode": mode}).status_code == 200
        assert [client.get(path).status_code for path in ("/health", "/ready")] == [503, 503]
        held = pool.submit(client.post, "/generate", json=body)
        with pytest.raises(TimeoutError):
            held.result(0.3)
        assert client.post("/continue_generation", json={}).status_code == 200
        assert held.result(300).json()["output_ids"] == expected


def test_a_pause_can_end_requests(client: httpx.Client) -> None:
    with running(client, "paused") as lines:
        assert client.post("/pause_generation", json={}).status_code == 200
        told = last_error(lines)
    assert client.post("/continue_generation", json={}).status_code == 200
    assert told["code"] == "aborted"
    assert client.post("/pause_generation", json={"mode": "nicely"}).status_code == 400


def turn(client: httpx.Client, text: str, **fields: Any) -> Any:
    answer = client.post("/generate", json={"text": text, "sampling_params": GREEDY, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_turn_follows_another_by_the_id_in_its_answer(client: httpx.Client) -> None:
    session = client.post("/open_session", json={"capacity_of_str_len": 500}).json()
    first = turn(client, "One two", session_params={"id": session})
    asked = {"id": session, "rid": first["meta_info"]["id"]}
    second = turn(client, " three", session_params=asked)
    assert second["meta_info"]["prompt_tokens"] > first["meta_info"]["prompt_tokens"] + 4
    said = client.post("/tokenize", json={"prompt": ["One two", " three"]}).json()["tokens"]
    ids = [*said[0], *first["output_ids"], *said[1]]
    alone = client.post("/generate", json={"input_ids": ids, "sampling_params": GREEDY}).json()
    assert alone["output_ids"] == second["output_ids"]
    # Another branch from the first turn, by a name of one's own, and two samples at once.
    named = turn(client, " three", session_params=asked, rid="mine")
    assert named["output_ids"] == second["output_ids"]
    after = turn(client, " four", session_params={"id": session, "rid": "mine"})
    assert after["meta_info"]["prompt_tokens"] > named["meta_info"]["prompt_tokens"]
    body = {"text": " five", "session_params": asked, "sampling_params": {**GREEDY, "n": 2}}
    samples = client.post("/generate", json=body).json()
    assert samples[0]["output_ids"] == samples[1]["output_ids"]
    for sample in samples:
        turn(client, " six", session_params={"id": session, "rid": sample["meta_info"]["id"]})
    wrong = client.post("/generate", json={"text": "a", "session_params": {"id": session, "rid": "nobody"}})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "session_params.rid")
    client.post("/close_session", json={"session_id": session})


def test_a_streaming_session_goes_on_from_its_last_turn(client: httpx.Client) -> None:
    session = client.post("/open_session", json={"capacity_of_str_len": 500, "streaming": True}).json()
    first = turn(client, "One two", session_id=session)
    second = turn(client, " three", session_id=session)
    assert second["meta_info"]["prompt_tokens"] > first["meta_info"]["prompt_tokens"] + 4
    assert client.post("/close_session", json={"session_id": session}).status_code == 200


def test_sessions_open_and_close_once(client: httpx.Client) -> None:
    made = client.post("/open_session", json={"capacity_of_str_len": 500})
    assert made.status_code == 200
    session = made.json()
    assert isinstance(session, str)
    again = client.post("/open_session", json={"session_id": session})
    assert again.status_code == 400
    assert client.post("/close_session", json={"session_id": session}).status_code == 200
    assert client.post("/close_session", json={"session_id": session}).status_code == 400
    named = client.post("/open_session", json={"session_id": "mine", "timeout": 30})
    assert named.json() == "mine"
    assert client.post("/close_session", json={"session_id": "mine"}).status_code == 200
    assert client.post("/open_session", json={"sessionid": "mine"}).status_code == 400
    for huge in ("9" * 26, "-" + "9" * 26, "9" * 5000):
        told = client.post(
            "/open_session",
            content='{"capacity_of_str_len": %s}' % huge,  # noqa: UP031 - braces
            headers={"content-type": "application/json"},
        )
        assert told.status_code == 400, told.text
    for wrong in ({"timeout": 0}, {"capacity_of_str_len": -1}, {"session_id": ""}):
        assert client.post("/open_session", json=wrong).status_code == 400


def test_profiles_do_not_go_where_a_client_says(client: httpx.Client) -> None:
    for name in ("/etc", "../up", "a/b", ".hidden", "x" * 200, "a\x00b"):
        assert client.post("/start_profile", json={"output_dir": name}).status_code == 400
    assert client.post("/start_profile", json={"num_steps": 0}).status_code == 400


def test_a_profile_begins_and_ends(client: httpx.Client) -> None:
    assert client.post("/stop_profile", json={}).status_code == 400
    begun = client.post("/start_profile", json={"output_dir": "run-1"})
    assert begun.status_code == 200, begun.text
    assert client.post("/start_profile", json={}).status_code == 400
    client.post("/generate", json={"text": "a", "sampling_params": GREEDY})
    assert client.post("/stop_profile", json={}).status_code == 200


def test_logging_can_be_changed(client: httpx.Client) -> None:
    assert client.post("/configure_logging", json={"log_level": "warning"}).status_code == 200
    assert (
        client.post("/configure_logging", json={"log_level": "info", "log_requests": True}).status_code == 200
    )
    assert client.post("/configure_logging", json={"log_level": "loud"}).status_code == 400


def test_settings_of_the_scheduler_are_checked(client: httpx.Client) -> None:
    answer = client.post("/set_internal_state", json={"server_args": {"no_such_setting": 1}})
    assert answer.status_code == 400
    assert "no_such_setting" in answer.json()["error"]["message"]
    assert client.post("/set_internal_state", json={}).status_code == 400


@pytest.mark.parametrize("path", sorted(NOT_HERE))
def test_what_is_not_there_says_why(client: httpx.Client, path: str) -> None:
    answer = client.post(path, json={"anything": 1})
    assert answer.status_code == 501
    assert answer.json()["error"]["code"] == "no_such_service"
    assert len(answer.json()["error"]["message"]) > 30


# -- questions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/health", "/health_generate", "/ready"])
def test_it_is_healthy(client: httpx.Client, path: str) -> None:
    assert client.get(path).status_code == 200


def test_a_busy_server_is_healthy(client: httpx.Client) -> None:
    with running(client, "busy"):
        assert client.get("/health_generate").status_code == 200


@pytest.mark.parametrize(("options", "asked"), [({}, 0), ({"health_generates": True}, 1)])
def test_health_generates_only_where_it_is_wanted(
    pipeline: Pipeline, serving: Callable[..., Any], options: dict[str, Any], asked: int
) -> None:
    def requests() -> int:
        return int(pipeline.manager.control(GetStateReq(), 60).data["num_requests_total"])

    config, before = ServerConfig(**options), requests()
    with serving(build_app(pipeline.manager, config), config) as server:
        assert httpx.get(f"{server.url}/health", timeout=300).text == "healthy\n"
        assert requests() - before == asked
        assert httpx.get(f"{server.url}/health_generate", timeout=300).text == "healthy\n"
    assert requests() - before == asked + 1


def test_what_gives_orders_takes_no_get(client: httpx.Client) -> None:
    orders = [key.split()[1] for key in control.Control.OPENAPI]
    assert "/flush_cache" in orders
    for path in orders:
        assert client.get(path).status_code == 405, path


def test_those_who_ask_for_its_health_at_once_share_one_answer(
    client: httpx.Client, pipeline: Pipeline, pace: Any
) -> None:
    before = pipeline.manager.control(GetStateReq(), 60).data["num_requests_total"]
    pace.hold()
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: client.get("/health_generate"), range(64)))
    assert {answer.status_code for answer in answers} == {200}
    assert pipeline.manager.control(GetStateReq(), 60).data["num_requests_total"] - before < 64


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
def test_the_model_is_told(client: httpx.Client, pipeline: Pipeline, path: str) -> None:
    found = client.get(path).json()
    assert found["model_path"] == str(pipeline.model.path)
    assert found["served_model_name"] == "pocket"
    assert found["is_generation"] is True
    assert found["max_model_len"] == 2048


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_the_server_is_told_even_under_load(client: httpx.Client, path: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        asks = [pool.submit(client.get, path) for _ in range(8)]
        gens = [
            pool.submit(client.post, "/generate", json={"text": "a", "sampling_params": GREEDY})
            for _ in range(8)
        ]
        assert {one.result().status_code for one in gens} == {200}
        for one in asks:
            found = one.result().json()
            assert found["max_total_num_tokens"] == 16384
            assert found["internal_states"][0]["slots"] == 16384
            assert found["version"]
            assert found["tokenizer_path"] == found["model_path"]


def test_the_load_is_told(client: httpx.Client) -> None:
    with running(client, "load"):
        (load,) = client.get("/get_load").json()
        assert load["num_reqs"] >= 1
        assert load["num_tokens"] >= 1


def test_the_document_is_served(client: httpx.Client) -> None:
    found = client.get("/openapi.json").json()
    assert found["openapi"].startswith("3.1")
    assert "/generate" in found["paths"]


def test_a_body_that_is_too_large_is_answered_and_the_connection_goes_on(client: httpx.Client) -> None:
    for _ in range(2):
        answer = client.post("/generate", json={"text": "a" * (8 << 20)})
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "body_too_large"
        assert client.get("/ready").status_code == 200


def test_constraints_are_counted(client: httpx.Client) -> None:
    def scrape(name: str) -> float:
        return next(one.value for one in samples_of(client) if one.name == f"sglang_dsl:{name}")

    names = ("num_grammar_total", "num_grammar_cache_hit_total")
    before = [scrape(name) for name in names]
    body = {"text": "a", "sampling_params": {**GREEDY, "regex": "counted [0-9]{2}"}}
    for _ in range(2):
        assert client.post("/generate", json=body).status_code == 200
    assert [scrape(name) - was for name, was in zip(names, before, strict=True)] == [2, 1]
    assert scrape("num_grammar_kept") >= 1


def test_what_is_counted_is_what_happened(
    client: httpx.Client, pipeline: Pipeline, wait_until: Callable[..., None]
) -> None:
    def scrape() -> dict[str, float]:
        return {
            sample.name.removeprefix("sglang_dsl:"): sample.value
            for sample in samples_of(client)
            if not {"le", "endpoint", "stage"} & set(sample.labels)
        }

    before = scrape()
    body = {"text": ["Count this one", "and that one"], "sampling_params": {**GREEDY, "n": 2}}
    answers = client.post("/generate", json=body).json()
    with client.stream(
        "POST", "/generate", json={"text": "a", "sampling_params": GREEDY, "stream": True}
    ) as more:
        *_, last = [line for line in more.iter_lines() if line and "DONE" not in line]
    with running(client, "counted"):
        pass
    wait_until(lambda: pipeline.manager.live == 0)  # until it was seen that the client has gone
    made = [answer["meta_info"] for answer in answers] + [json.loads(last[6:])["meta_info"]]
    client.get("/health_generate")
    after = scrape()

    def grown(name: str) -> float:
        return after[name] - before[name]

    assert grown("num_requests_total") == 6
    assert grown("num_aborted_requests_total") == 1
    assert grown("prompt_tokens_total") == sum(meta["prompt_tokens"] for meta in made)
    assert grown("cached_tokens_total") == sum(meta["cached_tokens"] for meta in made)
    assert grown("generation_tokens_total") == sum(meta["completion_tokens"] for meta in made)
    for name in ("e2e_request_latency_seconds", "queue_time_seconds"):
        assert grown(f"{name}_count") == 5
    assert grown("time_to_first_token_seconds_count") == 6
    assert after["scheduler_up"] == 1
    assert after["max_total_num_tokens"] == 16384


# -- when it dies ------------------------------------------------------------------------------------------


def test_a_dead_engine_is_told_everywhere(serving: Callable[..., Any]) -> None:
    pipeline = launch(
        EngineConfig(model="pocket", device="cpu", dtype="float32", threads=1, max_total_tokens=2048)
    )
    config = ServerConfig(api_key="key")
    try:
        with serving(build_app(pipeline.manager, config), config) as server:
            key = {"authorization": "Bearer key"}
            with httpx.Client(base_url=server.url, headers=key, timeout=300) as client:
                with running(client, "victim") as lines:
                    pipeline.manager.fail_all(EngineDead("the scheduler died", where="scheduler"))
                    assert last_error(lines)["code"] == "engine_dead"
                for path in ("/health", "/health_generate", "/ready"):
                    answer = client.get(path, headers={"authorization": ""})
                    assert (answer.status_code, "the scheduler died" in answer.text) == (503, True)
                answer = client.post("/generate", json={"text": "a"})
                assert answer.status_code == 503
                assert "the scheduler died" in answer.json()["error"]["message"]
                scraped = client.get("/metrics").text
                assert 'sglang_dsl:scheduler_up{model_name="pocket"} 0.0' in scraped
                assert (
                    client.post("/generate", headers={"authorization": "Bearer no"}, json={}).status_code
                    == 401
                )
    finally:
        pipeline.close()
