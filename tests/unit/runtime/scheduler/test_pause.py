"""pause() and resume(): three modes, whatever is going on."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.protocol.constraint import Constraint
from tests.unit.runtime.scheduler.fake import START, draw, follow


def expected(prompt: list[int], count: int, size: int) -> list[int]:
    ids: list[int] = []
    while len(ids) < count:
        ids.append(draw(follow(START, [*prompt, *ids]), size))
    return ids


@pytest.fixture(params=[False, True], ids=["plain", "overlapped"])
def sim(request: Any, bench: Any) -> Any:
    made = bench(600, overlap=request.param, max_running_requests=2, chunked_prefill_size=16)
    for number in range(4):
        made.add(str(number), [number, *range(20)], max_new_tokens=12, ignore_eos=True, stream=True)
    for _ in range(5):
        made.tick()
    return made


def settle(sim: Any) -> None:
    """Let a step that is under way come in."""
    sim.tick()


def test_in_place_keeps_places_and_slots(sim: Any) -> None:
    sim.scheduler.pause("in_place")
    settle(sim)
    before = sim.scheduler.state()
    assert (before["num_running_reqs"], before["num_paused_reqs"], before["paused"]) == (2, 4, "in_place")
    steps = sim.runner.steps
    for _ in range(5):
        assert sim.tick() == []
    assert sim.runner.steps == steps
    assert sim.scheduler.state()["num_used_tokens"] == before["num_used_tokens"] > 0
    sim.add("late", [9], max_new_tokens=3, ignore_eos=True)
    sim.tick()
    sim.scheduler.resume()
    sim.run()
    for number in range(4):
        answer = sim.answer(str(number))
        assert answer.new_ids == expected([number, *range(20)], 12, len(sim.vocabulary))
        assert answer.retractions == 0
    assert len(sim.answer("late").new_ids) == 3
    sim.empty()


def test_retract_frees_everything_and_goes_on_the_same(sim: Any) -> None:
    sim.scheduler.pause("retract")
    settle(sim)
    state = sim.scheduler.state()
    assert (state["num_running_reqs"], state["num_queue_reqs"], state["free"]) == (0, 4, 600)
    assert state["num_retracted_reqs"] == 2
    sim.scheduler.resume()
    sim.run()
    for number in range(4):
        answer = sim.answer(str(number))
        assert answer.new_ids == expected([number, *range(20)], 12, len(sim.vocabulary))
        assert answer.retractions == (number < 2)
    sim.empty()


def test_abort_ends_all_and_new_ones_wait(sim: Any) -> None:
    sim.scheduler.pause("abort")
    settle(sim)
    for number in range(4):
        assert sim.answer(str(number)).finish.error["code"] == "aborted"
        assert "paused" in sim.answer(str(number)).finish.error["message"]
    sim.add("late", [9], max_new_tokens=3, ignore_eos=True)
    for _ in range(3):
        assert sim.tick() == []
    assert sim.scheduler.busy
    sim.scheduler.resume()
    assert len(sim.run().answer("late").new_ids) == 3
    sim.empty()


def test_pausing_again_changes_the_mode_and_resuming_twice_is_nothing(sim: Any) -> None:
    sim.scheduler.pause("in_place")
    sim.scheduler.pause("retract")
    settle(sim)
    assert sim.scheduler.state()["num_used_tokens"] == 0
    sim.scheduler.pause("abort")
    settle(sim)
    assert not sim.scheduler.busy
    sim.scheduler.resume()
    sim.scheduler.resume()
    assert sim.scheduler.paused is None
    sim.empty()


def test_who_is_paused_can_be_aborted_and_can_be_late(bench: Any, toy_grammars: Any) -> None:
    now = 0.0
    grammars = toy_grammars(ready=False)
    sim = bench(600, grammar=grammars, clock=lambda: now, max_running_requests=1, queue_timeout_s=5.0)
    sim.add("running", [1], max_new_tokens=50, ignore_eos=True)
    sim.add("waiting", [2], max_new_tokens=50, ignore_eos=True)
    sim.add("patient", [3], max_new_tokens=50, ignore_eos=True)
    sim.add("late", [4], max_new_tokens=50, time_left_s=50.0)
    sim.add("compiling", [5], constraint=Constraint("regex", "ab"), max_new_tokens=9)
    sim.tick()
    sim.scheduler.pause("in_place")
    sim.scheduler.abort("running")
    sim.scheduler.abort("waiting")
    grammars.release()
    now = 100.0
    sim.tick()
    assert [sim.answer(rid).finish.error["code"] for rid in ("running", "waiting", "late")] == [
        "aborted", "aborted", "deadline_exceeded",
    ]  # fmt: skip
    sim.scheduler.resume()
    now = 104.0
    sim.tick()
    assert "patient" not in sim.news, "time does not count for the queue's limit while paused"
    sim.run()
    assert sim.answer("patient").finish.type == "length"
    assert sim.text("compiling") == b"ab"
    sim.empty()
