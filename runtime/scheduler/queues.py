"""Where requests wait for a place, ready to run. Knows no slots and no plans."""

from __future__ import annotations

import itertools
from collections import Counter
from operator import attrgetter, itemgetter

from runtime.cache.prefix_cache import NoCache, PrefixCache
from runtime.scheduler.flows import Flows
from runtime.scheduler.policies import Order
from runtime.scheduler.requests.request import Request

REFRESH = 8  # ticks a look into the cache is good for
_ARRIVAL = attrgetter("arrival")


class WaitingQueue:
    """Requests ready to run, in order of arrival; retracted ones in front of all others, whatever the
    policy. flows: whose turn it is among clients. by_priority: the policy is one by priority, which comes
    before that."""

    def __init__(self, order: Order, *, by_priority: bool = False) -> None:
        self._order, self._by_priority = order, by_priority
        self.flows = Flows()
        self._queue: dict[int, _Candidate] = {}
        self._front: dict[int, Request] = {}
        self._now = _Now(NoCache(), 0)

    def __len__(self) -> int:
        return len(self._queue) + len(self._front)

    @property
    def retracted(self) -> int:
        """How many of them ran before and lost their slots."""
        return len(self._front)

    def add(self, request: Request) -> None:
        self._queue[request.seq] = _Candidate(request, self._now)
        self.flows.came(request.source.flow)

    def put_back(self, request: Request) -> None:
        self._front = {request.seq: request, **self._front}

    def remove(self, request: Request) -> None:
        """Nothing happens when it is not in."""
        if self._queue.pop(request.seq, None) is not None:
            self.flows.left(request.source.flow)
        self._front.pop(request.seq, None)

    def forget(self, request: Request) -> None:
        """It is over, wherever it is."""
        self.remove(request)
        self.flows.ended(request)

    def order(self, cache: PrefixCache, tick: int) -> list[Request]:
        """The order in which to try them now."""
        self._now.cache, self._now.tick = cache, tick
        waiting = sorted(self._queue.values(), key=_ARRIVAL)
        ordered = self.flows.in_turn(in_turn(self._order(waiting)), by_priority=self._by_priority)
        return [*self._front.values(), *[one.request for one in ordered]]

    def by_priority(self) -> list[Request]:
        """Those that never ran or were preempted, the highest priority first, then as flows and arrival have
        it."""
        waiting = sorted(self._queue.values(), key=lambda one: (-one.priority, one.arrival))
        return [one.request for one in self.flows.in_turn(waiting, by_priority=True)]

    def lowest(self) -> Request | None:
        """Who is given up for somebody of higher priority when the queue is full: of the lowest priority,
        the last to come, among those that never ran."""
        return _last([one for one in self._queue.values() if one.request.cached < 0])

    def crowding(self, flow: str | None) -> Request | None:
        """Who is given up for a request of `flow` when the queue is full: the same, of the flow that has most
        requests waiting. None where that has no more than one above `flow`."""
        longest, count = self.flows.longest()
        if count <= self.flows.waiting(flow) + 1:
            return None
        return _last([one for one in self._queue.values() if one.flow == longest and one.request.cached < 0])


def _last(fresh: list[_Candidate]) -> Request | None:
    return min(fresh, key=lambda one: (one.priority, -one.arrival)).request if fresh else None


def in_turn(ordered: list[_Candidate]) -> list[_Candidate]:
    """The same order, but that the second of a group comes behind the first ones of all others, and so on:
    one client's request for a thousand samples does not hold who came after it. Among those of one priority
    that follow one another, so that an order by priority stays one."""
    if all(one.request.source.group is None for one in ordered):
        return ordered
    made: list[_Candidate] = []
    for _, some in itertools.groupby(ordered, key=attrgetter("priority")):
        taken: Counter[str] = Counter()
        ranked: list[tuple[int, _Candidate]] = []
        for one in some:
            group = one.request.source.group
            ranked.append((0 if group is None else taken[group], one))
            if group is not None:
                taken[group] += 1
        made += [one for _, one in sorted(ranked, key=itemgetter(0))]
    return made


class _Now:
    """What the answers of all candidates depend on."""

    __slots__ = ("cache", "tick")

    def __init__(self, cache: PrefixCache, tick: int) -> None:
        self.cache, self.tick = cache, tick


class _Candidate:
    """A waiting request as policies see it (policies.Candidate). What it says of the cache may be REFRESH
    ticks old: only an order depends on it."""

    __slots__ = (
        "_looked", "_matched", "_now", "_trail", "_walked", "arrival", "flow", "new_tokens", "priority",
        "request",
    )  # fmt: skip

    def __init__(self, request: Request, now: _Now) -> None:
        self.request = request
        self.arrival = request.arrival
        self.priority, self.flow = request.source.priority, request.source.flow
        self.new_tokens = request.remaining
        self._now = now
        self._matched = 0
        self._trail: tuple[int, ...] = ()
        self._looked = self._walked = -REFRESH

    @property
    def waited(self) -> int:
        return self._now.tick - self.request.timing.queued_tick

    @property
    def cost(self) -> int:
        """What its prompt is expected to count, by what was last seen of the cache."""
        return max(1, len(self.request.tokens) - self._matched) if self.request.cached < 0 else 0

    @property
    def matched(self) -> int:
        if self._now.tick - self._looked >= REFRESH:
            self._looked = self._now.tick
            request = self.request
            self._matched = self._now.cache.probe(
                request.tokens[: request.matchable], request.source.extra_key
            )
        return self._matched

    @property
    def trail(self) -> tuple[int, ...]:
        if self._now.tick - self._walked >= REFRESH:
            self._walked = self._now.tick
            request = self.request
            self._trail = self._now.cache.trail(request.tokens[: request.matchable], request.source.extra_key)
        return self._trail
