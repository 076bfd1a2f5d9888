"""Flows: whose turn it is among the clients of an engine. A flow is what one client asks for; None: what has
no label. They are compared by virtual token counters (Sheng et al., "Fairness in Serving Large Language
Models", OSDI 2024): the next place goes to the flow that was given least.

The order within a flow is the schedule policy's. With one flow there is nothing to decide.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from runtime.scheduler.requests.request import Request

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1, 2
"""What a computed prompt token and an output token count."""
MOST_IDLE = 1024
"""Counters of flows without a request that are kept."""

Flow = str | None


class Waiting(Protocol):
    @property
    def flow(self) -> Flow: ...

    @property
    def priority(self) -> int: ...

    @property
    def cost(self) -> int:
        """What its prompt is expected to count."""
        ...


W = TypeVar("W", bound=Waiting)


class Flows:
    """What each flow was given since the engine was idle last. A flow that has nothing waiting gathers no
    claim: when it comes back it is put level with the least served of those that wait."""

    def __init__(self) -> None:
        self._given: dict[Flow, float] = {}
        self._waiting: Counter[Flow] = Counter()
        self._admitted: Counter[Flow] = Counter()
        self._running: dict[int, tuple[Request, int]] = {}  # seq -> request, output tokens that are counted

    def given(self, flow: Flow) -> float:
        """Weighted tokens."""
        self._count()
        return self._given.get(flow, 0.0)

    def waiting(self, flow: Flow) -> int:
        return self._waiting[flow]

    def longest(self) -> tuple[Flow, int]:
        """The flow that has most waiting, and how many."""
        return max(self._waiting.items(), key=lambda item: item[1], default=(None, 0))

    def came(self, flow: Flow) -> None:
        """One more request of it waits."""
        if not self._waiting[flow]:
            others = self._waiting.keys() or self._admitted.keys() - {flow}
            if others:
                self._count()
                least = min(self._given.get(other, 0.0) for other in others)
                self._given[flow] = max(self._given.get(flow, 0.0), least)
                self._forget(least)
        self._waiting[flow] += 1

    def left(self, flow: Flow) -> None:
        """One of those waits no more."""
        _drop(self._waiting, flow)
        self._rest()

    def spend(self, flow: Flow, tokens: int) -> None:
        """So many prompt tokens are computed for it."""
        self._given[flow] = self._given.get(flow, 0.0) + PROMPT_WEIGHT * tokens

    def admitted(self, request: Request, tokens: int) -> None:
        """So many tokens of its prompt are computed, and what it generates counts from now on."""
        flow = request.source.flow
        self.spend(flow, tokens)
        self._admitted[flow] += 1
        self._running[request.seq] = request, 0

    def ended(self, request: Request) -> None:
        """Nothing happens where it was not admitted."""
        found = self._running.pop(request.seq, None)
        if found is not None:
            self._add(*found)
            _drop(self._admitted, request.source.flow)
            self._rest()

    def in_turn(self, ordered: list[W], *, by_priority: bool) -> list[W]:
        """The same requests, the next one always of the flow that was given least, in the order given within
        each. by_priority: only among those of one priority that follow one another."""
        if len(self._waiting) < 2:
            return ordered
        self._count()
        given, running = dict(self._given), Counter(self._admitted)
        runs: Iterable[Sequence[W]] = [ordered]
        if by_priority:
            runs = [list(some) for _, some in itertools.groupby(ordered, key=lambda one: one.priority)]
        return [one for some in runs for one in _merged(some, given, running)]

    # -- within ----------------------------------------------------------------------------------------------

    def _count(self) -> None:
        """Take in what was produced since the last time."""
        for seq, (request, counted) in self._running.items():
            if request.produced != counted:
                self._add(request, counted)
                self._running[seq] = request, request.produced

    def _add(self, request: Request, counted: int) -> None:
        flow = request.source.flow
        self._given[flow] = self._given.get(flow, 0.0) + OUTPUT_WEIGHT * (request.produced - counted)

    def _rest(self) -> None:
        if not self._waiting and not self._admitted:
            self._given.clear()

    def _forget(self, least: float) -> None:
        """Of idle flows only what they owe is worth keeping."""
        if len(self._given) > len(self._waiting) + len(self._admitted) + MOST_IDLE:
            self._given = {
                flow: given
                for flow, given in self._given.items()
                if given > least or flow in self._waiting or flow in self._admitted
            }


def _merged(ordered: Sequence[W], given: dict[Flow, float], running: Counter[Flow]) -> list[W]:
    """`given` and `running` as if they all had been admitted."""
    queues: dict[Flow, deque[tuple[int, W]]] = {}
    for place, one in enumerate(ordered):
        queues.setdefault(one.flow, deque()).append((place, one))

    def entry(flow: Flow) -> tuple[float, int, int, Flow]:
        return given.get(flow, 0.0), running[flow], queues[flow][0][0], flow

    heap = [entry(flow) for flow in queues]
    heapq.heapify(heap)
    merged: list[W] = []
    while heap:
        flow = heap[0][-1]
        _, one = queues[flow].popleft()
        merged.append(one)
        given[flow] = given.get(flow, 0.0) + one.cost
        running[flow] += 1
        if queues[flow]:
            heapq.heapreplace(heap, entry(flow))
        else:
            heapq.heappop(heap)
    return merged


def _drop(counter: Counter[Flow], flow: Flow) -> None:
    counter[flow] -= 1
    if counter[flow] <= 0:
        del counter[flow]
