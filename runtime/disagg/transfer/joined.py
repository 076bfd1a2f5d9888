"""JoinedMemory: the KV pools of the ranks that share a model as one pool, which has all heads. So who
transfers KV need not know how many ranks there are on either side."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from runtime.disagg.transfer.memory import (
    ArrayMemory,
    KVLayout,
    KVMapping,
    Order,
    as_tokens,
    check_place,
    check_size,
    share,
    size_of,
)
from runtime.plan import Run


class JoinedMemory:
    """Implements KVMemory. `parts`: each rank's pool, with the same slots. A head that several ranks have is
    read from the first of them, and written to all. It lies in no one file."""

    def __init__(self, parts: Sequence[ArrayMemory]) -> None:
        """Raises TransferError when the ranks together have not all heads, ValueError for pools that do not
        belong together."""
        one = parts[0].layout
        self.slots = parts[0].slots
        self.layout: KVLayout = msgspec.structs.replace(one, first=0, heads=one.total_heads)
        for part in parts:
            alike = msgspec.structs.replace(part.layout, first=one.first, heads=one.heads)
            if part.slots != self.slots or alike != one:
                raise ValueError(f"pools that differ: {part.slots} slots, {part.layout}; {self.slots}, {one}")
        self.file: int | None = None
        self.mapping: KVMapping | None = None
        self._parts = tuple(parts)
        self._have = [part.layout.span for part in parts]
        share(self.layout.span, self._have)

    def read(self, runs: Sequence[Run], heads: range, order: Order) -> memoryview:
        check_place(self.layout, self.slots, runs, heads)
        piece = np.empty(size_of(self.layout, runs, heads), dtype=np.uint8)
        tokens = as_tokens(piece, self.layout, len(heads), order)
        for index, mine in share(heads, self._have):
            at, first = 0, mine.start - heads.start
            for part in self._parts[index].parts(runs, mine):
                tokens[at : at + len(part), :, :, first : first + len(mine)] = part
                at += len(part)
        return piece.data

    def write(self, runs: Sequence[Run], heads: range, order: Order, data: memoryview) -> None:
        check_place(self.layout, self.slots, runs, heads)
        check_size(self.layout, runs, heads, data)
        tokens = as_tokens(np.frombuffer(data, dtype=np.uint8), self.layout, len(heads), order)
        for rank, have in zip(self._parts, self._have):
            mine = range(max(heads.start, have.start), min(heads.stop, have.stop))
            if not len(mine):
                continue
            at, first = 0, mine.start - heads.start
            for part in rank.parts(runs, mine):
                part[...] = tokens[at : at + len(part), :, :, first : first + len(mine)]
                at += len(part)
