"""Classes of characters from UTF-8 bytes: the table of a small automaton from a lead byte to a class. Equal
parts are shared, so a Unicode category takes some hundred nodes.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

_BLOCK = 64  # code points below one continuation byte's parent
_LAST_BLOCK = 0x110000 // _BLOCK


@lru_cache(maxsize=16)
def utf8_table(intervals: tuple[tuple[int, int, int], ...], classes: int) -> npt.NDArray[np.int32]:
    """int32 [nodes, 256]. Node 0 waits for a first byte. An entry n >= 0: go on at node n; n < 0: the
    character is complete and of class ~n, where class `classes` means that no such character, or byte, is
    wanted."""
    dead = ~classes
    ascii_part = np.full(128, dead, dtype=np.int32)
    upper: list[tuple[int, int, int]] = []
    for first, last, number in intervals:
        ascii_part[first : min(last, 127) + 1] = ~number
        if last >= 128:
            upper.append((max(first, 128), last, number))
    names: dict[int, int] = {}
    relabelled = tuple((first, last, names.setdefault(number, len(names))) for first, last, number in upper)
    template = _upper(relabelled)
    values = np.array(
        [*(~number for number in names), dead], dtype=np.int32
    )  # label -> entry; the last is dead
    table = np.where(template < 0, values[np.where(template < 0, ~template, 0)], template).astype(np.int32)
    table[0, :128] = ascii_part
    table.flags.writeable = False
    return table


@lru_cache(maxsize=64)
def _upper(intervals: tuple[tuple[int, int, int], ...]) -> npt.NDArray[np.int32]:
    """The table for characters above ASCII. The label after the last one is the dead class."""
    dead = max((label for _, _, label in intervals), default=-1) + 1
    empty = np.full(256, ~dead, dtype=np.int32)
    if not intervals:
        return empty.reshape(1, 256)
    labels = np.full(0x110000, dead, dtype=np.int32)
    for first, last, label in intervals:
        labels[first : last + 1] = label
    nodes = _Nodes(empty)
    entries = ~labels
    root = empty.copy()
    for lead in range(0xC2, 0xE0):
        root[lead] = nodes.add(entries[(lead & 0x1F) * 64 :][:64], 0)
    blocks = entries.reshape(_LAST_BLOCK, _BLOCK)
    same = (blocks == blocks[:, :1]).all(axis=1)
    leaves: dict[int, int] = {}
    ids = np.empty(_LAST_BLOCK, dtype=np.int32)
    for number in range(0x800 // _BLOCK, _LAST_BLOCK):
        if same[number]:  # most blocks: one class throughout
            value = int(blocks[number, 0])
            if value not in leaves:
                leaves[value] = nodes.add(blocks[number], 0)
            ids[number] = leaves[value]
        else:
            ids[number] = nodes.add(blocks[number], 0)
    for lead in range(0xE0, 0xF0):
        low = 32 if lead == 0xE0 else 0  # shorter forms exist below: overlong, not UTF-8
        row = ids[(lead & 0xF) * 64 :][:64]
        root[lead] = nodes.add(row[low:], low)
    wide = [nodes.add(ids[start : start + 64], 0) for start in range(1024, _LAST_BLOCK, 64)]
    for lead in range(0xF0, 0xF5):
        low = 16 if lead == 0xF0 else 0
        start = (lead & 7) * 64 + low - 16
        row = np.array(wide[start : (lead & 7) * 64 + 48], dtype=np.int32)
        root[lead] = nodes.add(row, low)
    return nodes.table(root)


class _Nodes:
    """Rows under continuation bytes 0x80.., each stored once; one of dead entries only is dead itself."""

    def __init__(self, empty: npt.NDArray[np.int32]) -> None:
        self._empty = empty
        self._dead = int(empty[0])
        self._rows: list[npt.NDArray[np.int32]] = [empty]
        self._known: dict[bytes, int] = {}

    def add(self, entries: npt.NDArray[np.int32], low: int) -> int:
        """The node whose continuation bytes 0x80 + low ... lead to `entries`."""
        row = self._empty.copy()
        row[0x80 + low : 0x80 + low + len(entries)] = entries
        key = row.tobytes()
        if key not in self._known:
            if (row == self._dead).all():
                self._known[key] = self._dead
            else:
                self._known[key] = len(self._rows)
                self._rows.append(row)
        return self._known[key]

    def table(self, root: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        self._rows[0] = root
        return np.stack(self._rows)
