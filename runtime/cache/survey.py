"""PrefixTree: what a prefix cache holds, as plain numbers, for whoever looks. Knows no texts and no requests.

The survey goes on where it is most used, and takes up no more nodes than it was asked for: a tree may have
as many as the pool has pages, and the scheduler stands still meanwhile.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from itertools import count, islice

import msgspec

from runtime.cache.node import Node

EXAMINED = 20_000
"""Nodes looked at for one survey, at most."""


class Prefix(msgspec.Struct):
    """One node: `tokens` tokens behind those of its `parent` (0: it begins a prompt), `start` of them before.
    Of two with different `namespace` none shares anything. hits: sequences that reused it; locks: those that
    read it now; idle: how many uses of the cache ago it was last used; children: how many there are, also
    where not all are listed; ids: its first token ids, as many as were asked for."""

    id: int
    parent: int
    namespace: int
    tokens: int
    start: int
    hits: int
    locks: int
    idle: int
    children: int
    ids: list[int] = []


class PrefixTree(msgspec.Struct):
    """The nodes of a prefix cache, parents first. left_out: nodes known of that are not listed; what is below
    them is not counted. evictable, protected: tokens in nodes that nobody reads now, and in the others."""

    page_size: int
    evictable: int
    protected: int
    nodes: list[Prefix] = []
    left_out: int = 0


def survey(roots: Iterable[Node], clock: int, most: int, ids: int) -> tuple[list[Prefix], int]:
    """The `most` nodes that are used most, each with its parents, and how many more were seen. A node has at
    least the hits of those below, so the best ones are found from the roots on."""
    order, found = count(), list[Prefix]()
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
    while heap and len(found) < most:
        *_, parent, namespace, node = heapq.heappop(heap)
        found.append(
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
    return found, seen - len(found)
