"""Which cache node goes first: the table of eviction policies, and a queue of evictable leaves ordered by
one. Knows no tokens and no slots.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from runtime.cache.node import Node
from runtime.protocol.registry import Registry

HIGHEST = 99  # priorities count from 0 to this for the policy `priority`
OFTEN = 2  # uses from which slru protects a node


Key = Callable[[Any], Any]
"""Node -> comparable; the smallest goes first."""

EVICTION: Registry[Key] = Registry(
    "eviction policy",
    {
        name: f"runtime.cache.eviction:{name}"
        for name in ("lru", "lfu", "fifo", "mru", "filo", "priority", "slru")
    },
)


def lru(node: Node) -> int:
    """Least recently used first."""
    return node.used_at


def lfu(node: Node) -> tuple[int, int]:
    """Least often used first; among these the least recently used."""
    return node.hits, node.used_at


def fifo(node: Node) -> int:
    """Oldest first."""
    return node.created


def mru(node: Node) -> int:
    """Most recently used first."""
    return -node.used_at


def filo(node: Node) -> int:
    """Youngest first."""
    return -node.created


def priority(node: Node) -> tuple[int, int]:
    """Lowest priority first (clamped to 0 .. HIGHEST); among these the least recently used."""
    return min(max(node.priority, 0), HIGHEST), node.used_at


def slru(node: Node) -> tuple[int, int]:
    """What was not used again goes before what was; each the least recently used first."""
    return int(node.hits >= OFTEN), node.used_at


class EvictionQueue:
    """Leaves that may be evicted, the first to go on top. O(log n) each; entries made stale are skipped
    later."""

    def __init__(self, key: Key = lru) -> None:
        self._key = key
        self._heap: list[tuple[Any, int, Node]] = []
        self._tickets = 0
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def push(self, node: Node) -> None:
        """Put a node in, or move it to where its key now belongs."""
        self._live += not node.ticket
        self._tickets += 1
        node.ticket = self._tickets
        heapq.heappush(self._heap, (self._key(node), node.ticket, node))
        if len(self._heap) > 2 * self._live + 64:
            self._heap = [entry for entry in self._heap if entry[2].ticket == entry[1]]
            heapq.heapify(self._heap)

    def discard(self, node: Node) -> None:
        """Take a node out; nothing happens when it is not in."""
        self._live -= bool(node.ticket)
        node.ticket = 0

    def pop(self) -> Node | None:
        """The node to evict next, out of the queue; None when there is none."""
        while self._heap:
            _, ticket, node = heapq.heappop(self._heap)
            if node.ticket == ticket:
                self.discard(node)
                return node
        return None
