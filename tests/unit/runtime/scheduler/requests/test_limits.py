"""Queue limits, timeouts, and aborts wherever a request can be."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import BadRequest


def test_a_full_queue(bench: Any) -> None:
    sim = bench(600, max_waiting_requests=1)
    sim.add("a", [1])
    sim.add("b", [2])
    error = sim.run().answer("b").finish.error
    assert (error["code"], error["message"]) == ("queue_full", "The request queue is full.")


def test_the_limits_on_queueing_and_running(bench: Any) -> None:
    now = 0.0
    sim = bench(
        600, clock=lambda: now, max_running_requests=1, queue_timeout_s=3.0, running_timeout_s=10.0
    )  # fmt: skip
    sim.add("long", [1], max_new_tokens=500, ignore_eos=True)
    sim.add("late", [2], max_new_tokens=1)
    sim.tick()
    now = 2.9
    sim.tick()
    assert not sim.news
    now = 3.0
    sim.tick()
    assert sim.answer("late").finish.error["code"] == "deadline_exceeded"
    assert "not let in within 3.0 s" in sim.answer("late").finish.error["message"]
    now = 8.0
    sim.add("lucky", [3], max_new_tokens=1)
    now = 10.0
    sim.tick()
    sim.tick()
    error = sim.answer("long").finish.error
    assert error["code"] == "deadline_exceeded"
    assert "not finished within 10.0 s of running" in error["message"]
    assert sim.answer("long").new_ids, "what was generated is given"
    assert sim.scheduler.state()["num_timed_out_requests_total"] == 2
    sim.run()
    assert sim.answer("lucky").finish.type == "length"
    sim.empty()


@pytest.mark.parametrize("name", ["queue_timeout_s", "running_timeout_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_a_limit_is_a_positive_number(bench: Any, name: str, value: float) -> None:
    with pytest.raises(BadRequest, match=name):
        bench(100, **{name: value})


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("how", ["all", "prefix", "each"])
def test_abort_wherever_a_request_is(bench: Any, toy_grammars: Any, how: str, overlap: bool) -> None:
    """Compiling, waiting, in the middle of its prompt, decoding, retracted; the neighbours are untouched."""
    grammars = toy_grammars(ready=False)
    sim = bench(
        150, grammar=grammars, overlap=overlap, max_running_requests=4, chunked_prefill_size=4,
        conservativeness=0.01,
    )  # fmt: skip
    decoding = {"max_new_tokens": 100, "min_new_tokens": 100, "stream": True}
    sim.add("x/decoding", [1, 2], **decoding)
    sim.add("x/decoding 2", [1, 3], **decoding)
    for _ in range(60):
        sim.tick()
    sim.add("x/decoding 3", [1, 4], **decoding)
    while not sim.scheduler.state()["num_retracted_reqs"]:
        sim.tick()
    sim.add("y/decoding", [1, 9], max_new_tokens=4, ignore_eos=True)
    sim.add("x/chunked", [5] * 30, max_new_tokens=2)
    sim.add("x/waiting", [6], max_new_tokens=2)
    sim.add("x/compiling", [7], constraint=Constraint("regex", "a"))
    sim.add("y/compiling", [8], constraint=Constraint("regex", "ab"), max_new_tokens=5)
    mine = {request.rid for request in sim.scheduler._live.values() if request.rid.startswith("x/")}
    assert {"x/chunked", "x/waiting", "x/compiling"} < mine
    match how:
        case "all":
            assert sim.scheduler.abort(None) == len(mine) + 2
            mine |= {"y/decoding", "y/compiling"}
        case "prefix":
            assert sim.scheduler.abort("x/", prefix=True, message="enough") == len(mine)
        case "each":
            assert sim.scheduler.abort("", prefix=True) == sim.scheduler.abort("nobody") == 0
            assert sum(sim.scheduler.abort(rid) for rid in mine) == len(mine)
    grammars.release()
    sim.run()
    for rid in mine:
        error = sim.answer(rid).finish.error
        assert error["code"] == "aborted"
        assert error["message"] == ("enough" if how == "prefix" else "the request was cancelled")
    if how != "all":
        assert len(sim.answer("y/decoding").new_ids) == 4
        assert sim.text("y/compiling") == b"ab"
    assert sim.scheduler.state()["num_aborted_requests_total"] == len(mine)
    sim.empty()


def test_a_chunked_prompt_leaves_what_it_computed(bench: Any) -> None:
    sim = bench(600, chunked_prefill_size=10)
    sim.add("a", list(range(35)), max_new_tokens=5)
    sim.tick()
    sim.tick()
    sim.scheduler.abort("a")
    sim.add("b", list(range(36)), max_new_tokens=1)
    assert sim.run().answer("b").cached_tokens == 20
    sim.empty()


def test_tuning(bench: Any) -> None:
    sim = bench(600, max_running_requests=1)
    for rid in "abc":
        sim.add(rid, [1], max_new_tokens=9, ignore_eos=True)
    sim.tick()
    assert sim.scheduler.running == 1
    assert sim.scheduler.tune({"max_running_requests": 3})["max_running_requests"] == 3
    sim.tick()
    assert sim.scheduler.running == 3
    for values, word in (({"page_size": 2}, "cannot be changed"), ({"max_running_requests": "2"}, "integer"),
                         ({"max_running_requests": 0}, "at least 1")):  # fmt: skip
        with pytest.raises(BadRequest, match=word):
            sim.scheduler.tune(values)
    sim.run()
