"""Batch: a StepPlan as flat tensors, and the check that the plan is whole.

Knows the plan and the vocabulary's size; not the model, not sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from runtime.engine.sampling.logprobs import Want
from runtime.plan import StepPlan
from runtime.protocol.errors import InternalFault

_SHOWN: dict[str, Callable[[int], int]] = {
    "none": lambda length: 0,
    "last": lambda length: 1,
    "all": lambda length: length,
}


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """ids, positions   [tokens] int64, the plan's rows one behind the other
    sampled          plan row of each next token that is wanted
    wanted           [len(sampled) + scored + shown + drafts] int64: tokens whose final hidden states are
                     needed: to sample from, to score at, to give back as they are, to sample from behind
                     drafts
    targets          [scored] int64: the ids whose log-probabilities are wanted there, in the order of
    plan.rows
    wants            what each row with scores asks of them, in the same order
    shown            of how many tokens each plan row's hidden states are wanted
    """

    plan: StepPlan
    ids: Tensor
    positions: Tensor
    sampled: tuple[int, ...]
    wanted: Tensor
    targets: Tensor
    wants: tuple[Want, ...]
    shown: tuple[int, ...]

    @classmethod
    def of(
        cls,
        plan: StepPlan,
        vocab_size: int,
        slots: int,
        device: torch.device,
        adapters: Container[int] = (),
    ) -> Batch:
        """Raises InternalFault when the plan is not whole: see check()."""
        check(plan, vocab_size, slots, adapters)
        lengths = [len(row.tokens) for row in plan.rows]
        ids = [token for row in plan.rows for token in row.tokens]
        positions = [
            place
            for row, length in zip(plan.rows, lengths)
            for place in range(row.position, row.position + length)
        ]
        sampled, wanted, scored, targets, first = [], [], [], [], 0
        wants: list[Want] = []
        shown: list[int] = []
        states: list[int] = []
        drafts: list[int] = []
        for index, (row, length) in enumerate(zip(plan.rows, lengths)):
            if row.sample:
                sampled.append(index)
                wanted.append(first + length - 1 - row.drafts)
                drafts += range(first + length - row.drafts, first + length)
            scored += [first + token for token, _ in row.scores]
            targets += [target for _, target in row.scores]
            if row.scores:
                wants.append(Want(len(row.scores), row.score_top, row.token_ids))
            shown.append(_SHOWN[row.hidden](length))
            states += range(first + length - shown[-1], first + length)
            first += length
        parts = (ids, positions, wanted + scored + states + drafts, targets)
        # One tensor, and one copy to the device.
        numbers = torch.tensor(list(chain.from_iterable(parts)), dtype=torch.int64).to(device)
        made = numbers.split([len(part) for part in parts])
        return cls(plan, made[0], made[1], tuple(sampled), made[2], made[3], tuple(wants), tuple(shown))


def check(plan: StepPlan, vocab_size: int, slots: int, adapters: Container[int] = ()) -> None:
    """Raise InternalFault, naming the row, for a plan that would read or write the wrong memory: ids beyond
    the vocabulary, slots beyond the pool, KV that does not add up to the row's position, an adapter that is
    none of `adapters`. Proportional to tokens to compute, rows and segments; not to the context."""
    if not plan.rows:
        raise InternalFault("the plan has no rows", where="step plan")
    covered = [0] * len(plan.rows)
    for segment in plan.segments:
        length = segment.length
        if any(run.start < 0 or run.length < 1 or run.start + run.length > slots for run in segment.runs):
            raise InternalFault(
                f"a segment of rows {segment.rows} leaves the pool of {slots} slots", where="step plan"
            )
        for user in segment.rows:
            if not 0 <= user < len(plan.rows):
                raise InternalFault(f"a segment names row {user} of {len(plan.rows)}", where="step plan")
            covered[user] += length
    for index, (row, length) in enumerate(zip(plan.rows, covered)):
        where = f"step plan, row {index} (sequence {row.seq})"
        if not row.tokens:
            raise InternalFault("the row has no tokens", where=where)
        if length != row.position:
            raise InternalFault(
                f"its segments hold {length} tokens, its position is {row.position}", where=where
            )
        if sum(run.length for run in row.slots) != len(row.tokens):
            raise InternalFault(f"slots {row.slots} do not fit its {len(row.tokens)} tokens", where=where)
        if any(run.start < 0 or run.start + run.length > slots for run in row.slots):
            raise InternalFault(f"slots {row.slots} leave the pool of {slots} slots", where=where)
        if min(row.tokens) < 0 or max(row.tokens) >= vocab_size:
            raise InternalFault(f"an input id is outside the vocabulary of {vocab_size}", where=where)
        if any(
            not 0 <= token < len(row.tokens) or not 0 <= target < vocab_size for token, target in row.scores
        ):
            raise InternalFault(
                f"scores {row.scores} point outside its tokens or the vocabulary", where=where
            )
        if not 0 <= row.drafts < len(row.tokens) or (row.drafts and not row.sample):
            raise InternalFault(f"{row.drafts} of its {len(row.tokens)} tokens are drafts", where=where)
        if row.adapter and row.adapter not in adapters:
            raise InternalFault(f"the adapter {row.adapter} is not loaded", where=where)
        if row.media:
            raise InternalFault("the model takes no media", where=where)
        if row.token_ids and not (min(row.token_ids) >= 0 and max(row.token_ids) < vocab_size):
            raise InternalFault(
                f"token_ids {row.token_ids} leave the vocabulary of {vocab_size}", where=where
            )
