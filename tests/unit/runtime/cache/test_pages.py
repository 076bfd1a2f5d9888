"""The page allocator against a bitmap."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.cache.pages import PageAllocator, join, split, total
from runtime.plan import Run
from runtime.protocol.errors import BadRequest, InternalFault
from tests.exploring import tries

ACTIONS = st.lists(
    st.tuples(st.sampled_from(["alloc", "free"]), st.integers(1, 24), st.integers(0, 24), st.integers(0, 40)),
    max_size=60,
)


@settings(max_examples=tries(150), deadline=None)
@given(page=st.integers(1, 5), pages=st.integers(1, 24), actions=ACTIONS, odd=st.integers(0, 4))
def test_like_a_bitmap(page: int, pages: int, actions: list[tuple[str, int, int, int]], odd: int) -> None:
    allocator = PageAllocator(pages * page + min(odd, page - 1), page)
    free = [True] * (pages * page)
    held: list[list[Run]] = []
    for action, need, wish, pick in actions:
        if action == "alloc":
            after = held[-1][-1].start + held[-1][-1].length if held else -1
            longest = max((run.length for run in allocator.free_runs()), default=0)
            follows = 0 <= after < len(free) and free[after]
            runs = allocator.alloc(need, wish, after)
            rounded = -(-need // page) * page
            if rounded > sum(free):
                assert runs is None
                continue
            assert runs is not None
            assert rounded <= total(runs) <= max(rounded, -(-wish // page) * page)
            assert not follows or runs[0].start == after
            assert follows or rounded > longest or len(runs) == 1
            for start, length in runs:
                assert start % page == length % page == 0
                assert all(free[start : start + length])
                free[start : start + length] = [False] * length
            held.append(runs)
        elif held:
            for start, length in held[pick % len(held)]:
                free[start : start + length] = [True] * length
            allocator.release(held.pop(pick % len(held)))
        assert allocator.free == sum(free)
        runs_now = allocator.free_runs()
        assert [slot for start, length in runs_now for slot in range(start, start + length)] == [
            slot for slot, is_free in enumerate(free) if is_free
        ]
        assert join(runs_now) == runs_now
    for runs in held:
        allocator.release(runs)
    assert allocator.free_runs() == [Run(0, pages * page)]


def test_takes_the_smallest_run_that_fits() -> None:
    allocator = PageAllocator(100)
    assert allocator.alloc(100) == [Run(0, 100)]
    allocator.release([Run(0, 10), Run(20, 5), Run(40, 30)])
    assert allocator.alloc(4) == [Run(20, 4)]
    assert allocator.alloc(8) == [Run(0, 8)]
    assert allocator.alloc(3, 20) == [Run(40, 20)], "a wish looks for room to grow"
    assert allocator.alloc(12) == [Run(60, 10), Run(8, 2)], "no run holds it: the largest first"


def test_a_tail_grows_in_place() -> None:
    allocator = PageAllocator(100)
    first = allocator.alloc(10)
    assert first == [Run(0, 10)]
    assert allocator.alloc(5, after=10) == [Run(10, 5)]
    allocator.alloc(5)
    allocator.release([Run(15, 5)])
    assert allocator.alloc(7, after=15) == [Run(15, 7)]


@pytest.mark.parametrize(
    ("runs", "word"),
    [
        ([Run(0, 4)], "twice"),
        ([Run(6, 4)], "twice"),
        ([Run(8, 2), Run(8, 2)], "twice"),
        ([Run(6, 12)], "twice"),
        ([Run(98, 4)], "no pages"),
        ([Run(-2, 2)], "no pages"),
        ([Run(9, 2)], "no pages"),
        ([Run(8, 3)], "no pages"),
    ],
)
def test_what_is_not_held_cannot_be_freed(runs: list[Run], word: str) -> None:
    allocator = PageAllocator(100, 2)
    allocator.alloc(100)
    allocator.release([Run(0, 8), Run(16, 4)])
    with pytest.raises(InternalFault, match=word):
        allocator.release(runs)


def test_a_pool_holds_a_page() -> None:
    with pytest.raises(BadRequest, match="holds no page"):
        PageAllocator(3, 4)


@given(st.lists(st.builds(Run, st.integers(0, 50), st.integers(1, 9)), max_size=6), st.data())
def test_split_and_join_keep_the_slots(runs: list[Run], data: st.DataObject) -> None:
    def slots(some: list[Run]) -> list[int]:
        return [slot for start, length in some for slot in range(start, start + length)]

    at = data.draw(st.integers(0, total(runs)))
    head, rest = split(runs, at)
    assert (slots(head), slots(rest)) == (slots(runs)[:at], slots(runs)[at:])
    assert slots(join(runs)) == slots(runs)
    with pytest.raises(InternalFault):
        split(runs, total(runs) + 1)
