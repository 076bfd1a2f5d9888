"""Batch: a StepPlan as flat tensors, and the check that the plan is whole.

Knows the plan and the vocabulary's size; not the model, not sampling.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Container
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from runtime.engine.sampling.logprobs import Want
from runtime.kernels.device import to_device
from runtime.models.vision.store import ImageStore
from runtime.plan import MediaSpan, Row, StepPlan
from runtime.protocol.errors import InternalFault

_SHOWN: dict[str, Callable[[int], int]] = {
    "none": lambda length: 0,
    "last": lambda length: 1,
    "all": lambda length: length,
}


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """ids, positions   [tokens] int64, the plan's rows one behind the other; positions [3, tokens] where some
                     stand for parts of pictures
    sampled          plan row of each next token that is wanted
    wanted           [len(sampled) + scored + shown + drafts] int64: tokens whose final hidden states are
                     needed: to sample from, to score at, to give back as they are, to sample from behind
                     drafts; None: all tokens, to sample from, and nothing else
    targets          [scored] int64: the ids whose log-probabilities are wanted there, in the order of
    plan.rows
    wants            what each row with scores asks of them, in the same order
    shown            of how many tokens each plan row's hidden states are wanted
    media            which tokens stand for parts of pictures: [those] int64 and, in their order, the spans
    """

    plan: StepPlan
    ids: Tensor
    positions: Tensor
    sampled: tuple[int, ...]
    wanted: Tensor | None
    targets: Tensor
    wants: tuple[Want, ...]
    shown: tuple[int, ...]
    media: tuple[Tensor, tuple[MediaSpan, ...]] | None = None

    @classmethod
    def of(
        cls,
        plan: StepPlan,
        vocab_size: int,
        slots: int,
        device: torch.device,
        adapters: Container[int] = (),
        images: ImageStore | None = None,
    ) -> Batch:
        """Raises InternalFault when the plan is not whole: see check()."""
        check(plan, vocab_size, slots, adapters, images)
        if all(map(decodes, plan.rows)):
            return cls._of_decoding(plan, device)
        lengths = [len(row.tokens) for row in plan.rows]
        ids = [token for row in plan.rows for token in row.tokens]
        positions = [
            place
            for row, length in zip(plan.rows, lengths)
            for place in range(row.position + row.shift, row.position + row.shift + length)
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
        numbers = torch.tensor(list(chain.from_iterable(parts)), dtype=torch.int64)
        numbers = to_device(numbers, device)
        made = numbers.split([len(part) for part in parts])
        places, media = made[1], None
        if images is not None and any(row.media for row in plan.rows):
            places, media = _with_media(plan.rows, places, images)
        return cls(plan, made[0], places, tuple(sampled), made[2], made[3], tuple(wants), tuple(shown), media)

    @classmethod
    def _of_decoding(cls, plan: StepPlan, device: torch.device) -> Batch:
        """Of rows that all decode: the usual plan, for which little has to be made."""
        rows = plan.rows
        numbers = [row.tokens[0] for row in rows] + [row.position + row.shift for row in rows]
        ids, positions = to_device(torch.frombuffer(array("q", numbers), dtype=torch.int64), device).chunk(2)
        return cls(plan, ids, positions, tuple(range(len(rows))), None, ids[:0], (), (0,) * len(rows))


def decodes(row: Row) -> bool:
    """Whether it computes one token, to sample from, and nothing else."""
    one = row.sample and len(row.tokens) == 1
    return one and not row.scores and row.hidden == "none" and not row.media


def _with_media(
    rows: tuple[Row, ...], positions: Tensor, images: ImageStore
) -> tuple[Tensor, tuple[Tensor, tuple[MediaSpan, ...]]]:
    """The positions, in three numbers, and Batch.media."""
    found, first = positions.cpu().expand(3, -1).clone(), 0
    which: list[int] = []
    for row in rows:
        if row.media:
            found[:, first : first + len(row.tokens)] = images.positions(row)
        for span in row.media:
            which += range(first + span.first, first + span.first + span.length)
        first += len(row.tokens)
    spans = tuple([span for row in rows for span in row.media])
    device = positions.device
    return found.to(device), (torch.tensor(which, dtype=torch.int64).to(device), spans)


def check(
    plan: StepPlan,
    vocab_size: int,
    slots: int,
    adapters: Container[int] = (),
    images: ImageStore | None = None,
) -> None:
    """Raise InternalFault, naming the row, for a plan that would read or write the wrong memory: ids beyond
    the vocabulary, slots beyond the pool, KV that does not add up to the row's position, an adapter that is
    none of `adapters`, a picture that is none of `images`. Proportional to tokens to
    compute, rows and segments; not to the context."""
    if not plan.rows:
        raise InternalFault("the plan has no rows", where="step plan")
    covered = [0] * len(plan.rows)
    for segment in plan.segments:
        length = 0
        for start, size in segment.runs:
            if start < 0 or size < 1 or start + size > slots:
                raise InternalFault(
                    f"a segment of rows {segment.rows} leaves the pool of {slots} slots", where="step plan"
                )
            length += size
        for user in segment.rows:
            if not 0 <= user < len(plan.rows):
                raise InternalFault(f"a segment names row {user} of {len(plan.rows)}", where="step plan")
            covered[user] += length
    for index, (row, length) in enumerate(zip(plan.rows, covered)):
        if length == row.position and _usual(row, vocab_size, slots):
            continue
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
            _check_media(row, images, where)
        if row.token_ids and not (min(row.token_ids) >= 0 and max(row.token_ids) < vocab_size):
            raise InternalFault(
                f"token_ids {row.token_ids} leave the vocabulary of {vocab_size}", where=where
            )


def _usual(row: Row, vocab_size: int, slots: int) -> bool:
    """Whether it decodes a token, and nothing is wrong with it."""
    if len(row.tokens) != 1 or len(row.slots) != 1 or row.drafts:
        return False
    start, size = row.slots[0]
    plain = not (row.scores or row.adapter or row.media or row.token_ids)
    return plain and size == 1 and 0 <= start < slots and 0 <= row.tokens[0] < vocab_size


def _check_media(row: Row, images: ImageStore | None, where: str) -> None:
    if images is None:
        raise InternalFault("the model takes no media", where=where)
    at = 0
    for span in row.media:
        if span.item not in images:
            raise InternalFault(f"the picture {span.item} is not loaded", where=where)
        whole = images.tokens(span.item)
        within = span.offset >= 0 and span.length > 0 and span.offset + span.length <= whole
        if not within or span.first < at or span.first + span.length > len(row.tokens):
            raise InternalFault(f"{span} does not fit the row, or the picture's {whole} tokens", where=where)
        at = span.first + span.length
