"""What every schedule policy of the table promises: a permutation of the queue, and nobody starves."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.scheduler.policies import POLICIES
from runtime.scheduler.queues import Flows
from tests.exploring import tries


@dataclass
class Waiting:
    arrival: int
    waited: int = 0
    matched: int = 0
    priority: int = 0
    new_tokens: int = 10
    trail: tuple[int, ...] = ()
    flow: str | None = None
    cost: int = 1


CANDIDATES = st.lists(
    st.tuples(
        st.integers(0, 2000),
        st.integers(0, 50),
        st.integers(-3, 3),
        st.integers(0, 99),
        st.lists(st.integers(1, 9), max_size=4, unique=True),
    ),
    max_size=200,
)


@pytest.mark.parametrize("name", POLICIES.names())
@settings(max_examples=tries(40), deadline=None)
@given(found=CANDIDATES)
def test_a_permutation_always_the_same(name: str, found: list[tuple[int, int, int, int, list[int]]]) -> None:
    waiting = [
        Waiting(number, waited, matched, priority, new, tuple(trail))
        for number, (waited, matched, priority, new, trail) in enumerate(found)
    ]
    before = list(waiting)
    ordered = POLICIES.load(name)(waiting)
    assert sorted(one.arrival for one in ordered) == list(range(len(waiting)))
    assert waiting == before, "the queue itself is not the policy's to change"
    assert POLICIES.load(name)(waiting) == ordered


@pytest.mark.parametrize("name", POLICIES.names())
@pytest.mark.parametrize("backlog", [8, 300])
def test_nobody_starves(name: str, backlog: int) -> None:
    """Two are let in a tick; as many come, each more attractive than the first by every measure."""
    rng = random.Random(1)
    waiting = [Waiting(0, new_tokens=1, priority=-5)]
    came = 1
    for _tick in range(5000):
        while len(waiting) < backlog:
            waiting.append(Waiting(came, 0, 50, rng.randrange(3), rng.randrange(50, 99), (1, 2)))
            came += 1
        for chosen in POLICIES.load(name)(waiting)[:2]:
            waiting.remove(chosen)
        if not any(one.arrival == 0 for one in waiting):
            return
        for one in waiting:
            one.waited += 1
    raise AssertionError("it waited for ever")


# -- among clients -------------------------------------------------------------------------------------------

FLOWS = st.lists(
    st.tuples(st.sampled_from([None, "a", "b", "c"]), st.integers(0, 2), st.integers(0, 50)), max_size=60
)


@pytest.mark.parametrize("name", POLICIES.names())
@settings(max_examples=tries(40), deadline=None)
@given(found=FLOWS, owed=st.dictionaries(st.sampled_from([None, "a", "b"]), st.integers(0, 200)))
def test_the_next_is_always_of_the_flow_that_was_given_least(
    name: str, found: list[tuple[str | None, int, int]], owed: dict[str | None, int]
) -> None:
    """A permutation of what the policy says, which keeps its order within each flow."""
    waiting = [
        Waiting(number, priority=priority, flow=flow, cost=cost)
        for number, (flow, priority, cost) in enumerate(found)
    ]
    flows = Flows()
    for one in waiting:
        flows.came(one.flow)
    for flow, tokens in owed.items():
        flows.spend(flow, tokens)
    ordered = POLICIES.load(name)(waiting)
    fair = flows.in_turn(list(ordered), by_priority=name == "priority")
    assert sorted(one.arrival for one in fair) == list(range(len(waiting)))
    for flow in (None, "a", "b", "c"):
        assert [one for one in fair if one.flow == flow] == [one for one in ordered if one.flow == flow]
    if name == "priority":
        assert [one.priority for one in fair] == [one.priority for one in ordered]
    given = {flow: flows.served(flow) for flow in (None, "a", "b", "c")}
    for place, one in enumerate(fair):
        rivals = [
            other
            for other in fair[place:]
            if len({another.flow for another in waiting}) > 1
            and (name != "priority" or other.priority == one.priority)
        ]
        assert all(given[one.flow] <= given[other.flow] for other in rivals)
        given[one.flow] += one.cost


@pytest.mark.parametrize("name", POLICIES.names())
def test_one_flow_is_left_to_the_policy(name: str) -> None:
    for flow in (None, "a"):
        waiting = [
            Waiting(number, matched=number % 5, priority=number % 3, flow=flow) for number in range(50)
        ]
        flows = Flows()
        for one in waiting:
            flows.came(one.flow)
        ordered = POLICIES.load(name)(waiting)
        assert flows.in_turn(ordered, by_priority=name == "priority") is ordered


def test_counters_of_flows_that_are_gone_are_few() -> None:
    flows = Flows()
    flows.came("stays")
    for number in range(5000):
        flows.came(str(number))
        flows.spend(str(number), 1)
        flows.spend("stays", 1)
        flows.left(str(number))
    assert len(flows._served) < 2000
    flows.left("stays")
    assert not flows._served
