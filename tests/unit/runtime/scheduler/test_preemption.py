"""The policy `priority`: who takes whose place, and that it ends."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.protocol.errors import BadRequest
from tests.exploring import tries
from tests.unit.runtime.scheduler.fake import START, draw, follow


def expected(prompt: list[int], count: int, size: int) -> list[int]:
    ids: list[int] = []
    while len(ids) < count:
        ids.append(draw(follow(START, [*prompt, *ids]), size))
    return ids


def running(sim: Any) -> list[str]:
    return [request.rid for request in sim.scheduler._batch.running]


def test_a_seat_is_taken_and_given_back(bench: Any) -> None:
    sim = bench(1000, policy="priority", max_running_requests=2)
    for rid, priority in (("low", 0), ("lower", -1)):
        sim.add(rid, [1, 2, priority + 5], max_new_tokens=40, ignore_eos=True, priority=priority, stream=True)
    for _ in range(5):
        sim.tick()
    sim.add("high", [7, 8], max_new_tokens=5, ignore_eos=True, priority=10, stream=True)
    sim.tick()
    assert running(sim) == ["low", "high"]
    sim.run()
    state = sim.scheduler.state()
    assert (state["num_preemptions_total"], state["num_retractions_total"]) == (1, 1)
    for rid, prompt, count in (("low", [1, 2, 5], 40), ("lower", [1, 2, 4], 40), ("high", [7, 8], 5)):
        answer = sim.answer(rid)
        assert answer.new_ids == expected(prompt, count, len(sim.vocabulary))
        assert answer.retractions == (rid == "lower")
    sim.empty()


@pytest.mark.parametrize(
    ("priority", "threshold", "taken"), [(9, 10, False), (10, 10, True), (99, None, False)]
)
def test_only_clearly_higher_ones_and_only_if_wanted(
    bench: Any, priority: int, threshold: int | None, taken: bool
) -> None:
    sim = bench(1000, policy="priority", max_running_requests=1, preemption_threshold=threshold)
    sim.add("low", [1], max_new_tokens=20, ignore_eos=True)
    sim.tick()
    sim.add("high", [2], max_new_tokens=20, ignore_eos=True, priority=priority)
    sim.tick()
    assert running(sim) == (["high"] if taken else ["low"])
    sim.run()


def test_other_policies_never_preempt(bench: Any) -> None:
    sim = bench(1000, policy="lpm", max_running_requests=1)
    sim.add("low", [1], max_new_tokens=20, ignore_eos=True)
    sim.tick()
    sim.add("high", [2], max_new_tokens=20, ignore_eos=True, priority=1000)
    sim.tick()
    assert running(sim) == ["low"]
    sim.run()


def test_no_more_go_than_must(bench: Any) -> None:
    """Slots are short, not seats: 60 and 36 are needed, each running one holds or may need 30."""
    sim = bench(100, policy="priority", page_size=1)
    for number in range(3):
        sim.add(str(number), [number] * 20, max_new_tokens=10, ignore_eos=True, priority=number)
        sim.tick()
    sim.add("high", [9] * 30, max_new_tokens=6, ignore_eos=True, priority=50)
    sim.tick()
    assert running(sim) == ["1", "2", "high"]
    sim.run()
    sim.empty()


def test_nothing_goes_where_it_would_not_help(bench: Any) -> None:
    sim = bench(100, policy="priority", preemption_threshold=10)
    sim.add("peer", [1] * 40, max_new_tokens=30, ignore_eos=True, priority=50)
    sim.add("low", [2] * 10, max_new_tokens=10, ignore_eos=True)
    sim.tick()
    sim.add("high", [9] * 60, max_new_tokens=30, ignore_eos=True, priority=50)
    for _ in range(4):
        sim.tick()
    assert running(sim) == ["peer", "low"]
    assert sim.scheduler.state()["preemptions"] == 0
    sim.run()
    sim.empty()


def test_nobody_loses_its_place_for_ever(bench: Any) -> None:
    sim = bench(1000, policy="priority", max_running_requests=1, max_preemptions=2)
    sim.add("low", [1], max_new_tokens=30, ignore_eos=True)
    for number in range(200):
        sim.add(str(number), [2, number % 30], max_new_tokens=3, ignore_eos=True, priority=20)
        sim.tick()
        if "low" in sim.news:
            break
    sim.run()
    assert sim.scheduler.state()["preemptions"] <= 2
    assert sim.answer("low").new_ids == expected([1], 30, len(sim.vocabulary))


def test_when_the_queue_is_full_the_lowest_makes_way(bench: Any) -> None:
    sim = bench(1000, policy="priority", max_running_requests=1, max_waiting_requests=2)
    sim.add("running", [1], max_new_tokens=5, ignore_eos=True, priority=99)
    sim.tick()
    for rid, priority in (("a", 1), ("b", 1), ("c", 1), ("d", 2)):
        sim.add(rid, [2], max_new_tokens=1, priority=priority)
    sim.run()
    assert {rid: sim.answer(rid).finish.type for rid in "abcd"} == {
        "a": "length", "b": "abort", "c": "abort", "d": "length",
    }  # fmt: skip
    assert sim.answer("b").finish.error["code"] == "queue_full"


@pytest.mark.parametrize("field", ["preemption_threshold", "max_preemptions"])
def test_numbers_are_checked(bench: Any, field: str) -> None:
    with pytest.raises(BadRequest, match=field):
        bench(100, **{field: 0})


@settings(max_examples=tries(25), deadline=None)
@given(seed=st.integers(0, 10**6), page=st.sampled_from([1, 4]), overlap=st.booleans())
def test_random_priorities_change_no_output(seed: int, page: int, overlap: bool, make_bench: Any) -> None:
    rng = random.Random(seed)
    sim = make_bench(
        160, policy="priority", page_size=page, max_running_requests=rng.randrange(1, 5), overlap=overlap,
        chunked_prefill_size=rng.choice([5, 64]), preemption_threshold=rng.choice([1, 3]),
    )  # fmt: skip
    sent: dict[str, tuple[list[int], int]] = {}
    while len(sent) < 30 or sim.scheduler.busy:
        if len(sent) < 30 and rng.random() < 0.5:
            prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 50))]
            sent[str(len(sent))] = prompt, rng.randrange(1, 30)
            sim.add(
                str(len(sent) - 1), prompt, max_new_tokens=sent[str(len(sent) - 1)][1], ignore_eos=True,
                priority=rng.randrange(6), stream=rng.random() < 0.5,
            )  # fmt: skip
        sim.tick()
    for rid, (prompt, count) in sent.items():
        assert sim.answer(rid).new_ids == expected(prompt, count, len(sim.vocabulary))
    sim.empty()
