"""Metadata: what was packed is read, and only for its own room; a damaged byte is found."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.disagg.transfer.metadata import Metadata, pack, unpack
from runtime.protocol.errors import TransferCorrupt

FLOATS = st.floats(allow_nan=False, width=64)
PAIRS = st.lists(st.tuples(st.integers(0, 2**40), FLOATS), max_size=5).map(tuple)
METADATA = st.builds(
    Metadata,
    output_ids=st.lists(st.integers(0, 2**31), min_size=1, max_size=3).map(tuple),
    cached_tokens=st.integers(0, 2**31),
    logprobs=st.lists(st.none() | FLOATS, max_size=3).map(tuple),
    top_logprobs=st.lists(PAIRS, max_size=3).map(tuple),
    token_ids=st.lists(st.lists(FLOATS, max_size=4).map(tuple), max_size=3).map(tuple),
)
ROOMS = st.integers(1, 2**63 - 1)


@given(METADATA, ROOMS)
def test_what_is_read_is_what_was_packed(metadata: Metadata, room: int) -> None:
    assert unpack(room, pack(room, metadata)) == metadata


@given(METADATA, ROOMS, st.data())
def test_damaged_metadata_are_never_read(metadata: Metadata, room: int, data: st.DataObject) -> None:
    row = bytearray(pack(room, metadata))
    at = data.draw(st.integers(0, len(row) - 1))
    row[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(TransferCorrupt):
        unpack(room, bytes(row))
    with pytest.raises(TransferCorrupt):
        unpack(room, pack(room, metadata)[: data.draw(st.integers(0, len(row) - 1))])


def test_another_room() -> None:
    with pytest.raises(TransferCorrupt, match="of room 7 came for room 8"):
        unpack(8, pack(7, Metadata(output_ids=(1,))))
