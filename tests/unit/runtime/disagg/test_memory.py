"""A pool's bytes: what is read from one and written to another is the same, in whatever order each lies."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.disagg.transfer.memory import (
    ArrayMemory,
    KVLayout,
    Order,
    cut,
    make_memory,
    share,
    size_of,
    spots,
    tokens_of,
)
from runtime.plan import Run
from runtime.protocol.errors import TransferError

SLOTS = 40


def layout(order: Order, first: int = 0, heads: int = 4, width: int = 16) -> KVLayout:
    return KVLayout(3, 4, width, "float32", first, heads, order)


def filled(order: Order, first: int = 0, heads: int = 4, width: int = 16) -> ArrayMemory:
    """Each byte tells its slot, layer, head and place, whoever holds it."""
    memory = make_memory(SLOTS, layout(order, first, heads, width))
    slot, layer, kind, head, place = np.ogrid[:SLOTS, :3, :2, first : first + heads, :width]
    memory.view[...] = (slot * 31 + layer * 7 + kind * 101 + head * 17 + place * 3) % 251
    return memory


def runs_of(draw: st.DrawFn, count: int) -> list[Run]:
    """Disjoint runs of `count` slots, in any order."""
    cuts = sorted(draw(st.sets(st.integers(1, count - 1), max_size=4))) if count > 1 else []
    lengths = [b - a for a, b in zip([0, *cuts], [*cuts, count])]
    gap, start, runs = (SLOTS - count) // (len(lengths) + 1), 0, []
    for length in lengths:
        start += draw(st.integers(0, gap))
        runs.append(Run(start, length))
        start += length
    return draw(st.permutations(runs))


@st.composite
def moves(draw: st.DrawFn) -> tuple[list[Run], list[Run]]:
    count = draw(st.integers(1, 24))
    return runs_of(draw, count), runs_of(draw, count)


def bytes_at(memory: ArrayMemory, runs: list[Run], heads: range) -> bytes:
    return b"".join(part.tobytes() for part in memory.parts(runs, heads))


ORDERS = st.sampled_from(["token", "head"])


@given(moves(), ORDERS, ORDERS, ORDERS, st.sampled_from([16, 12, 6]))
def test_what_is_read_is_what_is_written(
    move: tuple[list[Run], list[Run]], here: Order, wire: Order, there: Order, width: int
) -> None:
    source, target = move
    a, b = filled(here, width=width), make_memory(SLOTS, layout(there, width=width))
    before = bytes_at(a, [Run(0, SLOTS)], range(4))
    b.write(target, range(4), wire, a.read(source, range(4), wire))
    assert bytes_at(b, target, range(4)) == bytes_at(a, source, range(4))
    assert bytes_at(a, [Run(0, SLOTS)], range(4)) == before
    rest = np.ones(SLOTS, dtype=bool)
    for start, length in target:
        rest[start : start + length] = False
    assert not b.view[rest].any()  # nothing beside the runs


@given(moves(), ORDERS, ORDERS)
def test_heads_of_ranks_of_other_sizes(move: tuple[list[Run], list[Run]], here: Order, there: Order) -> None:
    """From two ranks of two heads each to ranks of one and three."""
    source, target = move
    whole = filled("token")
    senders = [filled(here, 0, 2), filled(here, 2, 2)]
    for first, heads in ((0, 1), (1, 3)):
        mine = make_memory(SLOTS, layout(there, first, heads))
        span = mine.layout.span
        for index, part in share(span, [one.layout.span for one in senders]):
            mine.write(target, part, here, senders[index].read(source, part, here))
        assert bytes_at(mine, target, span) == bytes_at(whole, source, span)


@given(moves(), ORDERS, st.integers(1, 4), st.sampled_from([4, 16]))
def test_spots_are_where_a_piece_comes_from(
    move: tuple[list[Run], list[Run]], order: Order, heads: int, width: int
) -> None:
    runs, _ = move
    memory = filled(order, 4 - heads, heads, width)
    address, mapping = memory.address
    whole = np.frombuffer((ctypes.c_char * mapping.size).from_address(address), dtype=np.uint8)
    for span in {range(4 - heads, 4), range(3, 4)}:
        found = spots(mapping, runs, span)
        gathered = b"".join(whole[at : at + count].tobytes() for at, count in found)
        assert gathered == bytes(memory.read(runs, span, order))
    with pytest.raises(TransferError, match="slots"):
        spots(mapping, [Run(SLOTS, 1)], range(3, 4))


def test_shares_take_each_head_once() -> None:
    assert share(range(4), [range(4)]) == [(0, range(4))]
    assert share(range(1, 3), [range(2), range(2, 4)]) == [(0, range(1, 2)), (1, range(2, 3))]
    # more ranks than heads: some hold the same
    assert share(range(2), [range(1), range(1), range(1, 2), range(1, 2)]) == [
        (0, range(1)),
        (2, range(1, 2)),
    ]
    with pytest.raises(TransferError, match="head 3"):
        share(range(4), [range(3)])


@given(moves(), st.data())
def test_cut_takes_tokens_in_order(move: tuple[list[Run], list[Run]], data: st.DataObject) -> None:
    runs, _ = move
    slots = [slot for start, length in runs for slot in range(start, start + length)]
    first = data.draw(st.integers(0, len(slots)))
    count = data.draw(st.integers(0, len(slots) - first))
    found = [slot for start, length in cut(runs, first, count) for slot in range(start, start + length)]
    assert found == slots[first : first + count]
    with pytest.raises(ValueError, match="beyond the end"):
        cut(runs, first, len(slots) - first + 1)


@pytest.mark.parametrize("runs", [[Run(-1, 2)], [Run(SLOTS - 1, 2)], [Run(0, 0)], [Run(0, 1), Run(SLOTS, 1)]])
def test_slots_that_are_not_there(runs: list[Run]) -> None:
    memory = filled("head")
    with pytest.raises(TransferError, match="slots"):
        memory.read(runs, range(4), "token")
    size = max(0, size_of(memory.layout, runs, range(4)))
    with pytest.raises(TransferError, match="slots"):
        memory.write(runs, range(4), "token", memoryview(bytes(size)))


def test_heads_and_sizes_that_do_not_fit() -> None:
    memory = filled("head", first=1, heads=2)
    for heads in (range(2), range(2, 4), range(1, 1), range(1, 4, 2)):
        with pytest.raises(TransferError, match="heads"):
            memory.read([Run(0, 1)], heads, "token")
    before = memory.view.copy()
    data = memory.read([Run(0, 2)], range(1, 3), "token")
    with pytest.raises(TransferError, match="bytes for slots"):
        memory.write([Run(0, 2)], range(1, 3), "token", data[:-1])
    assert (memory.view == before).all()
    assert tokens_of([Run(0, 2), Run(5, 1)]) == 3


def test_layouts_that_do_not_fit_name_what_differs() -> None:
    mine = layout("head")
    mine.check(layout("token"))
    for other, name in (
        (KVLayout(2, 4, 16, "float32", 0, 4), "layers"),
        (KVLayout(3, 8, 16, "float32", 0, 4), "total_heads"),
        (KVLayout(3, 4, 32, "float32", 0, 4), "head_bytes"),
        (KVLayout(3, 4, 16, "bfloat16", 0, 4), "dtype"),
        (layout("head", first=2, heads=2), "first"),
        (layout("head", heads=2), "heads"),
    ):
        with pytest.raises(TransferError, match=name):
            mine.check(other)
