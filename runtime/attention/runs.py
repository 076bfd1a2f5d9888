"""Arithmetic on runs of slots. Ints only."""

from __future__ import annotations

from collections.abc import Iterable

from runtime.plan import Run


def join(runs: Iterable[Run]) -> tuple[Run, ...]:
    """The same slots in the same order, neighbours made one, empty runs left out."""
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
