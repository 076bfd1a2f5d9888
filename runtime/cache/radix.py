"""RadixCache: a tree of token runs; a path from the root spells a cached prefix, its nodes hold the KV slots.

After Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs", section 3
(RadixAttention). It knows slots as ints only: neither requests, nor the free list, nor tensors.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from runtime.cache.node import Match, Node, PrefixTree, survey
from runtime.cache.pages import join, split, total
from runtime.plan import Run
from runtime.protocol.errors import InternalFault
from runtime.protocol.registry import Registry

HIGHEST = 99  # priorities count from 0 to this for the policy `priority`
OFTEN = 2  # uses from which slru protects a node


Key = Callable[[Any], Any]
"""Node -> comparable; the smallest goes first."""

EVICTION: Registry[Key] = Registry(
    "eviction policy",
    {
        name: f"runtime.cache.radix:{name}"
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
    """Leaves that may be evicted, the first to go on top. Stale entries are skipped later."""

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


class RadixCache:
    """Prefix -> KV slots, in one tree per `key` (a request's extra_key). `eviction`: which unlocked leaf goes
    first (smallest key). A slot belongs to the allocator's free list, to one node, or to one lease.

    Tokens are compared as packed ints, so a method costs one memory comparison over the prefix, whatever the
    tree's size. A locked match is known by its last node: a split gives the upper part a new node and leaves
    that one's end where it is. evictable, protected: slots in unlocked and in locked nodes. version: rises
    whenever a node is split; only then can path() of a locked match change.
    """

    def __init__(self, page_size: int = 1, eviction: Key = lru) -> None:
        self.page_size = page_size
        self._roots: dict[str | None, Node] = {}
        self._leaves: EvictionQueue = EvictionQueue(eviction)
        self._ids = 0
        self._clock = 0
        self.version = 0
        self.evictable = 0
        self.protected = 0

    # -- finding ---------------------------------------------------------------------------------------------

    def match(self, tokens: Sequence[int], key: str | None = None) -> Match:
        """The longest cached prefix, in whole pages; it holds until the next insert or evict, or as long as
        it is locked. A match that ends inside a node splits the node."""
        packed = _packed(tokens)
        path, length, inside = self._walk(packed, key)
        if inside:
            path[-1] = self._split(path[-1], inside)
        self._touch(path)
        return Match(tuple(path), length)

    def probe(self, tokens: Sequence[int], key: str | None = None) -> int:
        """The length that match() would find. Changes nothing."""
        return self._walk(_packed(tokens), key)[1]

    def trail(self, tokens: Sequence[int], key: str | None = None) -> tuple[tuple[int, ...], int]:
        """The ids of the nodes that match() would pass, root first, and its length. Changes nothing."""
        path, length, _ = self._walk(_packed(tokens), key)
        return tuple([node.id for node in path]), length

    def path(self, match: Match) -> tuple[Node, ...]:
        """The nodes that now make up a locked match, root first."""
        return tuple(reversed(list(self._upwards(match))))

    def _walk(self, tokens: array[int], key: str | None) -> tuple[list[Node], int, int]:
        """The nodes along `tokens`, the shared tokens, and those of the last node if not all (else 0)."""
        path: list[Node] = []
        node = self._roots.get(key)
        position, end = 0, len(tokens) - len(tokens) % self.page_size
        while node is not None and position < end:
            child = node.children.get(self._edge(tokens, position))
            if child is None:
                break
            path.append(child)
            length = child.length
            if position + length > end or child.tokens != tokens[position : position + length]:
                common = self._common(child.tokens, tokens, position, min(length, end - position))
                return path, position + common, common if common < length else 0
            position += length
            node = child
        return path, position, 0

    def _common(self, edge: array[int], tokens: array[int], position: int, limit: int) -> int:
        """Length in whole pages of what `edge` and tokens[position:] share, at most `limit`; at least one
        page, which the caller has looked up. Bisects with memory comparisons."""
        if edge[:limit] == tokens[position : position + limit]:
            return limit
        low, high = self.page_size, limit  # edge[:low] is shared, edge[:high] is not
        while high - low > self.page_size:
            middle = low + (high - low) // 2 // self.page_size * self.page_size
            if edge[low:middle] == tokens[position + low : position + middle]:
                low = middle
            else:
                high = middle
        return low

    def _edge(self, tokens: array[int], position: int) -> int | bytes:
        if self.page_size == 1:
            return tokens[position]
        return tokens[position : position + self.page_size].tobytes()

    # -- adding ----------------------------------------------------------------------------------------------

    def insert(
        self,
        tokens: Sequence[int],
        runs: Sequence[Run],
        key: str | None = None,
        held: Match | None = None,
        priority: int = 0,
    ) -> tuple[Match, list[Run]]:
        """Take over `runs`, the slots of all of `tokens` (whole pages, else InternalFault). Returns the match
        that now covers `tokens`, and the slots that the caller must free, because the cache has others for
        the same tokens. Slots beyond the match's length stay the caller's.

        A leaf that only its writer reads grows in place: a prompt computed in chunks, or a conversation, is
        one node and so one segment, until another sequence branches off. `held`: the writer's locked match
        of a beginning of `tokens`, which it unlocks next. `priority`: of the writer, for eviction."""
        packed = _packed(tokens)
        if len(packed) % self.page_size or total(runs) != len(packed):
            raise InternalFault(
                f"{len(packed)} tokens with {total(runs)} slots for a cache of page size {self.page_size}",
                where="cache.radix",
            )
        path, position, inside = self._walk(packed, key)
        if inside:
            path[-1] = self._split(path[-1], inside)
        duplicates: list[Run] = []
        rest: list[Run] = list(runs)
        for node in path:
            handed, rest = split(rest, node.length)
            duplicates += _differing(handed, node.runs)
        if rest:
            parent = path[-1] if path else self._root(key)
            if self._may_lengthen(parent, held):
                self._lengthen(parent, packed[position:], rest)
            else:
                path.append(self._grow(parent, packed[position:], tuple(join(rest))))
        if priority > 0:
            for node in path:
                node.priority = max(node.priority, priority)
        self._touch(path)
        return Match(tuple(path), len(packed)), join(duplicates)

    def _root(self, key: str | None) -> Node:
        root = self._roots.get(key)
        if root is None:
            root = self._roots[key] = Node(0, None, array("q"), (), 0, 0, key)
        return root

    def _may_lengthen(self, leaf: Node, held: Match | None) -> bool:
        if leaf.children or leaf.parent is None:
            return False
        return not leaf.locks or (leaf.locks == 1 and held is not None and held.nodes[-1:] == (leaf,))

    def _lengthen(self, leaf: Node, tokens: array[int], runs: Sequence[Run]) -> None:
        leaf.tokens.extend(tokens)
        leaf.runs = tuple(join([*leaf.runs, *runs]))
        leaf.length += len(tokens)
        if leaf.locks:
            self.protected += len(tokens)
        else:
            self.evictable += len(tokens)

    def _grow(self, parent: Node, tokens: array[int], runs: tuple[Run, ...]) -> Node:
        self._leaves.discard(parent)  # it is a leaf no longer
        leaf = Node(self._next_id(), parent, tokens, runs, len(tokens), parent.start + parent.length)
        leaf.created = self._clock + 1  # as _touch is about to count
        parent.children[self._edge(tokens, 0)] = leaf
        self.evictable += leaf.length
        return leaf

    def _split(self, node: Node, at: int) -> Node:
        """Give the first `at` tokens of `node` to a new node above it, with its locks and order."""
        parent = node.parent
        assert parent is not None
        head, rest = split(node.runs, at)
        upper = Node(self._next_id(), parent, node.tokens[:at], tuple(head), at, node.start)
        upper.locks, upper.used_at, upper.created = node.locks, node.used_at, node.created
        upper.hits, upper.priority = node.hits, node.priority
        parent.children[self._edge(upper.tokens, 0)] = upper
        node.tokens, node.runs, node.length = node.tokens[at:], tuple(rest), node.length - at
        node.parent, node.start = upper, node.start + at
        upper.children[self._edge(node.tokens, 0)] = node
        self.version += 1
        return upper

    def _next_id(self) -> int:
        self._ids += 1
        return self._ids

    def _touch(self, path: Sequence[Node]) -> None:
        self._clock += 1
        for node in path:
            node.used_at = self._clock
        if path:
            self._requeue(path[-1])  # only the last can be a leaf

    # -- protecting and dropping -----------------------------------------------------------------------------

    def lock(self, match: Match) -> None:
        """Protect the match's nodes from eviction; counts."""
        for node in self._upwards(match):
            if not node.locks:
                self.evictable -= node.length
                self.protected += node.length
                self._leaves.discard(node)
            node.locks += 1

    def unlock(self, match: Match) -> None:
        """Undoes one lock() of the same match. Raises InternalFault when there is none to undo."""
        for node in self._upwards(match):
            if not node.locks:
                raise InternalFault(
                    f"cache node {node.id} is unlocked more often than locked", where="cache.radix"
                )
            node.locks -= 1
            if not node.locks:
                self.protected -= node.length
                self.evictable += node.length
                self._requeue(node)

    def reuse(self, match: Match, priority: int = 0) -> None:
        """Count one more sequence, of that priority, that reuses a locked match. For eviction only."""
        for node in self._upwards(match):
            node.hits += 1
            node.priority = max(node.priority, priority)

    def held_by(self, matches: Sequence[Match]) -> int:
        """Slots that would become evictable if all these locked matches were unlocked. Changes nothing."""
        locks: dict[int, int] = {}
        slots = 0
        for match in matches:
            for node in self._upwards(match):
                locks[node.id] = seen = locks.get(node.id, 0) + 1
                slots += node.length * (seen == node.locks)
        return slots

    def evict(self, slots: int) -> list[Run]:
        """Drop unlocked leaves until `slots` slots are gone, or no leaf is left; returns their slots. Whole
        pages; the last leaf may only be shortened. Matches that are not locked are void afterwards."""
        dropped: list[Run] = []
        while slots > 0:
            leaf = self._leaves.pop()
            if leaf is None:
                break
            goes = min(leaf.length, -(-slots // self.page_size) * self.page_size)
            slots -= goes
            self.evictable -= goes
            if goes < leaf.length:
                dropped += self._shorten(leaf, leaf.length - goes)
            else:
                dropped += leaf.runs
                self._remove(leaf)
        return join(dropped)

    def reset(self) -> list[Run]:
        """Drop all that is unlocked; returns the slots."""
        return self.evict(self.evictable)

    def _shorten(self, leaf: Node, keep: int) -> list[Run]:
        kept, dropped = split(leaf.runs, keep)
        del leaf.tokens[keep:]
        leaf.runs, leaf.length = tuple(kept), keep
        self._leaves.push(leaf)
        return dropped

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[self._edge(leaf.tokens, 0)]
        leaf.parent = None
        self._requeue(parent)
        if parent.parent is None and not parent.children:  # a root: forget the namespace
            del self._roots[parent.key]

    def _requeue(self, node: Node) -> None:
        if not node.children and not node.locks and node.parent is not None:
            self._leaves.push(node)

    def _upwards(self, match: Match) -> Iterator[Node]:
        """The match's nodes as they are now, last first, without the root."""
        node = match.nodes[-1] if match.nodes else None
        while node is not None and node.parent is not None:
            yield node
            node = node.parent

    # -- looking ---------------------------------------------------------------------------------------------

    def survey(self, most: int, ids: int) -> PrefixTree:
        """At most `most` nodes, each with its first `ids` tokens. Changes nothing."""
        nodes, left_out = survey(self._roots.values(), self._clock, most, ids)
        return PrefixTree(self.page_size, self.evictable, self.protected, nodes, left_out)

    def nodes(self) -> Iterator[Node]:
        """All nodes, parents first; for checks and reports."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


class NoCache(RadixCache):
    """For radix_cache=False: matches nothing and takes nothing; all slots stay with their leases."""

    def match(self, tokens: Sequence[int], key: str | None = None) -> Match:
        return Match((), 0)

    def insert(
        self,
        tokens: Sequence[int],
        runs: Sequence[Run],
        key: str | None = None,
        held: Match | None = None,
        priority: int = 0,
    ) -> tuple[Match, list[Run]]:
        return Match((), 0), []


def _packed(tokens: Sequence[int]) -> array[int]:
    return tokens if type(tokens) is array else array("q", tokens)


def _differing(handed: Sequence[Run], held: Sequence[Run]) -> list[Run]:
    """The slots of `handed` that are not at the same place in `held` (equally long)."""
    if tuple(handed) == tuple(held):
        return []
    differing: list[Run] = []
    mine, theirs = join(handed), join(held)
    while mine:
        length = min(mine[0].length, theirs[0].length)
        if mine[0].start != theirs[0].start:
            differing.append(Run(mine[0].start, length))
        mine, theirs = split(mine, length)[1], split(theirs, length)[1]
    return differing
