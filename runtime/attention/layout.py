"""Layout: which queries see which runs of slots in one pass, in few and large pieces.

Plain ints; no tensors. A piece is a row's own part (Member), a block of its queries under a window (Band), or
runs that several rows share (Full). A token's results over all its pieces are merged by log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import NamedTuple

from runtime.plan import Run, Segment, StepPlan


def join(runs: Iterable[Run]) -> tuple[Run, ...]:
    """The same slots in the same order, with adjacent runs joined and empty ones dropped."""
    joined: list[Run] = []
    for run in runs:
        if run.length == 0:
            continue
        if joined and joined[-1].start + joined[-1].length == run.start:
            joined[-1] = Run(joined[-1].start, joined[-1].length + run.length)
        else:
            joined.append(run)
    return tuple(joined)


def cut_runs(runs: Iterable[Run], first: int, last: int) -> tuple[Run, ...]:
    """Tokens first .. last - 1 of the concatenation of `runs`."""
    cut, before = [], 0
    for run in runs:
        start, end = max(first - before, 0), min(last - before, run.length)
        if start < end:
            cut.append(Run(run.start + start, end - start))
        before += run.length
    return tuple(cut)


BAND_QUERIES = 256


class Span(NamedTuple):
    """Consecutive new tokens of the pass: the index of the first, and how many."""

    first: int
    size: int


class Full(NamedTuple):
    """All tokens in `spans` see all of `runs`."""

    spans: tuple[Span, ...]
    runs: tuple[Run, ...]


class Band(NamedTuple):
    """The tokens of `span` see the keys in `runs` that are not later than themselves and less than `window`
    back. The first key is `lead` positions before the first token."""

    span: Span
    runs: tuple[Run, ...]
    lead: int
    window: int


class Member(NamedTuple):
    """One row: its tokens see `past` keys, and one another causally; `runs` hold both."""

    span: Span
    runs: tuple[Run, ...]
    past: int


class Split(NamedTuple):
    """What one pass sees: bands and members, which cover every token once, and the runs that several rows
    share, those of the most rows first."""

    bands: list[Band]
    members: list[Member]
    shared: list[Full]


def split(plan: StepPlan, window: int | None, worth: int = 0) -> Split:
    """window: None = no window. worth: shared runs are separate only if that saves at least this many key
    reads, over all rows."""
    spans, first = [], 0
    for row in plan.rows:
        spans.append(Span(first, len(row.tokens)))
        first += len(row.tokens)
    by_row: dict[int, list[Run]] = {index: [] for index in range(len(spans))}  # of earlier tokens
    bands: list[Band] = []
    if window is not None:
        for index, row in enumerate(plan.rows):
            if len(row.tokens) > 1 and row.position + len(row.tokens) > window:
                bands += _bands(plan, index, spans[index], window)
                del by_row[index]
    shared: dict[tuple[int, ...], list[Run]] = {}
    for segment in sorted(plan.segments, key=lambda segment: segment.position):
        seen = [(segment.rows, segment.runs)] if window is None else _visible(plan, segment, window, by_row)
        for rows, runs in seen:
            if len(rows) == 1:
                by_row[rows[0]] += runs
            elif rows:
                shared.setdefault(rows, []).extend(runs)
    for rows in list(shared):
        if (len(rows) - 1) * sum(run.length for run in shared[rows]) < worth:
            for index in rows:
                by_row[index] += shared[rows]
            del shared[rows]
    members = [
        Member(spans[index], join([*runs, *plan.rows[index].slots]), sum([run.length for run in runs]))
        for index, runs in by_row.items()
    ]
    fulls = [
        Full(tuple(spans[row] for row in sorted(rows)), join(shared[rows]))
        for rows in sorted(shared, key=len, reverse=True)
    ]
    return Split(bands, members, fulls)


def _visible(
    plan: StepPlan, segment: Segment, window: int, by_row: Container[int]
) -> Iterator[tuple[tuple[int, ...], tuple[Run, ...]]]:
    """The segment's runs, cut to the window of each row of `by_row`; rows that see the same are grouped."""
    cuts: dict[int, list[int]] = {}
    length = segment.length
    for row in segment.rows:
        if row not in by_row:
            continue
        # The last query of a row sees the least. A row with several queries is here only if it sees all.
        last = plan.rows[row].position + len(plan.rows[row].tokens) - 1
        cuts.setdefault(max(0, last - window + 1 - segment.position), []).append(row)
    for cut, same in cuts.items():
        if cut < length:
            yield tuple(same), cut_runs(segment.runs, cut, length)


def _bands(plan: StepPlan, index: int, span: Span, window: int) -> Iterator[Band]:
    """Blocks of queries of a row whose later queries no longer see its first token."""
    row = plan.rows[index]
    segments = sorted((s for s in plan.segments if index in s.rows), key=lambda segment: segment.position)
    runs = join([*(run for segment in segments for run in segment.runs), *row.slots])
    for start in range(0, span.size, BAND_QUERIES):
        count = min(BAND_QUERIES, span.size - start)
        position = row.position + start
        first = max(0, position - window + 1)
        visible = cut_runs(runs, first, position + count)
        yield Band(Span(span.first + start, count), visible, position - first, window)
