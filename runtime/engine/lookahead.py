"""Lookahead: a decoding step is queued before its plan exists, so that a GPU never waits for Python
(elsewhere: asynchronous or overlapped scheduling).

As soon as a step's tokens are drawn on the device, the next step of the same rows is queued with them, as if
all rows continued. Its keys and values go to reserved slots. The next plan takes the rows that it asks for,
and their keys and values are copied to its slots; rows that are new, or continue with another token, are
computed in a separate pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from runtime.attention.pool import KVPool
from runtime.config.runner import RunnerConfig
from runtime.engine.batch import Batch, decodes, of_rows
from runtime.engine.graphs import Passes
from runtime.kernels.device import to_device
from runtime.plan import Row, RowResult, Run, Segment, StepPlan

BACKOFF_AT_MOST = 32  # steps


def rows_ahead(config: RunnerConfig, device: torch.device, ranks: int) -> int:
    """The number of rows that get reserved slots; none if no steps are recorded."""
    recorded = config.cuda_graph and device.type == "cuda" and ranks == 1
    return config.cuda_graph_max_bs if config.lookahead and recorded else 0


class Precomputed(NamedTuple):
    """The rows of a plan that were computed ahead. hidden [rows ahead, hidden_size]; ahead_rows: by row of
    the plan, its row in `hidden`; rest: the plan's other rows as a plan of their own, and their indices."""

    hidden: Tensor
    ahead_rows: dict[int, int]
    rest: tuple[StepPlan, tuple[int, ...]] | None


class _Ahead(NamedTuple):
    hidden: Tensor
    ahead_rows: dict[int, int]  # the row of each sequence
    positions: list[int]
    tokens: list[int | None]


class Lookahead:
    """The lookahead of a runner. first, most: the start and number of reserved slots. limit: the model's
    maximum number of positions."""

    def __init__(self, passes: Passes, first: int, most: int, limit: int) -> None:
        self._passes, self._first, self._most, self._limit = passes, first, most, limit
        self._ahead: _Ahead | None = None
        self._backoff = self._to_skip = 0

    def forget(self) -> None:
        """Drop the queued step."""
        self._ahead = None

    def queue(self, batch: Batch, tokens: Tensor) -> None:
        """tokens [rows]: the tokens drawn for the rows of a decoding batch, on the device; below 0: none."""
        rows = batch.plan.rows
        if self._to_skip:
            self._to_skip -= 1
            return
        if len(rows) > self._most or all(row.step + 1 >= row.sampling.max_new_tokens for row in rows):
            return
        if any(row.guesses or row.adapter or row.position + row.shift + 2 > self._limit for row in rows):
            return
        following = [
            Row(row.seq, (0,), row.position + 1, (Run(self._first + index, 1),), row.sampling)
            for index, row in enumerate(rows)
        ]
        written = [Segment(row.slots, (index,), row.position) for index, row in enumerate(rows)]
        plan = StepPlan(tuple(following), (*batch.plan.segments, *written))
        hidden = self._passes.recorded(plan, tokens.clamp(min=0).long(), batch.positions + 1)
        if hidden is not None:
            ahead_rows = {row.seq: index for index, row in enumerate(rows)}
            self._ahead = _Ahead(hidden, ahead_rows, [row.position for row in following], [None] * len(rows))

    def drew(self, results: Sequence[RowResult]) -> None:
        """Record the tokens that the last queue() was given."""
        if self._ahead is not None:
            self._ahead.tokens[:] = [row.token for row in results]

    def take(self, plan: StepPlan, pool: KVPool) -> Precomputed | None:
        """The rows of `plan` that were computed ahead; copies their keys and values to the plan's slots. None
        if there are none."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return None
        for handle in plan.released:
            ahead.ahead_rows.pop(handle, None)
        ahead_rows = {
            index: ahead_row
            for index, row in enumerate(plan.rows)
            if (ahead_row := ahead.ahead_rows.get(row.seq)) is not None
            and decodes(row)
            and not row.adapter
            and row.position == ahead.positions[ahead_row]
            and row.tokens[0] == ahead.tokens[ahead_row]
        }
        whole = len(ahead_rows) == len(plan.rows)
        # Two passes instead of one do not pay if rows start or jump forward in each step.
        self._backoff = 0 if whole else min(BACKOFF_AT_MOST, max(1, 2 * self._backoff))
        self._to_skip = self._backoff
        if not ahead_rows:
            return None
        targets = [plan.rows[index].slots[0].start for index in ahead_rows]
        sources = [self._first + ahead_row for ahead_row in ahead_rows.values()]
        moves = to_device(torch.tensor((sources, targets), dtype=torch.int32), pool.device)
        pool.move(moves[0], moves[1])
        return Precomputed(ahead.hidden, ahead_rows, None if whole else _without(plan, ahead_rows))


def merged(precomputed: Precomputed, batch: Batch, rest: Batch | None, computed: Tensor | None) -> Tensor:
    """The hidden states for `batch`. computed: those of `rest`."""
    ahead = len(precomputed.hidden)
    if rest is None or computed is None or precomputed.rest is None:
        order = [precomputed.ahead_rows[index] for index in batch.sampled]
        if order == list(range(ahead)):
            return precomputed.hidden
        return precomputed.hidden.index_select(0, to_device(torch.tensor(order), precomputed.hidden.device))
    numbers = precomputed.rest[1]
    sampled = {numbers[index]: ahead + turn for turn, index in enumerate(rest.sampled)}
    order = [
        precomputed.ahead_rows[index] if index in precomputed.ahead_rows else sampled[index]
        for index in batch.sampled
    ]
    order += range(ahead + len(rest.sampled), ahead + len(computed))
    return torch.cat((precomputed.hidden, computed)).index_select(
        0, to_device(torch.tensor(order), computed.device)
    )


def _without(plan: StepPlan, removed: Mapping[int, int]) -> tuple[StepPlan, tuple[int, ...]]:
    """The plan without some rows, and the indices of the others."""
    numbers = tuple(index for index in range(len(plan.rows)) if index not in removed)
    mine = {index: turn for turn, index in enumerate(numbers)}
    return StepPlan(tuple(plan.rows[index] for index in numbers), of_rows(plan.segments, mine)), numbers
