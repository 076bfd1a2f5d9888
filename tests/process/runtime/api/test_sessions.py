"""Sessions from where users stand: turns are called by the ids the caller gave them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from runtime.api import Engine
from runtime.protocol.errors import BadRequest, PromptTooLong
from runtime.protocol.io_struct import CloseSessionReq, ControlOutput, GenerateOutput, OpenSessionReq

PARAMS = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine("pocket", dtype="float32", device="cpu", max_total_tokens=2048) as made:
        yield made


@pytest.fixture
def session(engine: Engine) -> Iterator[str]:
    name = engine.control(OpenSessionReq(capacity=64)).data["session_id"]
    yield name
    engine.control(CloseSessionReq(session_id=name))


def turn(engine: Engine, session: str, rid: str, ids: list[int], /, **words: Any) -> Any:
    return engine.generate(ids, PARAMS, rid=rid, session_params={"id": session, **words})


def test_a_turn_goes_on_from_what_the_caller_names(engine: Engine, session: str) -> None:
    def plain(ids: list[int]) -> list[int]:
        output: GenerateOutput = engine.generate(ids, PARAMS)
        return output.output_ids

    one = turn(engine, session, "one", [10, 11, 12, 13])
    whole = [10, 11, 12, 13, *one.output_ids]
    two = turn(engine, session, "two", [20, 21], rid="one")
    assert two.output_ids == plain([*whole, 20, 21])
    assert two.meta["prompt_tokens"] == 10
    assert two.meta["cached_tokens"] >= 7
    whole += [20, 21, *two.output_ids]
    cut = turn(engine, session, "cut", [40], rid="two", offset=5)
    assert cut.output_ids == plain([*whole[:5], 40])
    shorter = turn(engine, session, "shorter", [40], rid="two", offset=-1)
    assert shorter.output_ids == plain([*whole[:-1], 40])
    silent = turn(engine, session, "silent", [30], rid="one", drop_previous_output=True)
    assert silent.output_ids == plain([10, 11, 12, 13, 30])
    again = turn(engine, session, "again", [9], rid="one", replace=True)
    assert again.output_ids == plain([10, 11, 12, 13, *one.output_ids, 9])
    with pytest.raises(BadRequest, match="has no turn 'two'"):
        turn(engine, session, "three", [1], rid="two")
    with pytest.raises(BadRequest, match="has a turn 'one' already") as told:
        turn(engine, session, "one", [1])
    assert told.value.where == "rid"


def test_scores_of_a_turn_reach_back(engine: Engine, session: str) -> None:
    turn(engine, session, "one", [10, 11, 12, 13])
    two = engine.generate(
        [20, 21], PARAMS, rid="two", session_params={"id": session, "rid": "one"},
        return_logprob=True, logprob_start_len=0,
    )  # fmt: skip
    scored = two.meta["input_token_logprobs"]
    assert len(scored) == 10
    assert [token for _, token, _ in scored[-2:]] == [20, 21]
    for start, count in ((9, 1), (11, None)):
        more: dict[str, Any] = {"return_logprob": True, "logprob_start_len": start}
        words = {"id": session, "rid": "one"}
        if count is None:
            with pytest.raises(BadRequest, match="logprob_start_len"):
                engine.generate([20, 21], PARAMS, rid=f"from {start}", session_params=words, **more)
            continue
        made = engine.generate([20, 21], PARAMS, rid=f"from {start}", session_params=words, **more)
        assert len(made.meta["input_token_logprobs"]) == count


def test_output_that_may_fill_the_room_fills_what_the_turns_before_leave(engine: Engine) -> None:
    name = engine.control(OpenSessionReq(capacity=40)).data["session_id"]
    turn(engine, name, "one", [10, 11, 12, 13])
    words = {"id": name, "rid": "one"}
    open_end = {"temperature": 0, "ignore_eos": True}
    two: GenerateOutput = engine.generate([20], open_end, rid="two", session_params=words)
    assert len(two.output_ids) == 40 - 9
    with pytest.raises(PromptTooLong):
        engine.generate([20], {**open_end, "max_new_tokens": 32}, rid="three", session_params=words)
    assert engine.control(CloseSessionReq(session_id=name)).ok


def test_streaming_turns_append(engine: Engine) -> None:
    name = engine.control(OpenSessionReq(streaming=True)).data["session_id"]
    one = turn(engine, name, "one", [10, 11, 12, 13])
    two = turn(engine, name, "two", [20])
    assert two.output_ids == engine.generate([10, 11, 12, 13, *one.output_ids, 20], PARAMS).output_ids
    turn(engine, name, "three", [20], rid="two")
    with pytest.raises(BadRequest, match="last turn"):
        turn(engine, name, "four", [20], rid="two")
    assert engine.control(CloseSessionReq(session_id=name)).ok
    assert engine.flush_cache()
    assert engine.state()["free"] == engine.state()["slots"]


def test_what_is_wrong_is_said(engine: Engine, session: str) -> None:
    turn(engine, session, "one", [1])
    cases: list[tuple[list[int], dict[str, Any], str]] = [
        ([1], {"rid": "nobody"}, "has no turn 'nobody'"),
        ([1], {"rid": "one", "offset": 99}, "the turn has 5 tokens"),
        ([1], {"bogus": 1}, "bogus"),
        ([1], {"turn": "mine"}, "unknown field"),
    ]
    for ids, words, text in cases:
        with pytest.raises(BadRequest, match=text) as told:
            turn(engine, session, "x", ids, **words)
        assert str(told.value.where).startswith("session_params")
    with pytest.raises(PromptTooLong, match="capacity of 64"):
        turn(engine, session, "x", [1] * 61)
    with pytest.raises(BadRequest, match="no session 'nowhere'"):
        turn(engine, "nowhere", "x", [1])
    with pytest.raises(BadRequest, match="cannot be a turn of a session"):
        engine.generate("a", choices=["b", "c"], session_params={"id": session})


def test_open_close_and_time_out(engine: Engine) -> None:
    def ask(**words: Any) -> ControlOutput:
        return engine.control(OpenSessionReq(**words))

    assert ask(session_id="s").data == {"session_id": "s"}
    assert "open already" in ask(session_id="s").message
    assert engine.control(CloseSessionReq(session_id="s")).ok
    assert ask(session_id="t", timeout_s=0.05).data == {"session_id": "t"}
    time.sleep(0.2)
    with pytest.raises(BadRequest, match="may have timed out"):
        turn(engine, "t", "x", [1])
    assert not engine.control(CloseSessionReq(session_id="t")).ok
    for words in ({"capacity": -1}, {"session_id": ""}, {"timeout_s": -1.0}):
        assert not ask(**words).ok
    assert engine.state()["num_sessions"] == 0
