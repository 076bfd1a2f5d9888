"""Many sequences of one request and others at once: they are admitted in turn, and leave some room."""

from __future__ import annotations

from typing import Any

import pytest

LONG = {"max_new_tokens": 40, "ignore_eos": True}


def started(sim: Any, ticks: int) -> list[str]:
    """Who has had an output, in that order."""
    for _ in range(ticks):
        sim.tick()
    return [rid for rid, news in sim.news.items() if any(one.new_ids for one in news)]


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "dfs-weight", "priority"])
def test_one_request_of_many_samples_does_not_hold_others(bench: Any, policy: str) -> None:
    sim = bench(8000, max_running_requests=16, policy=policy)
    for index in range(200):
        sim.add(f"many-{index}", [1, 2, 3], group="g", stream=True, **LONG)
    sim.tick()
    assert sim.scheduler.state()["num_running_reqs"] == 14, "an eighth of the places is left to others"
    for index in range(2):
        sim.add(f"one-{index}", [4 + index], stream=True, max_new_tokens=4, ignore_eos=True)
    assert {"one-0", "one-1"} <= set(started(sim, 4))
    sim.run()
    assert len(sim.news) == 202
    sim.empty()


def test_who_comes_later_waits_for_one_of_each_group_only(bench: Any) -> None:
    """The same when all places are taken: at most one of the group goes before it."""
    sim = bench(8000, max_running_requests=4)
    for index in range(50):
        sim.add(f"many-{index}", [1, 2, 3], group="g", stream=True, **LONG)
    sim.tick()
    sim.add("a", [5], stream=True, **LONG)  # takes the place that is left
    sim.tick()
    sim.add("b", [6], stream=True, max_new_tokens=2, ignore_eos=True)
    while "b" not in sim.news:
        sim.tick()
    begun = [rid for rid in sim.news if rid.startswith("many")]
    assert len(begun) <= 3 + 3, "and not all fifty"
    sim.run()
    sim.empty()


def test_some_slots_are_left_to_others(bench: Any) -> None:
    sim = bench(800, max_running_requests=64)
    for index in range(60):
        sim.add(f"many-{index}", [index % 20 + 1, 2, 3], group="g", stream=True, **LONG)
    sim.tick()
    assert 0 < sim.scheduler.state()["num_running_reqs"] < 60
    sim.add("one", [7] * 20, stream=True, max_new_tokens=20, ignore_eos=True)
    assert "one" in started(sim, 4)
    sim.run()
    sim.empty()


def test_two_large_requests_share(bench: Any) -> None:
    sim = bench(8000, max_running_requests=8)
    for group in ("g", "h"):
        for index in range(40):
            sim.add(f"{group}-{index}", [1, 2, 3], group=group, stream=True, max_new_tokens=3)
    names = started(sim, 40)[:40]
    assert 10 <= sum(rid.startswith("g") for rid in names) <= 30
    sim.run()
    sim.empty()


def test_a_request_alone_in_a_small_engine(bench: Any) -> None:
    sim = bench(300, max_running_requests=1)
    for index in range(3):
        sim.add(f"many-{index}", [1, 2, 3], group="g", max_new_tokens=3)
    sim.run()
    assert len(sim.news) == 3
