"""A node of a prefix cache, a match (a path of nodes), and a survey of a tree as plain
numbers. Knows no texts and no requests.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count, islice

import msgspec

from runtime.plan import Run

EXAMINED = 20_000
"""Nodes looked at for one survey, at most: the scheduler stands still meanwhile."""


@dataclass(slots=True, eq=False)
class Node:
    """A stretch of tokens below `parent`; whole pages. Its `id` is what plans share segments by.

    runs      the KV slots of its tokens
    length    how many tokens
    start     the position of its first token
    locks     how many sequences read it or a node below
    key       of a root, which has no parent and no tokens: its namespace
    used_at   when a sequence last came by, in ticks of the cache's own clock; created: when it was added
    hits      how many sequences reused it
    priority  the highest priority of the requests that computed or reused it
    ticket    tells its present entry in the eviction queue from stale ones; 0: it is not in the queue
    """

    id: int
    parent: Node | None
    tokens: array[int]
    runs: tuple[Run, ...]
    length: int
    start: int
    key: str | None = None
    children: dict[int | bytes, Node] = field(default_factory=dict)
    locks: int = 0
    used_at: int = 0
    created: int = 0
    hits: int = 0
    priority: int = 0
    ticket: int = 0


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix, from the root down; valid until the next insert or evict unless locked."""

    nodes: tuple[Node, ...]
    length: int


class PrefixNode(msgspec.Struct):
    """A node as it is reported: `tokens` tokens after those of its `parent` (0: it begins a prompt), `start`
    tokens before them. Nodes of different namespaces share nothing. hits: sequences that reused it; locks:
    sequences that read it now; idle: uses of the cache since its last one; children: their number, listed or
    not."""

    id: int
    parent: int
    namespace: int
    tokens: int
    start: int
    hits: int
    locks: int
    idle: int
    children: int


class Prefix(PrefixNode):
    """ids: its first token ids, as many as were requested."""

    ids: list[int] = []


class PrefixTree(msgspec.Struct):
    """The nodes of a prefix cache, parents first. left_out: known nodes that are not listed; those below them
    are not counted. evictable, protected: tokens in nodes that no sequence reads now, and in the others."""

    page_size: int
    evictable: int
    protected: int
    nodes: list[Prefix] = []
    left_out: int = 0


def survey(roots: Iterable[Node], clock: int, most: int, ids: int) -> tuple[list[Prefix], int]:
    """The `most` nodes that are used most, each with its parents, and how many more were seen. A node has at
    least the hits of those below, so the best ones are found from the roots on."""
    order, nodes = count(), list[Prefix]()
    heap: list[tuple[int, int, int, int, int, Node]] = []
    seen = listed = 0

    def open_up(node: Node, parent: int, namespace: int) -> None:
        nonlocal seen, listed
        seen += len(node.children)
        for child in islice(node.children.values(), max(0, EXAMINED - listed)):
            listed += 1
            heapq.heappush(heap, (-child.hits, -child.used_at, next(order), parent, namespace, child))

    for namespace, root in enumerate(roots):
        open_up(root, 0, namespace)
    while heap and len(nodes) < most:
        *_, parent, namespace, node = heapq.heappop(heap)
        nodes.append(
            Prefix(
                id=node.id,
                parent=parent,
                namespace=namespace,
                tokens=node.length,
                start=node.start,
                hits=node.hits,
                locks=node.locks,
                idle=clock - node.used_at,
                children=len(node.children),
                ids=list(node.tokens[:ids]),
            )
        )
        open_up(node, node.id, namespace)
    return nodes, seen - len(nodes)
