"""Lookahead: a decoding step is queued before its plan is there, so that a GPU never waits for Python.

What is queued on a GPU runs while Python goes on. Between two steps Python makes results, stop conditions,
the next plan and its tables; unless something is queued by then, the GPU is idle. So as soon as a step's
tokens are drawn, on the device, the next step of the same rows is queued with them, as if all of them went
on. Its keys and values go to slots set aside. The next plan takes what it asks for, and these keys and values
are copied to the slots that it names. Rows that ended were computed for nothing; rows that are new, or go on
with another token than the one drawn, are computed beside. (Elsewhere: asynchronous or overlapped
scheduling.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor

from runtime.attention.pool import KVPool
from runtime.config.runner import RunnerConfig
from runtime.engine.batch import Batch, decodes
from runtime.engine.graphs import Passes
from runtime.kernels.device import to_device
from runtime.plan import Row, RowResult, Run, Segment, StepPlan

BACKOFF_AT_MOST = 32  # steps


def rows_ahead(config: RunnerConfig, device: torch.device, ranks: int) -> int:
    """For how many rows slots are set aside: none where no steps are recorded."""
    recorded = config.cuda_graph and device.type == "cuda" and ranks == 1
    return config.cuda_graph_max_bs if config.lookahead and recorded else 0


class Taken(NamedTuple):
    """What a plan takes. hidden [rows ahead, hidden_size]; places: by row of the plan which of them is its;
    rest: the plan's other rows, by their numbers, as a plan of their own."""

    hidden: Tensor
    places: dict[int, int]
    rest: tuple[StepPlan, tuple[int, ...]] | None


class _Ahead(NamedTuple):
    hidden: Tensor
    places: dict[int, int]  # by sequence
    positions: list[int]
    tokens: list[int | None]


class Lookahead:
    """Of a runner. first, most: the slots set aside. limit: positions that the model has."""

    def __init__(self, passes: Passes, first: int, most: int, limit: int) -> None:
        self._passes, self._first, self._most, self._limit = passes, first, most, limit
        self._ahead: _Ahead | None = None
        self._backoff = self._to_skip = 0

    def forget(self) -> None:
        """What is queued is of no use any more."""
        self._ahead = None

    def queue(self, batch: Batch, tokens: Tensor) -> None:
        """tokens [rows]: what the rows of a batch that decodes drew, on the device; below 0: none."""
        rows = batch.plan.rows
        if self._to_skip:
            self._to_skip -= 1
            return
        if len(rows) > self._most or all(row.step + 1 >= row.sampling.max_new_tokens for row in rows):
            return
        if any(row.guesses or row.adapter or row.position + row.shift + 2 > self._limit for row in rows):
            return
        following = [
            Row(row.seq, (0,), row.position + 1, (Run(self._first + place, 1),), row.sampling)
            for place, row in enumerate(rows)
        ]
        written = [Segment(row.slots, (place,), row.position) for place, row in enumerate(rows)]
        plan = StepPlan(tuple(following), (*batch.plan.segments, *written))
        hidden = self._passes.recorded(plan, tokens.clamp(min=0).long(), batch.positions + 1)
        if hidden is not None:
            places = {row.seq: place for place, row in enumerate(rows)}
            self._ahead = _Ahead(hidden, places, [row.position for row in following], [None] * len(rows))

    def drew(self, results: Sequence[RowResult]) -> None:
        """What the tokens were that the last queue() got."""
        if self._ahead is not None:
            self._ahead.tokens[:] = [row.token for row in results]

    def take(self, plan: StepPlan, pool: KVPool) -> Taken | None:
        """What is there for `plan`, whose keys and values are in its slots then; None: nothing."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return None
        for handle in plan.released:
            ahead.places.pop(handle, None)
        places = {
            index: place
            for index, row in enumerate(plan.rows)
            if (place := ahead.places.get(row.seq)) is not None
            and decodes(row)
            and not row.adapter
            and row.position == ahead.positions[place]
            and row.tokens[0] == ahead.tokens[place]
        }
        whole = len(places) == len(plan.rows)
        # Two passes in place of one, for those who come or jump forward in each step, would not pay.
        self._backoff = 0 if whole else min(BACKOFF_AT_MOST, max(1, 2 * self._backoff))
        self._to_skip = self._backoff
        if not places:
            return None
        targets = [plan.rows[index].slots[0].start for index in places]
        sources = [self._first + place for place in places.values()]
        moves = to_device(torch.tensor((sources, targets), dtype=torch.int32), pool.device)
        pool.move(moves[0], moves[1])
        return Taken(ahead.hidden, places, None if whole else _without(plan, places))


def merged(taken: Taken, batch: Batch, rest: Batch | None, computed: Tensor | None) -> Tensor:
    """The hidden states that `batch` wants. computed: those that `rest` wants."""
    ahead = len(taken.hidden)
    if rest is None or computed is None or taken.rest is None:
        order = [taken.places[index] for index in batch.sampled]
        if order == list(range(ahead)):
            return taken.hidden
        return taken.hidden.index_select(0, to_device(torch.tensor(order), taken.hidden.device))
    numbers = taken.rest[1]
    sampled = {numbers[index]: ahead + turn for turn, index in enumerate(rest.sampled)}
    order = [taken.places[index] if index in taken.places else sampled[index] for index in batch.sampled]
    order += range(ahead + len(rest.sampled), ahead + len(computed))
    return torch.cat((taken.hidden, computed)).index_select(
        0, to_device(torch.tensor(order), computed.device)
    )


def _without(plan: StepPlan, places: Mapping[int, int]) -> tuple[StepPlan, tuple[int, ...]]:
    """The plan without some of its rows, and the numbers of the others."""
    numbers = tuple(index for index in range(len(plan.rows)) if index not in places)
    mine = {index: turn for turn, index in enumerate(numbers)}
    segments = tuple(
        replace(one, rows=users)
        for one in plan.segments
        if (users := tuple([mine[row] for row in one.rows if row in mine]))
    )
    return StepPlan(tuple(plan.rows[index] for index in numbers), segments), numbers
