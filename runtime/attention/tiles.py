"""Tiles: a plan as tables for one kernel (runtime.kernels.paged_attention): which queries meet which keys.

Ints in numpy arrays; no tensors. Work is proportional to rows, segments, runs and tiles, never to the
context: keys are named by where they stand in a table of slots, which the device makes of the runs.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from runtime.plan import Run, Segment, StepPlan

Ints: TypeAlias = npt.NDArray[np.int64]

KEYS = 64  # a split's length is a multiple of it
SPLIT_AT_LEAST = 128  # keys of one split: fewer are not worth merging


class Tables(NamedTuple):
    """What is the same under every window.

    starts, lengths  of the runs of slots, in the order of the table of slots
    places           [tokens] where each new token's slot stands in it
    positions        [tokens]
    queries          indices of tokens
    tiles            [tiles, 5]: first of its queries, how many, first of its keys in the table of slots, how
                     many, the first one's position
    wide             [tiles] whether it has too many queries for a narrow tile
    lowest, highest  [tiles] positions of its queries
    """

    starts: Ints
    lengths: Ints
    places: Ints
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
    """The tiles under one window, cut into splits of their keys. narrow, wide [tiles, 6]: as in Tables, and
    the first partial result that it writes, or -1: it writes its tokens' results itself. of: indices of
    partial results, in the order of their tokens; ends [tokens + 1]: where each token's begin."""

    narrow: Ints
    wide: Ints
    of: Ints
    ends: Ints


def tables_of(plan: StepPlan, narrow: int, wide: int) -> Tables:
    """narrow, wide: how many tokens a tile of each kind has at most."""
    builder = _Builder()
    own: list[list[Segment]] = [[] for _ in plan.rows]
    shared: dict[tuple[int, ...], list[Segment]] = {}
    for segment in sorted(plan.segments, key=lambda segment: segment.position):
        if len(segment.rows) == 1:
            own[segment.rows[0]].append(segment)
        else:
            shared.setdefault(segment.rows, []).append(segment)
    spans, first = [], 0
    for row, mine in zip(plan.rows, own):
        count = len(row.tokens)
        spans.append(range(first, first + count))
        builder.begin(spans[-1])
        for segment in mine:
            builder.see(segment.position, segment.runs)
        builder.see(row.position, row.slots)
        builder.places += range(builder.keys - count, builder.keys)
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
    """Queries and the keys that they see, one group of queries after the other."""

    def __init__(self) -> None:
        self.keys = 0
        self.places: list[int] = []
        self.positions: list[int] = []
        self._queries: list[int] = []
        self._runs: list[Run] = []
        self._pieces: list[tuple[int, int, int, int, int]] = []
        self._query = 0  # first of the group
        self._piece = (0, 0, 0)  # the open stretch of keys: first, how many, position

    def begin(self, tokens: range | list[int]) -> None:
        self._query = len(self._queries)
        self._queries += tokens
        self._piece = (self.keys, 0, 0)

    def see(self, position: int, runs: tuple[Run, ...]) -> None:
        first, count, at = self._piece
        if count and at + count != position:  # others' keys lie between
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
            np.array(self.places),
            positions,
            queries,
            tiles,
            np.repeat(is_wide, repeated),
            np.minimum.reduceat(at, bounds)[::2],
            np.maximum.reduceat(at, bounds)[::2],
        )


def cut(tables: Tables, window: int | None, splits: int) -> Cut:
    """splits: about how many tiles there are to be, where keys are enough. A tile whose tokens get nothing
    from others writes the result itself."""
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
