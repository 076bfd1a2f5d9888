"""Which cache node goes first: a queue of evictable leaves ordered by a policy's key. Knows no tokens and no
slots."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar


class Evictable(Protocol):
    """What a policy may look at. `ticket` belongs to the queue: it tells a node's present entry from stale
    ones."""

    ticket: int
    used_at: int


N = TypeVar("N", bound=Evictable)
Key = Callable[[Any], Any]
"""node -> comparable; the smallest goes first."""


def lru(node: Evictable) -> int:
    """Least recently used first."""
    return node.used_at


class EvictionQueue(Generic[N]):
    """Leaves that may be evicted, the first to go on top. O(log n) each; entries made stale are skipped
    later."""

    def __init__(self, key: Key = lru) -> None:
        self._key = key
        self._heap: list[tuple[Any, int, N]] = []
        self._tickets = 0
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def push(self, node: N) -> None:
        """Put a node in, or move it to where its key now belongs."""
        self._live += not node.ticket
        self._tickets += 1
        node.ticket = self._tickets
        heapq.heappush(self._heap, (self._key(node), node.ticket, node))
        if len(self._heap) > 2 * self._live + 64:
            self._heap = [entry for entry in self._heap if entry[2].ticket == entry[1]]
            heapq.heapify(self._heap)

    def discard(self, node: N) -> None:
        """Take a node out; nothing happens when it is not in."""
        self._live -= bool(node.ticket)
        node.ticket = 0

    def pop(self) -> N | None:
        """The node to evict next, out of the queue; None when there is none."""
        while self._heap:
            _, ticket, node = heapq.heappop(self._heap)
            if node.ticket == ticket:
                self.discard(node)
                return node
        return None
