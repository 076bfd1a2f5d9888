"""Schedule policies: `order(waiting)` functions by name. A policy orders; it admits nothing and knows no
slots.

A policy returns a permutation of its argument, which is in order of arrival, and lets no request starve: one
that waited long enough comes first, whatever arrives later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

from runtime.protocol.registry import Registry


class Candidate(Protocol):
    """What a policy may know of a waiting request."""

    @property
    def arrival(self) -> int:
        """Its number in the order of arrival."""
        ...

    @property
    def waited(self) -> int:
        """Scheduler ticks since it could have been admitted."""
        ...

    @property
    def priority(self) -> int: ...

    @property
    def new_tokens(self) -> int:
        """Tokens it may still generate."""
        ...

    @property
    def matched(self) -> int:
        """Tokens of its prompt that the cache holds now. Looked up when read, which costs something."""
        ...

    @property
    def trail(self) -> tuple[int, ...]:
        """Ids of the cache nodes that hold them, root first. Likewise."""
        ...


C = TypeVar("C", bound=Candidate)


Order: TypeAlias = Callable[[Sequence[Any]], list[Any]]
"""Candidates in order of arrival -> the same candidates in the order in which they are tried."""

MAX_WAIT = 64  # scheduler ticks
PRIORITY_MAX_WAIT = 1024  # the same with the policy "priority"
WINDOW = 128  # requests that are looked up in the cache and compared, the oldest first


def by_age(waiting: Sequence[C], limit: int = MAX_WAIT) -> tuple[list[C], list[C]]:
    """What keeps policies fair: those that waited `limit` ticks, and the others; each in order of arrival."""
    aged: list[C] = []
    others: list[C] = []
    for candidate in waiting:
        (aged if candidate.waited >= limit else others).append(candidate)
    return aged, others


def dfs_weight(waiting: Sequence[C]) -> list[C]:
    """Depth first through the prefix tree, the branch with most waiting requests first: requests that share a
    prefix go one after another, so that each branch is read while it is cached (the offline order of Zheng et
    al., "SGLang", section 3). Looks up the WINDOW oldest only, as lpm does."""
    aged, others = by_age(waiting[:WINDOW])
    weight: dict[int, int] = {}
    for candidate in others:
        for node in candidate.trail:
            weight[node] = weight.get(node, 0) + 1

    def sort_key(candidate: C) -> tuple[tuple[tuple[int, int], ...], int]:
        # A path sorts like the walk: heavier branches first, ties by node; a node's own requests come after
        # those below it, hence the end mark, which no weight reaches.
        path = tuple((-weight[node], node) for node in candidate.trail)
        return (*path, (1, 0)), candidate.arrival

    others.sort(key=sort_key)
    return [*aged, *others, *waiting[WINDOW:]]


def fcfs(waiting: Sequence[C]) -> list[C]:
    """First come, first served."""
    return sorted(waiting, key=lambda candidate: candidate.arrival)


def lof(waiting: Sequence[C]) -> list[C]:
    """Longest output first: what takes longest starts first, so that a batch ends sooner."""
    aged, others = by_age(waiting)
    others.sort(key=lambda candidate: (-candidate.new_tokens, candidate.arrival))
    return aged + others


def lpm(waiting: Sequence[C]) -> list[C]:
    """Longest prefix match first: what the cache holds is used before it is evicted; near-optimal for shared
    prefixes (Zheng et al., "SGLang", theorem 3.1). Looking all of them up costs too much when very many wait:
    beyond the WINDOW oldest they go by arrival."""
    aged, others = by_age(waiting[:WINDOW])
    others.sort(key=lambda candidate: (-candidate.matched, candidate.arrival))
    return [*aged, *others, *waiting[WINDOW:]]


def priority(waiting: Sequence[C]) -> list[C]:
    """Highest priority first, then by arrival. With it a request of clearly higher priority may take the
    place of running ones (SchedulerConfig.preemption_threshold). One that waited PRIORITY_MAX_WAIT ticks goes
    first whatever its priority: priorities count for long, and still none starves."""
    aged, others = by_age(waiting, PRIORITY_MAX_WAIT)
    others.sort(key=lambda candidate: (-candidate.priority, candidate.arrival))
    return aged + others


def shuffled(waiting: Sequence[C]) -> list[C]:
    """A random order; always the same for the same arrivals, so that a run can be repeated."""
    aged, others = by_age(waiting)
    others.sort(key=lambda candidate: (_mixed(candidate.arrival), candidate.arrival))
    return aged + others


def _mixed(number: int) -> int:
    """A number that looks random (the finaliser of splitmix64)."""
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return number ^ (number >> 31)


POLICIES: Registry[Order] = Registry(
    "schedule policy",
    {
        "dfs-weight": "runtime.scheduler.policies:dfs_weight",
        "fcfs": "runtime.scheduler.policies:fcfs",
        "lof": "runtime.scheduler.policies:lof",
        "lpm": "runtime.scheduler.policies:lpm",
        "priority": "runtime.scheduler.policies:priority",
        "random": "runtime.scheduler.policies:shuffled",
    },
)
