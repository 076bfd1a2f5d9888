"""Policies in the scheduler, and what each prefers. What all promise: contracts/test_policies.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from runtime.cache.none import NoCache
from runtime.protocol.io_struct import TokenizedGenerateReqInput
from runtime.protocol.registry import UnknownName
from runtime.protocol.sampling import SamplingParams
from runtime.protocol.vocabulary import Vocabulary
from runtime.scheduler.fake import START, draw, follow
from runtime.scheduler.policies import POLICIES
from runtime.scheduler.queues import WaitingQueue
from runtime.scheduler.requests.request import Request


@dataclass
class Waiting:
    arrival: int
    waited: int = 0
    matched: int = 0
    priority: int = 0
    new_tokens: int = 10
    trail: tuple[int, ...] = ()


@pytest.mark.parametrize("name", POLICIES.names())
def test_nobody_starves(bench: Any, name: str) -> None:
    """One stranger among requests that all match a long cached prefix and never stop coming."""
    sim = bench(400, policy=name, max_running_requests=2)
    stem = [1, 2, 3, 4] * 10
    sim.add("first", [*stem, 5], max_new_tokens=1)
    sim.run()
    sim.add("stranger", [9, 8, 7], max_new_tokens=2)
    for number in range(1000):
        for part in range(2):
            sim.add(f"{number}.{part}", [*stem, number % 30, part], max_new_tokens=2, ignore_eos=True)
        sim.tick()
        if "stranger" in sim.news:
            break
    assert number < 150, "it waited for ever"
    sim.run()


def test_the_longest_prefix_goes_first() -> None:
    order = POLICIES.load("lpm")
    waiting = [Waiting(0, matched=3), Waiting(1, matched=9), Waiting(2, matched=9), Waiting(3, waited=10_000)]
    assert [one.arrival for one in order(waiting)] == [3, 1, 2, 0]


def arrivals(name: str, waiting: list[Waiting]) -> list[int]:
    return [one.arrival for one in POLICIES.load(name)(waiting)]


def test_beyond_the_window_lpm_goes_by_arrival() -> None:
    waiting = [Waiting(number, matched=number) for number in range(200)]
    assert arrivals("lpm", waiting) == [*range(127, -1, -1), *range(128, 200)]


def test_dfs_weight_walks_the_heavier_branch_first() -> None:
    """Node 1 has the branches 2 (two requests) and 3 (three, two of them below its child 4)."""
    trails = [(1, 2), (1, 3, 4), (1,), (1, 3), (1, 2), (1, 3, 4), (), (9,)]
    waiting = [Waiting(number, trail=trail) for number, trail in enumerate(trails)]
    assert arrivals("dfs-weight", waiting) == [1, 5, 3, 0, 4, 2, 7, 6]


def test_the_longest_output_goes_first() -> None:
    assert arrivals(
        "lof", [Waiting(0, new_tokens=3), Waiting(1, new_tokens=9), Waiting(2, 64, new_tokens=1)]
    ) == [
        2,
        1,
        0,
    ]


def test_priorities_hold_for_long() -> None:
    waiting = [
        Waiting(0, 1000),
        Waiting(1, priority=2),
        Waiting(2, priority=2),
        Waiting(3, 1024, priority=-9),
    ]
    assert arrivals("priority", waiting) == [3, 1, 2, 0]


def test_random_is_no_order_of_arrival() -> None:
    assert arrivals("random", [Waiting(number) for number in range(50)]) != list(range(50))


@pytest.mark.parametrize("name", POLICIES.names())
def test_all_answer_the_same(bench: Any, name: str) -> None:
    """A policy changes when, not what."""
    sim = bench(300, policy=name, max_running_requests=4, chunked_prefill_size=16)
    for number in range(24):
        stem = [1, 2, 3] * (number % 3 * 8)
        sim.add(
            str(number), [*stem, number], max_new_tokens=number % 7 + 1, ignore_eos=True, priority=number % 4
        )
    sim.run()
    for number in range(24):
        prompt = [*[1, 2, 3] * (number % 3 * 8), number]
        ids: list[int] = []
        while len(ids) < number % 7 + 1:
            ids.append(draw(follow(START, [*prompt, *ids]), len(sim.vocabulary)))
        assert sim.answer(str(number)).new_ids == ids
    sim.empty()


def test_an_unknown_policy_lists_the_known_ones(bench: Any) -> None:
    with pytest.raises(UnknownName, match="dfs-weight, fcfs, lof, lpm"):
        bench(10, policy="nonsense")


def test_retracted_ones_go_before_any_policy(vocabulary: Vocabulary) -> None:
    def request(number: int) -> Request:
        source = TokenizedGenerateReqInput(rid=str(number), input_ids=[1], sampling_params=SamplingParams())
        return Request(source, number, vocabulary, 0.0, 0)

    queue = WaitingQueue(lambda waiting: sorted(waiting, key=lambda one: -one.arrival))
    requests = [request(number) for number in range(5)]
    for one in requests[2:]:
        queue.add(one)
    queue.put_back(requests[1])
    queue.put_back(requests[0])
    assert [one.arrival for one in queue.order(NoCache(), 0)] == [0, 1, 4, 3, 2]
    queue.remove(requests[1])
    assert len(queue) == 4
