"""Requests that wait to run, and whose turn it is among the clients of an engine. Knows no slots and no
plans.

A flow is what one client asks for; None: requests without a label. Flows are compared by virtual token
counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): the next request is of the
flow that has been served least. The order within a flow is the schedule policy's.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from operator import attrgetter, itemgetter
from typing import Any, TypeVar

from runtime.cache.radix import RadixCache
from runtime.scheduler.policies import Candidate, Moment, Order
from runtime.scheduler.requests.request import Request

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1, 2
"""What a computed prompt token and an output token count."""
MOST_IDLE = 1024
"""Counters of flows without a request that are kept."""

Flow = str | None
W = TypeVar("W")
_ARRIVAL = attrgetter("arrival")


class Flows:
    """What each flow was served since the engine was idle last, in weighted tokens. A flow that has nothing
    waiting gathers no claim: when it comes back it is put level with the least served of those that wait."""

    def __init__(self) -> None:
        self._served: dict[Flow, float] = {}
        self._waiting: Counter[Flow] = Counter()
        self._admitted: Counter[Flow] = Counter()
        self._running: dict[int, tuple[Request, int]] = {}  # seq -> request, output tokens that are counted

    def served(self, flow: Flow) -> float:
        self._count()
        return self._served.get(flow, 0.0)

    def waiting(self, flow: Flow) -> int:
        return self._waiting[flow]

    def longest(self) -> tuple[Flow, int]:
        """The flow that has most requests waiting, and how many."""
        return max(self._waiting.items(), key=lambda item: item[1], default=(None, 0))

    def came(self, flow: Flow) -> None:
        """One more request of it waits."""
        if not self._waiting[flow]:
            others = self._waiting.keys() or self._admitted.keys() - {flow}
            if others:
                self._count()
                least = min(self._served.get(other, 0.0) for other in others)
                self._served[flow] = max(self._served.get(flow, 0.0), least)
                self._forget(least)
        self._waiting[flow] += 1

    def left(self, flow: Flow) -> None:
        """One of its requests no longer waits."""
        _decrement(self._waiting, flow)
        self._reset_if_idle()

    def spend(self, flow: Flow, tokens: int) -> None:
        """So many prompt tokens are computed for it."""
        self._served[flow] = self._served.get(flow, 0.0) + PROMPT_WEIGHT * tokens

    def admitted(self, request: Request, tokens: int) -> None:
        """So many tokens of its prompt are computed, and what it generates counts from now on."""
        flow = request.source.flow
        self.spend(flow, tokens)
        self._admitted[flow] += 1
        self._running[request.seq] = request, 0

    def ended(self, request: Request) -> None:
        """Nothing happens if it was not admitted."""
        running = self._running.pop(request.seq, None)
        if running is not None:
            self._add(*running)
            _decrement(self._admitted, request.source.flow)
            self._reset_if_idle()

    def in_turn(self, ordered: list[W], *, by_priority: bool) -> list[W]:
        """The same requests (anything with flow, priority and cost: the expected prompt tokens), the next one
        always of the flow that was served least, and in the same order within each flow. by_priority: only
        among neighbours of one priority."""
        if len(self._waiting) < 2:
            return ordered
        self._count()
        served, running = dict(self._served), Counter(self._admitted)
        runs: Iterable[Sequence[Any]] = [ordered]
        if by_priority:
            runs = [list(some) for _, some in itertools.groupby(ordered, key=attrgetter("priority"))]
        return [one for some in runs for one in _merged(some, served, running)]

    # -- within ----------------------------------------------------------------------------------------------

    def _count(self) -> None:
        """Take in what was produced since the last time."""
        for seq, (request, counted) in self._running.items():
            if request.produced != counted:
                self._add(request, counted)
                self._running[seq] = request, request.produced

    def _add(self, request: Request, counted: int) -> None:
        flow = request.source.flow
        self._served[flow] = self._served.get(flow, 0.0) + OUTPUT_WEIGHT * (request.produced - counted)

    def _reset_if_idle(self) -> None:
        if not self._waiting and not self._admitted:
            self._served.clear()

    def _forget(self, least: float) -> None:
        """Of idle flows only those that were served more than the others are kept."""
        if len(self._served) > len(self._waiting) + len(self._admitted) + MOST_IDLE:
            self._served = {
                flow: served
                for flow, served in self._served.items()
                if served > least or flow in self._waiting or flow in self._admitted
            }


def _merged(ordered: Sequence[Any], served: dict[Flow, float], running: Counter[Flow]) -> list[Any]:
    """Updates `served` and `running` as if all had been admitted."""
    queues: dict[Flow, deque[tuple[int, Any]]] = {}
    for index, one in enumerate(ordered):
        queues.setdefault(one.flow, deque()).append((index, one))

    def entry(flow: Flow) -> tuple[float, int, int, Flow]:
        return served.get(flow, 0.0), running[flow], queues[flow][0][0], flow

    heap = [entry(flow) for flow in queues]
    heapq.heapify(heap)
    merged: list[Any] = []
    while heap:
        flow = heap[0][-1]
        _, one = queues[flow].popleft()
        merged.append(one)
        served[flow] = served.get(flow, 0.0) + one.cost
        running[flow] += 1
        if queues[flow]:
            heapq.heapreplace(heap, entry(flow))
        else:
            heapq.heappop(heap)
    return merged


def _decrement(counter: Counter[Flow], flow: Flow) -> None:
    counter[flow] -= 1
    if counter[flow] <= 0:
        del counter[flow]


class WaitingQueue:
    """Requests ready to run, in order of arrival; retracted ones before all others, whatever the policy.
    by_priority: the policy is one by priority, which comes before the flows' turns."""

    def __init__(self, order: Order, *, by_priority: bool = False) -> None:
        self._order, self._by_priority = order, by_priority
        self.flows = Flows()
        self._queue: dict[int, Candidate] = {}
        self._front: dict[int, Request] = {}
        self._now = Moment()

    def __len__(self) -> int:
        return len(self._queue) + len(self._front)

    @property
    def retracted(self) -> int:
        """How many of them ran before and lost their slots."""
        return len(self._front)

    def add(self, request: Request) -> None:
        source = request.source
        self._queue[request.seq] = Candidate(
            request, self._now, request.arrival, source.priority, source.flow, request.remaining
        )
        self.flows.came(source.flow)

    def put_back(self, request: Request) -> None:
        self._front = {request.seq: request, **self._front}

    def remove(self, request: Request) -> None:
        """Nothing happens if it does not wait."""
        if self._queue.pop(request.seq, None) is not None:
            self.flows.left(request.source.flow)
        self._front.pop(request.seq, None)

    def forget(self, request: Request) -> None:
        """It has finished, waiting or running."""
        self.remove(request)
        self.flows.ended(request)

    def order(self, cache: RadixCache, tick: int) -> list[Request]:
        """The order in which to try them now."""
        self._now.cache, self._now.tick = cache, tick
        waiting = list(self._queue.values())
        if len(waiting) > 1:
            waiting.sort(key=_ARRIVAL)
            waiting = self.flows.in_turn(_groups_in_turn(self._order(waiting)), by_priority=self._by_priority)
        return [*self._front.values(), *[one.request for one in waiting]]

    def by_priority(self) -> list[Request]:
        """Those that never ran or were preempted, the highest priority first, then by flows and arrival."""
        waiting = sorted(self._queue.values(), key=lambda one: (-one.priority, one.arrival))
        return [one.request for one in self.flows.in_turn(waiting, by_priority=True)]

    def lowest(self) -> Request | None:
        """The request that a full queue drops for one of higher priority: the last of the lowest priority."""
        return _last([one for one in self._queue.values() if one.request.cached < 0])

    def crowding(self, flow: Flow) -> Request | None:
        """The request that a full queue drops to accept one of `flow`: the last of the flow with most waiting
        requests. None if that flow has at most one more waiting than `flow`."""
        longest, count = self.flows.longest()
        if count <= self.flows.waiting(flow) + 1:
            return None
        return _last([one for one in self._queue.values() if one.flow == longest and one.request.cached < 0])


def _last(fresh: list[Candidate]) -> Request | None:
    return min(fresh, key=lambda one: (one.priority, -one.arrival)).request if fresh else None


def _groups_in_turn(ordered: list[Candidate]) -> list[Candidate]:
    """The same order, but the second of a group comes after the first ones of all others, and so on: one
    client's request for a thousand samples does not hold up later ones. Only among neighbours of one
    priority, so that an order by priority stays one."""
    if all(one.request.source.group is None for one in ordered):
        return ordered
    result: list[Candidate] = []
    for _, some in itertools.groupby(ordered, key=attrgetter("priority")):
        counts: Counter[str] = Counter()
        ranked: list[tuple[int, Candidate]] = []
        for one in some:
            group = one.request.source.group
            ranked.append((0 if group is None else counts[group], one))
            if group is not None:
                counts[group] += 1
        result += [one for _, one in sorted(ranked, key=itemgetter(0))]
    return result
