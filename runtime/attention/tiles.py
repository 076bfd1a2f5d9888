"""Tiles: a plan as tables for one kernel (runtime.kernels.paged_attention): which queries meet which keys.
The work grows with rows, segments, runs and tiles, never with the context: a key is an index into a table
of slots, which the device computes from the runs."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from runtime.plan import Run, Segment, StepPlan

Ints: TypeAlias = npt.NDArray[np.int64]

KEYS = 64  # a split's length is a multiple of this
SPLIT_AT_LEAST = 128  # keys of one split: fewer are not worth a merge


class Tables(NamedTuple):
    """The tables that are the same under every window.

    starts, lengths  of the runs of slots, in the order of the table of slots
    slot_indices     [tokens] index of each new token's slot in that table
    positions        [tokens]
    queries          indices of tokens
    tiles            [tiles, 5]: start and count of its queries; start and count of its keys in the table of
                     slots; the first key's position
    wide             [tiles] whether it has too many queries for a narrow tile
    lowest, highest  [tiles] positions of its queries
    """

    starts: Ints
    lengths: Ints
    slot_indices: Ints
    positions: Ints
    queries: Ints
    tiles: Ints
    wide: npt.NDArray[np.bool_]
    lowest: Ints
    highest: Ints

    @property
    def keys(self) -> int:
        return int(self.lengths.sum())


class Cut(NamedTuple):
    """The tiles under one window, with their keys split. narrow, wide [tiles, 6]: as in Tables, and the index
    of the first partial result, or -1 if the tile writes its tokens' results itself. of: indices of partial
    results, in the order of their tokens; ends [tokens + 1]: where each token's begin."""

    narrow: Ints
    wide: Ints
    of: Ints
    ends: Ints


def tables_of(plan: StepPlan, narrow: int, wide: int) -> Tables:
    """narrow, wide: the most tokens of a tile of each kind."""
    builder = _Builder()
    by_row: list[list[Segment]] = [[] for _ in plan.rows]
    shared: dict[tuple[int, ...], list[Segment]] = {}
    for segment in sorted(plan.segments, key=lambda segment: segment.position):
        if len(segment.rows) == 1:
            by_row[segment.rows[0]].append(segment)
        else:
            shared.setdefault(segment.rows, []).append(segment)
    spans, first = [], 0
    for row, mine in zip(plan.rows, by_row):
        count = len(row.tokens)
        spans.append(range(first, first + count))
        builder.begin(spans[-1])
        for segment in mine:
            builder.see(segment.position, segment.runs)
        builder.see(row.position, row.slots)
        builder.slot_indices += range(builder.keys - count, builder.keys)
        builder.positions += range(row.position, row.position + count)
        builder.end()
        first += count
    for rows, segments in shared.items():
        builder.begin([token for row in rows for token in spans[row]])
        for segment in segments:
            builder.see(segment.position, segment.runs)
        builder.end()
    return builder.tables(narrow, wide)


class _Builder:
    """Collects queries and the keys that they see, group by group."""

    def __init__(self) -> None:
        self.keys = 0
        self.slot_indices: list[int] = []
        self.positions: list[int] = []
        self._queries: list[int] = []
        self._runs: list[Run] = []
        self._pieces: list[tuple[int, int, int, int, int]] = []
        self._query = 0  # first of the group
        self._piece = (0, 0, 0)  # the current range of keys: start, count, position

    def begin(self, tokens: range | list[int]) -> None:
        self._query = len(self._queries)
        self._queries += tokens
        self._piece = (self.keys, 0, 0)

    def see(self, position: int, runs: tuple[Run, ...]) -> None:
        first, count, at = self._piece
        if count and at + count != position:  # there is a gap
            self.end()
            first, count = self.keys, 0
        if not count:
            at = position
        for run in runs:
            count += run.length
        self._runs += runs
        self.keys = first + count
        self._piece = (first, count, at)

    def end(self) -> None:
        first, count, at = self._piece
        self._pieces.append((self._query, len(self._queries) - self._query, first, count, at))

    def tables(self, narrow: int, wide: int) -> Tables:
        queries, positions = np.array(self._queries), np.array(self.positions)
        pieces, runs = np.array(self._pieces), np.array(self._runs)
        is_wide = pieces[:, 1] > narrow
        size = np.where(is_wide, wide, narrow)
        repeated = -(-pieces[:, 1] // size)
        number = np.arange(repeated.sum()) - np.repeat(repeated.cumsum() - repeated, repeated)
        tiles, size = np.repeat(pieces, repeated, 0), np.repeat(size, repeated)
        tiles[:, 0] += number * size
        tiles[:, 1] = np.minimum(tiles[:, 1] - number * size, size)
        at = np.append(positions[queries], 0)
        bounds = np.stack((tiles[:, 0], tiles[:, 0] + tiles[:, 1]), 1).ravel()
        return Tables(
            runs[:, 0],
            runs[:, 1],
            np.array(self.slot_indices),
            positions,
            queries,
            tiles,
            np.repeat(is_wide, repeated),
            np.minimum.reduceat(at, bounds)[::2],
            np.maximum.reduceat(at, bounds)[::2],
        )


def cut(tables: Tables, window: int | None, splits: int) -> Cut:
    """splits: the target number of tiles, if there are enough keys. A tile whose tokens have no other tiles
    writes the result itself."""
    query, count, key, keys, position = tables.tiles.T
    last = np.minimum(keys, tables.highest + 1 - position)
    first = np.zeros_like(last) if window is None else np.maximum(0, tables.lowest - window + 1 - position)
    kept = last > first
    query, count, wide = query[kept], count[kept], tables.wide[kept]
    key, position, keys = (key + first)[kept], (position + first)[kept], (last - first)[kept]

    length = max(SPLIT_AT_LEAST, -(-int(keys.sum()) // (splits * KEYS)) * KEYS)
    repeated = -(-keys // length)
    begin = (np.arange(repeated.sum()) - np.repeat(repeated.cumsum() - repeated, repeated)) * length
    query, count, key, keys, position, wide = (
        np.repeat(column, repeated) for column in (query, count, key, keys, position, wide)
    )
    target = count.cumsum() - count
    token = tables.queries[np.repeat(query - target, count) + np.arange(count.sum())]
    parts = np.bincount(token, minlength=len(tables.positions))
    alone = np.maximum.reduceat(parts[token], target) == 1
    token = token[np.repeat(~alone, count)]
    parts = np.bincount(token, minlength=len(tables.positions))
    written = np.where(alone, 0, count)
    target = np.where(alone, -1, written.cumsum() - written)
    fields = np.stack(
        (query, count, key + begin, np.minimum(length, keys - begin), position + begin, target), 1
    )
    ends = np.concatenate(([0], parts.cumsum()))
    return Cut(fields[~wide], fields[wide], np.argsort(token, kind="stable"), ends)
