"""Leases: whose slots are whose, in the order a sequence lives."""

from __future__ import annotations

import pytest

from runtime.cache.manager import CacheManager, Lease
from runtime.plan import Run
from runtime.protocol.errors import InternalFault


def compute(manager: CacheManager, lease: Lease, count: int) -> tuple[Run, ...]:
    runs = lease.take(count)
    lease.settle()
    return runs


def test_a_life() -> None:
    manager = CacheManager(100)
    tokens = list(range(30))
    lease = manager.open(tokens)
    assert manager.grow(lease, 20, 28)
    assert (lease.capacity, lease.spare) == (28, [Run(0, 28)])
    assert compute(manager, lease, 8) == (Run(0, 8),)
    manager.publish(lease, tokens, 8)
    assert (lease.covered, lease.used, manager.cache.protected) == (8, [], 8)
    assert compute(manager, lease, 12) == (Run(8, 12),)
    assert manager.grow(lease, 2, 0)
    assert lease.spare == [Run(20, 10)], "the tail grows in place"
    assert manager.trim(lease, 22) == 8
    assert lease.spare == [Run(20, 2)]
    manager.check([lease])
    manager.close(lease, tokens, 20)
    assert (manager.allocator.free, manager.cache.evictable) == (80, 20)
    again = manager.open(tokens)
    assert (again.covered, [node.runs for node in again.path(manager.cache)]) == (20, [(Run(0, 20),)])


def test_two_with_the_same_tokens_keep_one_copy() -> None:
    manager = CacheManager(64, page_size=4)
    tokens = list(range(10))
    first, second = manager.open(tokens), manager.open(tokens)
    for lease in (first, second):
        assert manager.grow(lease, 10)
        compute(manager, lease, 10)
    manager.publish(first, tokens, 10)
    manager.publish(second, tokens, 10)
    assert (manager.cache.protected, manager.allocator.free) == (8, 64 - 8 - 4 - 4)
    assert second.path(manager.cache) == first.path(manager.cache)
    assert second.used == [Run(20, 2)], "the page that is not full stays its own"
    manager.check([first, second])
    for lease in (first, second):
        manager.close(lease, tokens, 10)
    assert manager.flush()
    assert manager.allocator.free == 64


def test_room_is_made_by_eviction_but_not_of_what_is_read() -> None:
    manager = CacheManager(20)
    old, kept = list(range(8)), list(range(100, 108))
    for tokens in (old, kept):
        lease = manager.open(tokens)
        assert manager.grow(lease, 8)
        compute(manager, lease, 8)
        manager.close(lease, tokens, 8)
    reader = manager.open(kept)
    other = manager.open([7, 7, 7])
    assert not manager.grow(other, 13)
    assert manager.cache.evictable == 8, "nothing is dropped for what cannot be had"
    assert manager.grow(other, 12)
    manager.check([reader, other])
    assert manager.cache.probe(kept) == 8
    assert not manager.flush()


def test_without_a_cache_everything_stays_with_the_lease() -> None:
    manager = CacheManager(20, radix=False)
    lease = manager.open([1, 2, 3])
    assert manager.grow(lease, 3)
    compute(manager, lease, 3)
    manager.publish(lease, [1, 2, 3], 3)
    assert (lease.covered, lease.used, manager.available) == (0, [Run(0, 3)], 17)
    manager.close(lease, [1, 2, 3], 3)
    assert manager.available == 20


def test_a_leak_is_told_with_its_numbers() -> None:
    manager = CacheManager(20)
    lease = manager.open([1])
    assert manager.grow(lease, 5)
    with pytest.raises(InternalFault, match=r"15 free .* 0 leased != 20"):
        manager.check([])
    lease.capacity += 1
    with pytest.raises(InternalFault, match="counts 6 slots"):
        manager.check([lease])
