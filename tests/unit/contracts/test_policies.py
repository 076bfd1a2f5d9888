"""What every schedule policy of the table promises: a permutation of the queue, and nobody starves."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.scheduler.policies import POLICIES


@dataclass
class Waiting:
    arrival: int
    waited: int = 0
    matched: int = 0
    priority: int = 0
    new_tokens: int = 10
    trail: tuple[int, ...] = ()


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
@settings(max_examples=40, deadline=None)
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
