"""A node of a prefix cache, and a match: a path of them. Ints only; what is done with them is decided by
others."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from runtime.plan import Run


class Node:
    """A stretch of tokens below `parent`; whole pages. Its `id` is what plans share segments by.

    runs      the KV slots of its tokens
    start     the position of its first token: how many come before it, from the root on
    locks     how many sequences read it or a node below
    key       of a root, which has no parent and no tokens: its namespace
    used_at   when a sequence last came by, in ticks of the cache's own clock; created: when it was put in
    hits      how many sequences reused it
    priority  the highest priority of the requests that computed or reused it
    ticket    belongs to the eviction queue: it tells a node's present entry from stale ones
    """

    __slots__ = (
        "children", "created", "hits", "id", "key", "length", "locks", "parent", "priority", "runs", "start",
        "ticket", "tokens", "used_at",
    )  # fmt: skip

    def __init__(self, id: int, parent: Node | None, tokens: array[int], runs: tuple[Run, ...]) -> None:
        self.id = id
        self.key: str | None = None
        self.parent = parent
        self.tokens = tokens
        self.runs = runs
        self.length = len(tokens)
        self.start: int = parent.start + parent.length if parent else 0
        self.children: dict[int | bytes, Node] = {}
        self.locks = 0
        self.used_at = self.created = self.hits = self.priority = 0
        self.ticket = 0


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix: `nodes` from the root down, `length` tokens in all. Valid until the next
    insert or evict unless locked."""

    nodes: tuple[Node, ...]
    length: int
