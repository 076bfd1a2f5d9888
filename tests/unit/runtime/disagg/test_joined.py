"""Pools of ranks as one: the same bytes as a pool of all heads, whoever has which of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.disagg.transfer.memory import ArrayMemory, JoinedMemory, KVLayout, Order, make_memory, size_of
from runtime.plan import Run
from runtime.protocol.errors import TransferError

SLOTS, HEADS = 24, 4
ORDERS = st.sampled_from(("token", "head"))
RUNS = (Run(17, 3), Run(2, 5), Run(9, 1))


def pool(first: int, heads: int, order: Order) -> ArrayMemory:
    return make_memory(
        SLOTS,
        KVLayout(
            layers=2, total_heads=HEADS, head_bytes=8, dtype="float32", first=first, heads=heads, order=order
        ),
    )


def joined(ranks: int, order: Order) -> tuple[JoinedMemory, list[ArrayMemory]]:
    """Of 1, 2, 4 ranks, or of 8, two of which have each head."""
    each = max(1, HEADS // ranks)
    parts = [pool(rank * HEADS // ranks, each, order) for rank in range(ranks)]
    return JoinedMemory(parts), parts


@given(
    ranks=st.sampled_from((1, 2, 4, 8)), lying=ORDERS, order=ORDERS, first=st.integers(0, HEADS - 1),
    count=st.integers(1, HEADS), seed=st.integers(0, 9),
)  # fmt: skip
def test_they_are_as_one_pool(
    ranks: int, lying: Order, order: Order, first: int, count: int, seed: int
) -> None:
    whole, (many, parts) = pool(0, HEADS, lying), joined(ranks, lying)
    assert (many.layout, many.slots) == (whole.layout, SLOTS)
    heads = range(first, min(HEADS, first + count))
    dice = np.random.default_rng(seed)
    for memory_heads, runs in ((range(HEADS), [Run(0, SLOTS)]), (heads, RUNS)):
        data = dice.bytes(size_of(whole.layout, runs, memory_heads))
        for memory in (whole, many):
            memory.write(runs, memory_heads, order, memoryview(data))
    for order_read in ("token", "head"):
        assert many.read(RUNS, heads, order_read) == whole.read(RUNS, heads, order_read)
    for part in parts:  # those that hold the same head, too
        assert part.read([Run(0, SLOTS)], part.layout.span, "token") == whole.read(
            [Run(0, SLOTS)], part.layout.span, "token"
        )


def test_wrong_places_sizes_and_pools() -> None:
    many, parts = joined(2, "token")
    whole = size_of(many.layout, RUNS, range(HEADS))
    for runs, heads in ((RUNS, range(5)), ([Run(20, 5)], range(HEADS))):
        with pytest.raises(TransferError):
            many.read(runs, heads, "token")
    with pytest.raises(TransferError, match="bytes"):
        many.write(RUNS, range(HEADS), "token", memoryview(bytes(whole - 1)))
    with pytest.raises(TransferError, match="has head 2"):
        JoinedMemory(parts[:1])
    with pytest.raises(ValueError, match="pools that differ"):
        JoinedMemory([parts[0], pool(2, 2, "head")])
