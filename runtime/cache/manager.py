"""CacheManager: joins the allocator and the prefix cache, and keeps the account of every slot of the pool.

A sequence holds a Lease: a locked prefix in the cache and slots of its own behind it. It knows leases, not
requests: who runs, who waits and what tokens mean is the scheduler's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from runtime.cache.node import Match, Node
from runtime.cache.pages import PageAllocator, extend, join, split, total
from runtime.cache.radix import EVICTION, NoCache, RadixCache
from runtime.plan import Run
from runtime.protocol.errors import InternalFault

EVICT_AHEAD = 16  # slots evicted beyond the need, so that a growing tail does not evict at every token


class Lease:
    """The KV of one sequence: positions 0 .. covered-1 in the cache (locked), from there on in its own slots.

    used     its slots that hold KV, in token order
    pending  its slots that the step under way writes
    spare    its slots not written yet

    The last run of `used` and the first of `spare` are kept as numbers: they change with every token.
    """

    __slots__ = (
        "_count", "_done", "_first", "_left", "_more", "_next", "_path", "_version", "capacity", "covered",
        "key", "match", "pending", "priority",
    )  # fmt: skip

    def __init__(self, match: Match, key: str | None, priority: int = 0) -> None:
        self.match = match
        self.key = key
        self.priority = priority
        self.covered = match.length
        self.capacity = match.length
        self.pending: tuple[Run, ...] = ()
        self._done: list[Run] = []
        self._first = self._count = 0
        self._next = self._left = 0
        self._more: list[Run] = []
        self._path: tuple[Node, ...] = match.nodes
        self._version = -1

    @property
    def private(self) -> int:
        """Slots behind the cached prefix, in no other lease."""
        return self.capacity - self.covered

    @property
    def used(self) -> list[Run]:
        return [*self._done, Run(self._first, self._count)] if self._count else list(self._done)

    @property
    def spare(self) -> list[Run]:
        return [Run(self._next, self._left), *self._more] if self._left else list(self._more)

    @property
    def end(self) -> int:
        """The slot after its last one; -1 without any."""
        if self._more:
            start, length = self._more[-1]
            return start + length
        if self._left:
            return self._next + self._left
        if self.pending:
            start, length = self.pending[-1]
            return start + length
        return self._first + self._count if self._count else -1

    def slots(self) -> list[Run]:
        """All its slots in token order."""
        return join([*self.used, *self.pending, *self.spare])

    def written(self) -> tuple[Run, ...]:
        """`used` as a plan wants it."""
        if self._done:
            return (*self._done, Run(self._first, self._count))
        return (_run(self._first, self._count),) if self._count else ()

    def take(self, count: int) -> tuple[Run, ...]:
        """The next `count` spare slots, to be written by the step under way. Changes the lease only."""
        if count < self._left:  # the usual case: a decode step in the middle of a run
            self.pending = (_run(self._next, count),)
            self._next += count
            self._left -= count
        else:
            head, rest = split(self.spare, count)
            self._keep_spare(rest)
            self.pending = tuple(head)
        return self.pending

    def settle(self) -> None:
        """The pending slots were written."""
        for start, length in self.pending:
            if self._first + self._count == start:
                self._count += length
            else:
                if self._count:
                    self._done.append(Run(self._first, self._count))
                self._first, self._count = start, length
        self.pending = ()

    def rewind(self, count: int = 1) -> None:
        """The last `count` slots written will be written again. They must not be in the cache yet."""
        used = self.used
        used, last = split(used, total(used) - count)
        self._keep_used(used)
        self._keep_spare(join([*last, *self.spare]))

    def lengthen(self, runs: Iterable[Run]) -> None:
        """More spare slots, behind those it has."""
        spare = self.spare
        for run in runs:
            extend(spare, run)
            self.capacity += run.length
        self._keep_spare(spare)

    def shorten(self, slots: int) -> list[Run]:
        """Give up the last `slots` spare slots; which they are."""
        spare = self.spare
        kept, dropped = split(spare, total(spare) - slots)
        self._keep_spare(kept)
        self.capacity -= slots
        return dropped

    def cover(self, match: Match, used: list[Run]) -> None:
        """It reads `match` from now on, and only `used` of its own slots."""
        self.match, self.covered = match, match.length
        self._keep_used(used)
        self._version = -1

    def uncover(self, match: Match) -> None:
        """It reads only `match` from now on, a shorter one; all its own slots are to be written again."""
        private, spare = self.private, join([*self.used, *self.spare])
        self.cover(match, [])
        self._keep_spare(spare)
        self.capacity = match.length + private

    def clear(self) -> None:
        """It holds nothing any more."""
        self.cover(Match((), 0), [])
        self._keep_spare([])
        self.pending, self.capacity = (), 0

    def path(self, cache: RadixCache) -> tuple[Node, ...]:
        """The cache nodes that cover positions 0 .. covered-1, root first."""
        if self._version != cache.version:
            self._path, self._version = cache.path(self.match), cache.version
        return self._path

    def _keep_used(self, used: list[Run]) -> None:
        self._done = used
        self._first, self._count = self._done.pop() if used else (0, 0)

    def _keep_spare(self, spare: list[Run]) -> None:
        self._more = spare
        self._next, self._left = self._more.pop(0) if spare else (0, 0)


def _run(start: int, length: int) -> Run:
    return tuple.__new__(Run, (start, length))  # the same, at a third of the cost: made for every token


class CacheManager:
    """Slots of a pool of `slots` slots: free, in the cache, or in a lease; never two of them, never none."""

    def __init__(self, slots: int, page_size: int = 1, *, radix: bool = True, eviction: str = "lru") -> None:
        """`eviction`: the name of an eviction policy (raises UnknownName)."""
        self._policy = EVICTION.load(eviction)
        self.allocator = PageAllocator(slots, page_size)
        self.page_size = page_size
        self.shares = radix  # whether what one sequence computed can serve another
        self.cache = self._empty()
        self.slots = self.allocator.slots
        self.transfers: list[Lease] = []  # of sequences that do not run: KV being transferred, or parked
        self.moves = 0  # goes up whenever some lease covers another part of the cache than before

    def _empty(self) -> RadixCache:
        kind = RadixCache if self.shares else NoCache
        return kind(self.page_size, self._policy)

    @property
    def available(self) -> int:
        """Slots that can be had without taking any from a lease."""
        return self.allocator.free + self.cache.evictable

    def state(self) -> dict[str, Any]:
        """Slots now. Prefixes that are only kept for later requests do not count as used."""
        used = self.slots - self.available
        return {
            "slots": self.slots,
            "free": self.allocator.free,
            "evictable": self.cache.evictable,
            "protected": self.cache.protected,
            "max_total_num_tokens": self.slots,
            "num_used_tokens": used,
            "token_usage": used / self.slots,
        }

    def open(self, tokens: Sequence[int], key: str | None = None, priority: int = 0) -> Lease:
        """A lease on the longest cached prefix of `tokens`, locked, with no slots of its own yet."""
        match = self.cache.match(tokens, key)
        self.cache.lock(match)
        self.moves += 1
        return Lease(match, key, priority)

    def grow(self, lease: Lease, need: int, wish: int = 0) -> bool:
        """`need` more slots for the lease, up to `wish` where they are free in one piece. Evicts what must
        go; False, and no slots, when even that is not enough."""
        allocator = self.allocator
        if allocator.free < wish or allocator.free < allocator.ceil(need):
            ahead = allocator.ceil(max(need, min(wish, need + EVICT_AHEAD)))
            if allocator.ceil(need) > self.available:
                return False
            if allocator.free < ahead:
                allocator.release(self.cache.evict(ahead - allocator.free))
        runs = allocator.alloc(need, min(wish, allocator.free), lease.end)
        if runs is None:
            return False
        lease.lengthen(runs)
        return True

    def trim(self, lease: Lease, length: int) -> int:
        """Free the lease's spare pages beyond the first `length` positions and those written, or being
        written; returns how many slots that were."""
        keep = self.allocator.ceil(max(length - lease.covered, lease.private - total(lease.spare)))
        extra = lease.private - keep
        if extra <= 0:
            return 0
        self.allocator.release(lease.shorten(extra))
        return extra

    def cut(self, lease: Lease, tokens: Sequence[int], computed: int, length: int) -> int:
        """Of the `computed` tokens only the first `length` are kept. How many of them keep their
        KV: fewer where `length` lies inside of a page of the cache. The lease keeps its slots; the cache
        keeps its nodes, which are right of the tokens it was computed for."""
        if length >= lease.covered:
            lease.rewind(computed - length)
            return length
        match = self.cache.match(tokens[:length], lease.key)
        self.cache.lock(match)
        self.cache.unlock(lease.match)
        lease.uncover(match)
        self.moves += 1
        return match.length

    def publish(self, lease: Lease, tokens: Sequence[int], computed: int) -> None:
        """Give the whole pages of the first `computed` tokens, whose KV is written, to the cache and go on
        reading them there. Slots the cache has for the same tokens already are freed."""
        whole = computed - computed % self.page_size
        if whole <= lease.covered:
            return
        head, used = split(lease.used, whole - lease.covered)
        runs = [run for node in lease.path(self.cache) for run in node.runs] + head
        match, duplicates = self.cache.insert(tokens[:whole], runs, lease.key, lease.match, lease.priority)
        if match.length < whole:
            return  # a cache that keeps nothing: the slots stay the lease's
        self.cache.lock(match)
        self.cache.unlock(lease.match)
        lease.cover(match, used)
        self.allocator.release(duplicates)
        self.moves += 1

    def close(self, lease: Lease, tokens: Sequence[int], computed: int) -> None:
        """End of the lease: what was computed stays in the cache (0: nothing new), the rest is freed."""
        if computed:
            self.publish(lease, tokens, computed)
        self.cache.unlock(lease.match)
        slots = lease.slots()
        lease.clear()
        self.allocator.release(slots)

    def gain(self, leases: Sequence[Lease]) -> int:
        """Slots that would become available if all of `leases` were closed. Changes nothing."""
        return sum(lease.private for lease in leases) + self.cache.held_by([lease.match for lease in leases])

    def flush(self) -> bool:
        """Drop every prefix no sequence reads. True when the cache is empty now."""
        self.allocator.release(self.cache.reset())
        return not self.cache.protected

    def rebuild(self) -> None:
        """Start anew, all slots free. Leases are void: clear() them; those of transfers are cleared."""
        for lease in self.transfers:
            lease.clear()
        self.transfers.clear()
        self.allocator = PageAllocator(self.slots, self.page_size)
        self.cache = self._empty()
        self.moves += 1

    def check(self, leases: Iterable[Lease]) -> None:
        """Raise InternalFault, with the numbers, unless free + evictable + protected + leased slots are the
        pool. `leases`: all but those of transfers."""
        self.allocator.check()
        free, evictable, protected = self.allocator.free, self.cache.evictable, self.cache.protected
        leased = 0
        for lease in [*leases, *self.transfers]:
            leased += lease.private
            if lease.private != total(lease.used) + total(lease.pending) + total(lease.spare):
                raise InternalFault(
                    f"a lease counts {lease.private} slots and holds {lease.slots()}", where="cache"
                )
        if free + evictable + protected + leased != self.slots:
            raise InternalFault(
                f"slots do not add up: {free} free + {evictable} evictable + {protected} protected"
                f" + {leased} leased != {self.slots}",
                where="cache",
            )
