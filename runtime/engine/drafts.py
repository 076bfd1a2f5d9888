"""Drafts: what is sampled behind a row's guesses, and which of them were right. Knows plans and results only.

All places of all rows are sampled at once, those behind guesses as if these were right: one product with the
head instead of one for each guess. `asked` is the rows, and behind them, row by row, a row for each draft.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from runtime.plan import Row, Sample, TokenMask


def asked_of(rows: Sequence[Row]) -> list[Row]:
    """`rows`, and what is asked behind each draft of each of them if it is right."""
    behind = [_after(row, count) for row in rows for count in range(1, row.drafts + 1)]
    return [*rows, *behind]


def masks_of_asked(rows: Sequence[Row], masks: Mapping[int, TokenMask]) -> dict[int, TokenMask]:
    """`masks`, by row, as those of what is asked. A place without one is open where its row has none; where
    it has, it must not be sampled: see closed()."""
    found, at = dict(masks), len(rows)
    for place, row in enumerate(rows):
        if place in masks:
            found |= {at + turn: mask for turn, mask in enumerate(masks[place].behind[: row.drafts])}
        at += row.drafts
    return found


def closed(rows: Sequence[Row], masks: Mapping[int, TokenMask]) -> set[int]:
    """The places of what is asked that must not be sampled. masks: by row."""
    found: set[int] = set()
    at = len(rows)
    for place, row in enumerate(rows):
        if place in masks:
            found.update(range(at + min(row.drafts, len(masks[place].behind)), at + row.drafts))
        at += row.drafts
    return found


def taken(rows: Sequence[Row], sampled: Mapping[int, Sample | str]) -> list[tuple[Sample, ...] | str]:
    """What each row gives: its sample, and behind each draft that equals the one before another. sampled: by
    places of what is asked; what went wrong at a place that is come to is the row's answer."""
    made: list[tuple[Sample, ...] | str] = []
    at = len(rows)
    for place, row in enumerate(rows):
        samples: list[Sample] = []
        one: Sample | str | None = sampled[place]
        for turn in range(row.drafts + 1):
            if not isinstance(one, Sample):
                break
            samples.append(one)
            if turn == row.drafts or one.token != row.tokens[turn - row.drafts]:
                break
            one = sampled.get(at + turn)
        made.append(one if isinstance(one, str) else tuple(samples))
        at += row.drafts
    return made


def _after(row: Row, count: int) -> Row:
    """What is asked after so many drafts."""
    drafts = row.tokens[len(row.tokens) - row.drafts :][:count]
    return replace(row, step=row.step + count, output=[*row.output, *drafts])
