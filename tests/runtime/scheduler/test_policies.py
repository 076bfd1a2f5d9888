"""Every policy in the table orders and starves nobody."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest

from runtime.cache.none import NoCache
from runtime.protocol.io_struct import TokenizedGenerateReqInput
from runtime.protocol.registry import UnknownName
from runtime.protocol.sampling import SamplingParams
from runtime.protocol.vocabulary import Vocabulary
from runtime.scheduler.policies import POLICIES
from runtime.scheduler.queues import WaitingQueue
from runtime.scheduler.request import Request


@dataclass
class Waiting:
    arrival: int
    waited: int = 0
    matched: int = 0
    priority: int = 0
    new_tokens: int = 10


@pytest.mark.parametrize("name", POLICIES.names())
def test_a_permutation(name: str) -> None:
    rng = random.Random(1)
    waiting = [
        Waiting(number, rng.randrange(200), rng.randrange(50), rng.randrange(3), rng.randrange(100))
        for number in range(60)
    ]
    ordered = POLICIES.load(name)(waiting)
    assert sorted(one.arrival for one in ordered) == list(range(60))


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


def test_an_unknown_policy_lists_the_known_ones(bench: Any) -> None:
    with pytest.raises(UnknownName, match="fcfs, lpm"):
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
