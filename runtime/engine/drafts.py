"""Drafts: sampling after a row's drafts, and which drafts are accepted. Knows only plans and results.

All positions of all rows are sampled at once, those after drafts as if these were right: one product with the
head instead of one per draft. The expanded rows are the rows, followed by one row for each draft, row by row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from runtime.plan import Row, Sample, TokenMask


def with_draft_rows(rows: Sequence[Row]) -> list[Row]:
    """The expanded rows: `rows`, followed by a row for each draft, which samples after it as if it were
    right."""
    behind = [_after(row, count) for row in rows for count in range(1, row.drafts + 1)]
    return [*rows, *behind]


def masks_with_drafts(rows: Sequence[Row], masks: Mapping[int, TokenMask]) -> dict[int, TokenMask]:
    """`masks`, by row, as masks of the expanded rows. A row for a draft is unconstrained if its row has no
    mask. If that has one but the draft does not, it must not be sampled: see closed()."""
    masks_of_row, at = dict(masks), len(rows)
    for index, row in enumerate(rows):
        if index in masks:
            masks_of_row |= {at + turn: mask for turn, mask in enumerate(masks[index].behind[: row.drafts])}
        at += row.drafts
    return masks_of_row


def closed(rows: Sequence[Row], masks: Mapping[int, TokenMask]) -> set[int]:
    """The indices of expanded rows that must not be sampled. masks: by row."""
    indices: set[int] = set()
    at = len(rows)
    for index, row in enumerate(rows):
        if index in masks:
            indices.update(range(at + min(row.drafts, len(masks[index].behind)), at + row.drafts))
        at += row.drafts
    return indices


def accepted(rows: Sequence[Row], sampled: Mapping[int, Sample | str]) -> list[tuple[Sample, ...] | str]:
    """The result of each row: its sample, and one more after each draft that equals the sample before it.
    sampled: by index of the expanded rows. An error at a position that is reached is the row's result."""
    results: list[tuple[Sample, ...] | str] = []
    at = len(rows)
    for index, row in enumerate(rows):
        samples: list[Sample] = []
        one: Sample | str | None = sampled[index]
        for turn in range(row.drafts + 1):
            if not isinstance(one, Sample):
                break
            samples.append(one)
            if turn == row.drafts or one.token != row.tokens[turn - row.drafts]:
                break
            one = sampled.get(at + turn)
        results.append(one if isinstance(one, str) else tuple(samples))
        at += row.drafts
    return results


def _after(row: Row, count: int) -> Row:
    """The row that samples after the first `count` drafts."""
    drafts = row.tokens[len(row.tokens) - row.drafts :][:count]
    return replace(row, step=row.step + count, output=[*row.output, *drafts])
