"""Schedule policies: `order(waiting)` functions by name. A policy orders; it admits nothing and knows no
slots.

A policy returns a permutation of its argument, which is in order of arrival, and lets no request starve: one
that waited long enough comes first, whatever arrives later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import msgspec

from runtime.cache.radix import NoCache, RadixCache
from runtime.protocol.registry import Registry
from runtime.scheduler.requests.request import Request

Order: TypeAlias = Callable[[Sequence[Any]], list[Any]]
"""Candidates in order of arrival -> the same candidates in the order in which they are tried."""

MAX_WAIT = 64  # scheduler ticks
PRIORITY_MAX_WAIT = 1024  # the same with the policy "priority"
WINDOW = 128  # requests that are looked up in the cache and compared, the oldest first


REFRESH = 8  # for so many ticks a look-up in the cache is used again


class Moment:
    """When an order is made: the prefix cache and the scheduler's tick."""

    cache: RadixCache = NoCache()
    tick = 0


class Candidate(msgspec.Struct, eq=False):
    """A waiting request as policies see it. What it reports of the cache may be REFRESH ticks old: only an
    order depends on it. arrival: its number in the order of arrival. new_tokens: that it may generate."""

    request: Request
    now: Moment
    arrival: int
    priority: int
    flow: str | None
    new_tokens: int
    _matched: int = 0
    _trail: tuple[int, ...] = ()
    _looked: int = -REFRESH

    @property
    def waited(self) -> int:
        """Scheduler ticks since it could have been admitted."""
        return self.now.tick - self.request.timing.queued_tick

    @property
    def cost(self) -> int:
        """The prompt tokens to compute, by the last look-up in the cache."""
        return max(1, len(self.request.tokens) - self._matched) if self.request.cached < 0 else 0

    @property
    def matched(self) -> int:
        """Tokens of its prompt that the cache holds. Looked up when read, which costs something."""
        self._look()
        return self._matched

    @property
    def trail(self) -> tuple[int, ...]:
        """Ids of the cache nodes that hold them, root first. Likewise."""
        self._look()
        return self._trail

    def _look(self) -> None:
        now, request = self.now, self.request
        if now.tick - self._looked >= REFRESH:
            self._looked = now.tick
            prefix = request.tokens[: request.matchable]
            self._trail, self._matched = now.cache.trail(prefix, request.source.extra_key)


def by_age(waiting: Sequence[Candidate], limit: int = MAX_WAIT) -> tuple[list[Candidate], list[Candidate]]:
    """What keeps policies fair: those that waited `limit` ticks, and the others; each in order of arrival."""
    aged: list[Candidate] = []
    others: list[Candidate] = []
    for candidate in waiting:
        (aged if candidate.waited >= limit else others).append(candidate)
    return aged, others


def dfs_weight(waiting: Sequence[Candidate]) -> list[Candidate]:
    """Depth first through the prefix tree, the branch with most waiting requests first: requests that share a
    prefix go one after another, so that each branch is read while it is cached (the offline order of Zheng et
    al., "SGLang", section 3). Looks up the WINDOW oldest only, as lpm does."""
    aged, others = by_age(waiting[:WINDOW])
    weight: dict[int, int] = {}
    for candidate in others:
        for node in candidate.trail:
            weight[node] = weight.get(node, 0) + 1

    def sort_key(candidate: Candidate) -> tuple[tuple[tuple[int, int], ...], int]:
        # A path sorts like the walk: heavier branches first, ties by node; a node's own requests come after
        # those below it, hence the end mark, which no weight reaches.
        path = tuple((-weight[node], node) for node in candidate.trail)
        return (*path, (1, 0)), candidate.arrival

    others.sort(key=sort_key)
    return [*aged, *others, *waiting[WINDOW:]]


def fcfs(waiting: Sequence[Candidate]) -> list[Candidate]:
    """First come, first served."""
    return sorted(waiting, key=lambda candidate: candidate.arrival)


def lof(waiting: Sequence[Candidate]) -> list[Candidate]:
    """Longest output first: what takes longest starts first, so that a batch ends sooner."""
    aged, others = by_age(waiting)
    others.sort(key=lambda candidate: (-candidate.new_tokens, candidate.arrival))
    return aged + others


def lpm(waiting: Sequence[Candidate]) -> list[Candidate]:
    """Longest prefix match first: what the cache holds is used before it is evicted; near-optimal for shared
    prefixes (Zheng et al., "SGLang", theorem 3.1). Looking all of them up costs too much when very many wait:
    beyond the WINDOW oldest they go by arrival."""
    aged, others = by_age(waiting[:WINDOW])
    others.sort(key=lambda candidate: (-candidate.matched, candidate.arrival))
    return [*aged, *others, *waiting[WINDOW:]]


def priority(waiting: Sequence[Candidate]) -> list[Candidate]:
    """Highest priority first, then by arrival. With it a request of clearly higher priority may take the
    place of running ones (SchedulerConfig.preemption_threshold). One that waited PRIORITY_MAX_WAIT ticks goes
    first whatever its priority: priorities count for long, and still none starves."""
    aged, others = by_age(waiting, PRIORITY_MAX_WAIT)
    others.sort(key=lambda candidate: (-candidate.priority, candidate.arrival))
    return aged + others


def shuffled(waiting: Sequence[Candidate]) -> list[Candidate]:
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
