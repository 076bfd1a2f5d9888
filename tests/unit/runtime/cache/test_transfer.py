"""Pages between two caches: pinned where they are exported, and adopted whole or not at all."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.cache.manager import CacheManager, Lease
from runtime.cache.pages import total
from runtime.cache.radix import RadixCache
from tests.exploring import tries
from tests.unit.runtime.cache.pages_between_pools import Adoption, Export


def compute(manager: CacheManager, tokens: Sequence[int], key: str | None = None) -> bool:
    """As a request does that runs alone; False where it does not fit."""
    lease = manager.open(tokens, key)
    fits = manager.grow(lease, len(tokens) - lease.covered)
    if fits:
        lease.take(len(tokens) - lease.covered)
        lease.settle()
    manager.close(lease, tokens, len(tokens) if fits else 0)
    return fits


def owned(manager: CacheManager, running: Iterable[Lease] = ()) -> None:
    """Each slot has exactly one owner."""
    manager.check(running)
    owners = [0] * manager.slots
    assert isinstance(manager.cache, RadixCache)
    runs = manager.allocator.free_runs() + [run for node in manager.cache.nodes() for run in node.runs]
    for lease in [*running, *manager.transfers]:
        runs += lease.slots()
    for start, length in runs:
        for slot in range(start, start + length):
            owners[slot] += 1
    assert owners == [1] * manager.slots


def test_what_is_exported_stays_until_it_is_released() -> None:
    manager = CacheManager(24, page_size=4)
    tokens = list(range(10))
    assert compute(manager, tokens)
    export = Export(manager, tokens)
    assert export.tokens == array("q", tokens[:8]), "whole pages"
    assert total(export.runs) == 8
    assert not compute(manager, [99] * 20), "nothing pinned is dropped for it"
    assert not manager.flush()
    owned(manager)
    export.release()
    export.release()
    assert not export.valid
    assert compute(manager, [99] * 20)
    owned(manager)


def test_adopted_pages_are_a_prefix_like_any_other() -> None:
    manager = CacheManager(32, page_size=4)
    tokens = list(range(14))
    assert compute(manager, tokens[:5])
    adoption = Adoption(manager, tokens)
    assert adoption.start == 4, "what is there already is not sent again"
    assert adoption.reserve()
    assert adoption.reserve()
    assert total(adoption.runs) == 8
    assert manager.cache.probe(tokens) == 4, "nobody reads them before they are written"
    owned(manager)
    assert adoption.commit()
    lease = manager.open(tokens)
    assert lease.covered == 12
    assert slots_of(lease.path(manager.cache))[4:] == [
        slot for start, length in adoption.runs for slot in range(start, start + length)
    ]
    adoption.release()
    owned(manager, [lease])
    manager.close(lease, (), 0)
    assert manager.flush()


def test_there_is_no_room_and_then_there_is() -> None:
    manager = CacheManager(16)
    other = manager.open([7])
    assert manager.grow(other, 10)
    adoption = Adoption(manager, list(range(8)))
    assert not adoption.reserve()
    assert not adoption.commit(), "nothing was written"
    manager.close(other, (), 0)
    assert adoption.reserve()
    adoption.release()
    assert manager.allocator.free == 16


def test_two_adopt_the_same_and_one_of_them_is_kept() -> None:
    manager = CacheManager(32)
    pair = [Adoption(manager, list(range(8))) for _ in range(2)]
    assert all(one.reserve() and one.commit() for one in pair)
    owned(manager)
    assert manager.cache.protected == 8
    for one in pair:
        one.release()
    assert manager.available == 32


def test_a_new_account_voids_what_is_under_way() -> None:
    manager = CacheManager(32)
    assert compute(manager, list(range(8)))
    export, adoption = Export(manager, list(range(8))), Adoption(manager, [5] * 8)
    assert adoption.reserve()
    manager.rebuild()
    assert not export.valid
    assert not adoption.commit()
    assert not adoption.reserve()
    export.release()
    adoption.release()
    owned(manager)
    assert manager.allocator.free == 32


def test_a_cache_that_keeps_nothing_has_nothing_to_export() -> None:
    manager = CacheManager(32, radix=False)
    assert compute(manager, list(range(8)))
    export, adoption = Export(manager, list(range(8))), Adoption(manager, list(range(8)))
    assert (list(export.tokens), export.runs) == ([], [])
    assert adoption.reserve()
    assert adoption.commit()
    adoption.release()
    export.release()
    assert manager.allocator.free == 32


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["compute", "run", "end", "export", "adopt", "reserve", "commit", "release", "rebuild"]
        ),
        st.integers(0, 30),
        st.lists(st.integers(0, 2), min_size=1, max_size=14),
    ),
    max_size=60,
)


@settings(max_examples=tries(150), deadline=None)
@given(steps=STEPS, page=st.sampled_from([1, 2, 4]), slots=st.integers(8, 48))
def test_no_page_leaks_or_is_freed_twice(steps: Any, page: int, slots: int) -> None:
    manager = CacheManager(slots, page)
    running: list[Lease] = []
    under_way: list[Export | Adoption] = []
    exported: list[tuple[Export, list[Any]]] = []
    for verb, number, tokens in steps:
        one = under_way[number % len(under_way)] if under_way else None
        if verb == "compute":
            compute(manager, tokens)
        elif verb == "run":
            lease = manager.open(tokens)
            if manager.grow(lease, len(tokens) - lease.covered):
                running.append(lease)
            else:
                manager.close(lease, (), 0)
        elif verb == "end" and running:
            manager.close(running.pop(number % len(running)), (), 0)
        elif verb == "export":
            made = Export(manager, tokens)
            assert total(made.runs) == len(made.tokens) == manager.cache.probe(tokens)
            under_way.append(made)
            exported.append((made, list(made.runs)))
        elif verb == "adopt":
            under_way.append(Adoption(manager, tokens))
        elif verb == "reserve" and isinstance(one, Adoption):
            one.reserve()
        elif verb == "commit" and isinstance(one, Adoption) and one.commit():
            assert manager.cache.probe(one.tokens) == len(one.tokens)
        elif verb == "release" and one is not None:
            one.release()
        elif verb == "rebuild" and number % 10 == 0:
            for lease in running:
                lease.clear()
            running.clear()
            manager.rebuild()
        owned(manager, running)
        for made, runs in exported:
            if made.valid:  # whatever else happens, the same tokens lie in the same slots
                lease = manager.open(made.tokens)
                assert slots_of(lease.path(manager.cache)) == [s for r in runs for s in range(r[0], sum(r))]
                manager.close(lease, (), 0)
    for one in under_way:
        one.release()
    for lease in running:
        manager.close(lease, (), 0)
    assert manager.flush()
    assert manager.allocator.free == manager.slots


def slots_of(nodes: Iterable[Any]) -> list[int]:
    return [slot for node in nodes for start, length in node.runs for slot in range(start, start + length)]


@pytest.mark.parametrize("key", ["a", None])
def test_a_namespace_is_its_own(key: str | None) -> None:
    manager = CacheManager(32)
    assert compute(manager, [1, 2, 3], key)
    other = "b" if key else "a"
    assert (len(Export(manager, [1, 2, 3], key).tokens), len(Export(manager, [1, 2, 3], other).tokens)) == (
        3,
        0,
    )
