"""Drafts: which guesses of a row were right, and what is asked behind them. Knows plans and results only."""

from __future__ import annotations

from msgspec.structs import replace

from runtime.plan import Row, Sample


def guessed(row: Row, turn: int, made: tuple[Sample, ...] | str) -> bool:
    """Whether the draft with this number is what was sampled there."""
    return turn < row.drafts and not isinstance(made, str) and made[-1].token == row.tokens[turn - row.drafts]


def after_drafts(row: Row, count: int) -> Row:
    """What is asked after so many drafts that were right."""
    drafts = row.tokens[len(row.tokens) - row.drafts :][:count]
    return replace(row, step=row.step + count, output=[*row.output, *drafts])
