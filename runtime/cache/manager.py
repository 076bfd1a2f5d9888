"""CacheManager: joins the allocator and the prefix cache, and keeps the account of every slot of the pool.

A sequence holds a Lease: a locked prefix in the cache and slots of its own behind it. It knows leases, not
requests: who runs, who waits and what tokens mean is the scheduler's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from runtime.cache.base import Match, Node, PrefixCache
from runtime.cache.none import NoCache
from runtime.cache.pages import PageAllocator, extend, join, split, total
from runtime.cache.radix import RadixCache
from runtime.plan import Run
from runtime.protocol.errors import InternalFault

EVICT_AHEAD = 16  # slots evicted beyond the need, so that a growing tail does not evict at every token


class Lease:
    """The KV of one sequence: positions 0 .. covered-1 in the cache (locked), from there on in its own slots.

    used     own slots that hold KV, in token order
    pending  own slots that the step under way writes
    spare    own slots not written yet
    """

    __slots__ = ("_path", "capacity", "covered", "key", "match", "pending", "spare", "used", "version")

    def __init__(self, match: Match, key: str | None) -> None:
        self.match = match
        self.key = key
        self.covered = match.length
        self.capacity = match.length
        self.used: list[Run] = []
        self.pending: tuple[Run, ...] = ()
        self.spare: list[Run] = []
        self._path: tuple[Node, ...] = match.nodes
        self.version = -1

    @property
    def own(self) -> int:
        """Slots of its own."""
        return self.capacity - self.covered

    def slots(self) -> list[Run]:
        """All own slots in token order."""
        return join([*self.used, *self.pending, *self.spare])

    def take(self, count: int) -> tuple[Run, ...]:
        """The next `count` spare slots, to be written by the step under way. Changes the lease only."""
        start, length = self.spare[0] if self.spare else (0, 0)
        if count < length:  # the usual case: a decode step in the middle of a run
            self.spare[0] = Run(start + count, length - count)
            self.pending = (Run(start, count),)
        else:
            head, self.spare = split(self.spare, count)
            self.pending = tuple(head)
        return self.pending

    def settle(self) -> None:
        """The pending slots were written."""
        for run in self.pending:
            extend(self.used, run)
        self.pending = ()

    def rewind(self) -> None:
        """The last slot written will be written again. It must not be in the cache yet."""
        self.used, last = split(self.used, total(self.used) - 1)
        self.spare = join([*last, *self.spare])

    def path(self, cache: PrefixCache) -> tuple[Node, ...]:
        """The cache nodes that cover positions 0 .. covered-1, root first."""
        if self.version != cache.version:
            self._path, self.version = cache.path(self.match), cache.version
        return self._path


class CacheManager:
    """Slots of a pool of `slots` slots: free, in the cache, or in a lease; never two of them, never none."""

    def __init__(self, slots: int, page_size: int = 1, *, radix: bool = True) -> None:
        self.allocator = PageAllocator(slots, page_size)
        self.cache: PrefixCache = RadixCache(page_size) if radix else NoCache()
        self.page_size = page_size
        self.shares = radix  # whether what one sequence computed can serve another
        self.slots = self.allocator.slots
        self.moves = 0  # goes up whenever some lease covers another part of the cache than before

    @property
    def available(self) -> int:
        """Slots that can be had without taking any from a lease."""
        return self.allocator.free + self.cache.evictable

    def open(self, tokens: Sequence[int], key: str | None = None) -> Lease:
        """A lease on the longest cached prefix of `tokens`, locked, with no slots of its own yet."""
        match = self.cache.match(tokens, key)
        self.cache.lock(match)
        self.moves += 1
        return Lease(match, key)

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
        last = lease.spare or lease.pending or lease.used
        runs = allocator.alloc(
            need, min(wish, allocator.free), last[-1].start + last[-1].length if last else -1
        )
        if runs is None:
            return False
        for run in runs:
            extend(lease.spare, run)
        lease.capacity += total(runs)
        return True

    def trim(self, lease: Lease, length: int) -> int:
        """Free the lease's spare pages beyond the first `length` positions; returns how many slots that
        were."""
        keep = self.allocator.ceil(max(length - lease.covered, 0))
        extra = lease.own - keep
        if extra <= 0:
            return 0
        kept, gone = split(lease.spare, total(lease.spare) - extra)
        lease.spare = kept
        lease.capacity -= extra
        self.allocator.release(gone)
        return extra

    def publish(self, lease: Lease, tokens: Sequence[int], computed: int) -> None:
        """Give the whole pages of the first `computed` tokens, whose KV is written, to the cache and go on
        reading them there. Slots the cache has for the same tokens already are freed."""
        whole = computed - computed % self.page_size
        if whole <= lease.covered:
            return
        head, used = split(lease.used, whole - lease.covered)
        runs = [run for node in lease.path(self.cache) for run in node.runs] + head
        match, duplicates = self.cache.insert(tokens[:whole], runs, lease.key, lease.match)
        if match.length < whole:
            return  # a cache that keeps nothing: the slots stay the lease's
        self.cache.lock(match)
        self.cache.unlock(lease.match)
        self.allocator.release(duplicates)
        self.moves += 1
        lease.match, lease.covered, lease.used = match, whole, used
        lease.version = -1

    def close(self, lease: Lease, tokens: Sequence[int], computed: int) -> None:
        """End of the lease: what was computed stays in the cache for others (`computed` 0: nothing new), the
        rest is freed."""
        if computed:
            self.publish(lease, tokens, computed)
        self.cache.unlock(lease.match)
        self.allocator.release(lease.slots())
        lease.used, lease.pending, lease.spare = [], (), []
        lease.match, lease.covered, lease.capacity = Match((), 0), 0, 0
        lease.version = -1

    def flush(self) -> bool:
        """Drop every prefix nobody reads. True when the cache is empty now."""
        self.allocator.release(self.cache.reset())
        return not self.cache.protected

    def check(self, leases: Iterable[Lease]) -> None:
        """Raise InternalFault, with the numbers, unless free + evictable + protected + leased slots are the
        pool."""
        free, evictable, protected = self.allocator.free, self.cache.evictable, self.cache.protected
        leased = 0
        for lease in leases:
            leased += lease.own
            if lease.own != total(lease.used) + total(lease.pending) + total(lease.spare):
                raise InternalFault(
                    f"a lease counts {lease.own} slots and holds {lease.slots()}", where="cache"
                )
        if free + evictable + protected + leased != self.slots:
            raise InternalFault(
                f"slots do not add up: {free} free + {evictable} evictable + {protected} protected"
                f" + {leased} leased != {self.slots}",
                where="cache",
            )
