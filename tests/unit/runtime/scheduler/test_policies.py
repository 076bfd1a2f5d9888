"""Policies in the scheduler, and what each prefers. What all promise: contracts/test_policies.py."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import hypothesis
import pytest
from hypothesis import settings
from hypothesis import strategies as st

from runtime.cache.radix import NoCache
from runtime.protocol.io_struct import TokenizedGenerateReqInput
from runtime.protocol.registry import UnknownName
from runtime.protocol.sampling import SamplingParams
from runtime.protocol.vocabulary import Vocabulary
from runtime.scheduler.policies import POLICIES
from runtime.scheduler.queues import WaitingQueue
from runtime.scheduler.requests.request import Request
from tests.exploring import tries
from tests.unit.runtime.scheduler.fake import START, draw, follow


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


# -- among clients -------------------------------------------------------------------------------------------


class Clients:
    """Each has some requests waiting all the time. sizes: flow -> (prompt tokens, output tokens); labelled:
    whether the scheduler knows whose they are."""

    def __init__(
        self, sim: Any, sizes: dict[str, tuple[int, int]], rng: random.Random, labelled: bool = True
    ):
        self.sim, self.sizes, self.rng, self.labelled = sim, sizes, rng, labelled
        self.sent: Counter[str] = Counter()
        self.live: Counter[str] = Counter()
        self.given: Counter[str] = Counter()  # prompt tokens computed, and twice what was generated
        self._counted: Counter[str] = Counter()  # by request

    def send(self, flow: str) -> None:
        prompt, output = self.sizes[flow]
        ids = [self.rng.randrange(30) for _ in range(self.rng.randint(1, prompt))]
        label = flow if self.labelled else None
        self.sim.add(
            f"{flow}{self.sent[flow]}", ids, max_new_tokens=self.rng.randint(1, output), ignore_eos=True,
            stream=True, flow=label,
        )  # fmt: skip
        self.sent[flow] += 1
        self.live[flow] += 1

    def tick(self, backlog: dict[str, int]) -> None:
        for flow, count in backlog.items():
            while self.live[flow] < count:
                self.send(flow)
        for output in self.sim.tick():
            tokens = output.prompt_tokens - output.cached_tokens + 2 * output.completion_tokens
            self.given[output.rid[0]] += tokens - self._counted[output.rid]
            self._counted[output.rid] = tokens
            if output.finish is not None:
                assert output.finish.type == "length"
                self.live[output.rid[0]] -= 1


def apart(make_bench: Any, policy: str, seed: int, sizes: dict[str, tuple[int, int]], labelled: bool) -> int:
    """How far apart the two that were given most and least ever are."""
    sim = make_bench(4000, policy=policy, max_running_requests=4, chunked_prefill_size=64)
    clients = Clients(sim, sizes, random.Random(seed), labelled)
    backlog = {flow: 12 if flow == "a" else 5 for flow in sizes}
    most = 0
    for _ in range(600):
        clients.tick(backlog)
        all_given = [clients.given[flow] for flow in sizes]
        most = max(most, max(all_given) - min(all_given))
    return most


@pytest.mark.parametrize("policy", POLICIES.names())
def test_flows_with_a_backlog_are_given_the_same(make_bench: Any, policy: str) -> None:
    """Within the bound of virtual token counters: twice the longest prompt, or what a batch generates."""
    sizes = {"a": (20, 8), "b": (6, 30)}
    bound = 2 * max(20, 2 * 4 * 30)
    assert apart(make_bench, policy, 7, sizes, True) <= bound
    if policy == "fcfs":  # which alone goes by how many each has sent
        assert apart(make_bench, policy, 7, sizes, False) > 3 * bound


@settings(max_examples=tries(8), deadline=None)
@hypothesis.given(
    seed=st.integers(0, 1 << 20),
    sizes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30)), min_size=2, max_size=4),
)
def test_any_flows_are_given_the_same(make_bench: Any, seed: int, sizes: list[tuple[int, int]]) -> None:
    named = dict(zip("abcd", sizes))
    bound = 2 * max(max(prompt for prompt, _ in sizes), 2 * 4 * max(output for _, output in sizes))
    assert apart(make_bench, "lpm", seed, named, True) <= bound


@pytest.mark.parametrize("policy", POLICIES.names())
def test_a_light_flow_does_not_wait_for_a_heavy_one(bench: Any, policy: str) -> None:
    """Its request gets the next place, whatever it looks like to the policy, and whatever came before it."""
    sim = bench(4000, policy=policy, max_running_requests=4)
    clients = Clients(sim, {"h": (10, 40), "l": (10, 4)}, random.Random(3))
    for _ in range(20):
        clients.tick({"h": 60})
    before = clients.sent["h"] - clients.live["h"]
    clients.send("l")
    while clients.live["l"]:
        clients.tick({"h": 60})
    assert clients.sent["h"] - clients.live["h"] - before <= 4


def test_an_idle_flow_gathers_no_claim(bench: Any) -> None:
    """After a long time alone, who stayed gets half as soon as the other is back, and not less."""
    sim = bench(4000, policy="fcfs", max_running_requests=4)
    clients = Clients(sim, {"a": (10, 20), "b": (10, 20)}, random.Random(5))
    clients.tick({"b": 1})
    for _ in range(600):
        clients.tick({"a": 12})
    before = Counter(clients.given)
    for _ in range(600):
        clients.tick({"a": 12, "b": 40})
    gained = [clients.given[flow] - before[flow] for flow in "ab"]
    assert abs(gained[0] - gained[1]) <= 2 * 2 * 4 * 20
    sim.run()
    assert not sim.scheduler._waiting.flows._served


def test_priority_comes_before_whose_turn_it_is(bench: Any) -> None:
    """With that policy alone; with others a priority is no way past other clients."""
    for policy, first in (("priority", "h"), ("fcfs", "l")):
        sim = bench(400, policy=policy, max_running_requests=1)
        sim.add("h0", [1], max_new_tokens=30, ignore_eos=True, flow="h")
        sim.tick()
        for number in range(1, 6):
            sim.add(
                f"h{number}", [number], max_new_tokens=2, ignore_eos=True, flow="h", priority=number % 3 + 1
            )
        sim.add("l", [9], max_new_tokens=2, ignore_eos=True, flow="l")
        sim.run()
        ended = [rid for rid, news in sim.news.items() if news[-1].finish is not None]
        assert ended[1][0] == first


def test_a_full_queue_keeps_no_client_out(bench: Any) -> None:
    sim = bench(400, policy="fcfs", max_running_requests=1, max_waiting_requests=4)
    sim.add("h", [1], max_new_tokens=9, ignore_eos=True, flow="h")
    sim.tick()
    for number in range(5):
        sim.add(f"h{number}", [number], max_new_tokens=2, ignore_eos=True, flow="h")
    sim.add("l0", [9], max_new_tokens=2, ignore_eos=True, flow="l")
    sim.add("l1", [9], max_new_tokens=2, ignore_eos=True, flow="l")
    sim.add("l2", [9], max_new_tokens=2, ignore_eos=True, flow="l")
    sim.run()
    refused = {rid for rid in sim.news if sim.answer(rid).finish.type == "abort"}
    assert refused == {"h4", "h3", "h2", "l2"}  # the last to come of who has most, until both have the same
    assert all("queue is full" in sim.answer(rid).finish.error["message"] for rid in refused)
