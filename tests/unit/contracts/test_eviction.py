"""What every eviction policy of the table promises: nothing that is read is dropped, and no more than asked
for; and each drops what its name says.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.cache.manager import CacheManager
from runtime.cache.radix import EVICTION, RadixCache
from runtime.plan import Run
from runtime.protocol.registry import UnknownName
from tests.exploring import tries

NAMES = EVICTION.names()


def test_the_table() -> None:
    assert NAMES == ["fifo", "filo", "lfu", "lru", "mru", "priority", "slru"]
    with pytest.raises(UnknownName, match="slru"):
        CacheManager(10, eviction="nonsense")


@pytest.mark.parametrize(
    ("name", "order"),
    [
        # a: old, used often, last used early. b: used last. c: never used again. d: youngest, important.
        ("lru", "acdb"),
        ("lfu", "cdba"),
        ("fifo", "abcd"),
        ("mru", "bdca"),
        ("filo", "dcba"),
        ("priority", "acbd"),
        ("slru", "cdab"),
    ],
)
def test_the_smallest_key_goes_first(name: str, order: str) -> None:
    cache = RadixCache(1, EVICTION.load(name))

    def put(token: int, priority: int = 0) -> None:
        cache.insert([token] * 4, [Run(4 * token, 4)], priority=priority)

    def use(token: int) -> None:
        match = cache.match([token] * 4)
        cache.lock(match)
        cache.reuse(match)
        cache.unlock(match)

    put(0), put(1, 1)
    for token in (0, 0, 0):
        use(token)
    put(2), put(3, 7)
    use(1), use(1)
    letters = "abcd"
    gone = []
    while cache.evictable:
        (run,) = cache.evict(4)
        gone.append(letters[run.start // 4])
    assert "".join(gone) == order


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=tries(25), deadline=None)
@given(
    page=st.sampled_from([1, 3]),
    actions=st.lists(
        st.tuples(
            st.lists(st.integers(0, 2), min_size=1, max_size=12),
            st.booleans(),
            st.integers(0, 20),
            st.integers(0, 200),
        ),
        max_size=40,
    ),
)
def test_leases_are_safe(name: str, page: int, actions: list[tuple[list[int], bool, int, int]]) -> None:
    manager = CacheManager(30, page, eviction=name)
    held: list[Any] = []
    for tokens, keep, evict, priority in actions:
        lease = manager.open(tokens, None, priority)
        manager.cache.reuse(lease.match, priority)
        need = len(tokens) - lease.covered
        if need and not manager.grow(lease, need):
            manager.close(lease, tokens, 0)
            for other, own in held:
                manager.close(other, own, len(own))
            held.clear()
            continue
        lease.take(need)
        lease.settle()
        manager.publish(lease, tokens, len(tokens))
        if keep:
            held.append((lease, tokens))
        else:
            manager.close(lease, tokens, len(tokens))
        before = manager.cache.evictable
        dropped = manager.cache.evict(min(evict, before))
        manager.allocator.release(dropped)
        assert sum(run.length for run in dropped) >= min(evict, before)
        manager.check([other for other, _ in held])
        for other, own in held:
            assert manager.cache.probe(own) == len(own) - len(own) % page
            assert sum(node.length for node in other.path(manager.cache)) == other.covered
    for other, own in held:
        manager.close(other, own, 0)
    assert manager.flush()
    assert manager.allocator.free == 30
