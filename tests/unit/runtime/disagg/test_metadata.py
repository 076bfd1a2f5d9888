"""Metadata rows: what was packed is read, and only by its own room; rows are given out once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from runtime.disagg.transfer.metadata import Metadata, MetadataBuffers
from runtime.protocol.errors import BadRequest, TransferCorrupt, TransferError

FLOATS = st.floats(allow_nan=False, width=64)
PAIRS = st.lists(st.tuples(st.integers(0, 2**40), FLOATS), max_size=5).map(tuple)
METADATA = st.builds(
    Metadata,
    output_ids=st.lists(st.integers(0, 2**31), min_size=1, max_size=3).map(tuple),
    cached_tokens=st.integers(0, 2**31),
    logprobs=st.lists(st.none() | FLOATS, max_size=3).map(tuple),
    top_logprobs=st.lists(PAIRS, max_size=3).map(tuple),
    token_ids=st.lists(st.lists(FLOATS, max_size=4).map(tuple), max_size=3).map(tuple),
    hidden=st.lists(FLOATS, max_size=9).map(tuple),
)
ROOMS = st.integers(1, 2**63 - 1)


@given(METADATA, ROOMS, st.integers(0, 3))
def test_what_lands_is_what_was_packed(metadata: Metadata, room: int, index: int) -> None:
    there, here = MetadataBuffers(1, 4096), MetadataBuffers(4, 4096)
    here.land(index, there.pack(room, metadata))
    assert here.read(index, room) == metadata
    assert [here.read(other, room) for other in range(4) if other != index] == [None] * 3
    here.clear(index)
    assert here.read(index, room) is None


@given(METADATA, ROOMS, st.data())
def test_a_damaged_row_is_never_read(metadata: Metadata, room: int, data: st.DataObject) -> None:
    rows = MetadataBuffers(1, 4096)
    row = bytearray(rows.pack(room, metadata))
    at = data.draw(st.integers(0, len(row) - 1))
    row[at] ^= data.draw(st.integers(1, 255))
    rows.land(0, row)
    if not any(row[:8]):  # a room of 0 says that nothing is there
        assert rows.read(0, room) is None
        return
    with pytest.raises(TransferCorrupt):
        rows.read(0, room)


def test_another_room() -> None:
    rows = MetadataBuffers(2)
    rows.land(1, rows.pack(7, Metadata(output_ids=(1,))))
    with pytest.raises(TransferCorrupt, match="room 7 in the row of room 8"):
        rows.read(1, 8)


def test_metadata_that_do_not_fit() -> None:
    rows, large = MetadataBuffers(1, 64), MetadataBuffers(1, 8192)
    metadata = Metadata(output_ids=(1,), hidden=(0.5,) * 100)
    with pytest.raises(TransferError, match="a row holds 48"):
        rows.pack(1, metadata)
    with pytest.raises(TransferError, match="for a row of 64"):
        rows.land(0, large.pack(1, metadata))
    assert rows.read(0, 1) is None
    with pytest.raises(BadRequest):
        MetadataBuffers(0)
    with pytest.raises(BadRequest):
        MetadataBuffers(1, 32)


class Rows(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.rows = MetadataBuffers(3, 64)
        self.held: set[int] = set()

    @rule()
    def alloc(self) -> None:
        index = self.rows.alloc()
        assert (index is None) == (len(self.held) == 3)
        if index is not None:
            assert index not in self.held
            assert self.rows.read(index, 1) is None  # whatever was there before
            self.rows.land(index, self.rows.pack(index + 1, Metadata(output_ids=(index,))))
            self.held.add(index)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from(sorted(self.held)))
        self.held.remove(index)
        self.rows.release(index)
        with pytest.raises(ValueError, match="not in use"):
            self.rows.release(index)

    @invariant()
    def counts(self) -> None:
        assert self.rows.free == 3 - len(self.held)
        for index in self.held:
            assert self.rows.read(index, index + 1) == Metadata(output_ids=(index,))


TestRows = Rows.TestCase
