"""RowSampler: from the hidden states of a pass to the result of each row.

All positions of all rows are sampled at once, those after drafts as if these were right: one product with the
head instead of one per draft. The expanded rows are the rows, followed by one row for each draft, row by row.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace
from torch import Tensor

from runtime.engine.sampling.logprobs import NOT_FINITE, Logits, finite, ids_of, temperatures_of, top_of
from runtime.engine.sampling.sampler import Sampler, Then, key_of
from runtime.kernels.device import compiled
from runtime.models.decoder import Decoder
from runtime.plan import Row, Sample, TokenMask

LOGITS_AT_ONCE = 1 << 26
"""Elements of logits; more are computed in parts."""
Sampled: TypeAlias = Sample | str
"""The sample of a position, or an error message."""


class RowSampler:
    """head: may be replaced between passes. most: rows whose logits are computed at once."""

    def __init__(
        self, head: Decoder, sampler: Sampler, vocab_size: int, seed: int | None, *, scaled: bool, lists: bool
    ) -> None:
        """seed: for sequences without a seed. scaled: log-probabilities are at the temperature of their row.
        lists: if a row's mask lists few ids, compute only their logits; not on a GPU, where a kernel would be
        compiled for each length. All ranks of a group must agree on these."""
        self.head, self.sampler = head, sampler
        self.most = max(64, LOGITS_AT_ONCE // vocab_size)
        self._vocab_size, self._scaled, self._lists = vocab_size, scaled, lists
        self._random = random.Random(seed)
        self._seeds: dict[int, int] = {}  # of live sequences without a seed of their own

    def release(self, handles: Iterable[int]) -> None:
        """Forget sequences that have ended."""
        handles = tuple(handles)
        for handle in handles:
            self._seeds.pop(handle, None)
        self.sampler.release(handles)

    def logits(self, last: Tensor, rows: Sequence[Row]) -> Logits:
        """last [rows, hidden]."""
        logits = self.head.logits(last)
        needs_logprobs = any(row.logprob or row.top_logprobs or row.token_ids for row in rows)
        scaled = self._scaled and needs_logprobs
        scaled_logits = logits / temperatures_of(rows, logits.device) if scaled else logits
        summed = needs_logprobs and not self.sampler.computes_logsumexp
        return Logits(logits, scaled_logits, scaled_logits.logsumexp(-1) if summed else None)

    def sampled(
        self,
        last: Tensor,
        drafts: Tensor,
        expanded: list[Row],
        known: Logits | None,
        mine: Mapping[int, TokenMask],
        then: Then | None,
    ) -> list[tuple[Sample, ...] | str]:
        """The result of each sampled row, or an error message: a sample, and one more after each draft that
        equals the sample before, as far as its masks go. All ranks compute the same.

        last [rows, hidden], drafts [drafts, hidden]: hidden states of the rows and after their drafts.
        expanded: the rows for both. known: their logits, if already computed. mine: masks by row. then:
        called after the draws.
        """
        rows = expanded[: len(last)]
        if len(expanded) == len(rows):
            samples = self._sample_rows(last, rows, mine, known, then)
            return [one if isinstance(one, str) else (one,) for one in samples]
        hidden = torch.cat((last, drafts))
        (theirs, out), indices = masks_with_drafts(rows, mine), list(range(len(expanded)))
        if out and known is None:
            indices = [index for index in indices if index not in out]
            hidden, expanded = hidden[indices], [expanded[index] for index in indices]
            theirs = {at: theirs[index] for at, index in enumerate(indices) if index in theirs}
        samples = self._sample_rows(hidden, expanded, theirs, known)
        return accepted(rows, {index: one for index, one in zip(indices, samples) if index not in out})

    def _sample_rows(
        self,
        last: Tensor,
        rows: Sequence[Row],
        mine: Mapping[int, TokenMask],
        known: Logits | None,
        then: Then | None = None,
    ) -> list[Sampled]:
        """last [rows, hidden]. mine: masks by row. known: the logits, if already computed. then: called after
        the draws; all rows are drawn together then, even if masks allow few ids."""
        most = self.most
        if known is None and len(rows) > most:
            parts = [range(first, min(first + most, len(rows))) for first in range(0, len(rows), most)]
            return [
                one
                for part in parts
                for one in self._sample_rows(
                    last[part.start : part.stop],
                    rows[part.start : part.stop],
                    {index - part.start: mask for index, mask in mine.items() if index in part},
                    None,
                )
            ]
        keys = [self._key(row) for row in rows]
        if known is not None or then is not None or not self._lists:
            return self._from_logits(known or self.logits(last, rows), rows, mine, keys, then)
        few = few_logits(rows, mine, self._vocab_size)
        rest = [index for index in range(len(rows)) if index not in few]
        results: dict[int, Sampled] = {}
        if few:
            indices = list(few)
            sampled = self._from_lists(
                last[indices], [rows[at] for at in indices], list(few.values()), [keys[at] for at in indices]
            )
            results |= zip(indices, sampled)
        if rest:
            others = [rows[at] for at in rest]
            logits = self.logits(last[rest] if few else last, others)
            theirs = {index: mine[at] for index, at in enumerate(rest) if at in mine}
            results |= zip(rest, self._from_logits(logits, others, theirs, [keys[at] for at in rest]))
        return [results[index] for index in range(len(rows))]

    def _from_lists(
        self, last: Tensor, rows: Sequence[Row], lists: Sequence[npt.NDArray[np.int64]], keys: Sequence[int]
    ) -> list[Sampled]:
        """Sample from only the logits of `lists`; rows with the same list share a product."""
        healthy = finite(last).tolist()
        together: dict[int, list[int]] = {}
        for index, ids in enumerate(lists):
            together.setdefault(id(ids), []).append(index)
        values: dict[int, Tensor] = {}
        for indices in together.values():
            ids = lists[indices[0]]
            if len(ids) < 2:  # no choice
                logits = last.new_zeros((len(indices), len(ids)), dtype=torch.float32)
            else:
                logits = self.head.logits_of(last[indices], torch.tensor(ids, device=last.device))
            values |= zip(indices, logits)
        known = [
            values[index] if well else values[index].new_zeros(len(lists[index]))
            for index, well in enumerate(healthy)
        ]
        tokens = self.sampler.sample_listed(known, lists, rows, keys)
        return [
            NOT_FINITE if not well else token if isinstance(token, str) else Sample(token)
            for token, well in zip(tokens, healthy)
        ]

    def _from_logits(
        self,
        logits_of_rows: Logits,
        rows: Sequence[Row],
        masks: Mapping[int, TokenMask],
        keys: Sequence[int],
        then: Then | None = None,
    ) -> list[Sampled]:
        if (results := self.sampler.at_once(logits_of_rows, rows, masks, keys, then)) is not None:
            return results
        # A row that is not finite is drawn from zeros and reported as an error, so that it does not affect
        # the others.
        logits = logits_of_rows.logits
        sound = finite(logits)
        healthy = sound.tolist()
        if not all(healthy):
            logits = logits.masked_fill(~sound[:, None], 0.0)
        tokens = self.sampler.sample(logits, rows, masks, keys)
        errors = [
            NOT_FINITE if not well else token if isinstance(token, str) else None
            for token, well in zip(tokens, healthy)
        ]
        ids = [token if isinstance(token, int) else 0 for token in tokens]
        if not any(row.logprob or row.top_logprobs or row.token_ids for row in rows):
            return [error or Sample(token) for token, error in zip(ids, errors)]
        chosen = torch.tensor(ids, dtype=torch.int64, device=logits.device)
        scaled_logits = logits_of_rows.scaled
        total = scaled_logits.logsumexp(-1) if logits_of_rows.total is None else logits_of_rows.total
        logprobs = (scaled_logits.gather(1, chosen[:, None]).squeeze(1) - total).tolist()
        tops = top_of(scaled_logits, total, [row.top_logprobs for row in rows])
        known = ids_of(scaled_logits, total, [row.token_ids for row in rows])
        return [
            error or Sample(token, logprob if row.logprob else None, top, by_id)
            for row, token, logprob, top, by_id, error in zip(rows, ids, logprobs, tops, known, errors)
        ]

    def _key(self, row: Row) -> int:
        if row.sampling.greedy:
            return 0
        seed = row.sampling.seed
        if seed is None:
            seed = self._seeds.get(row.seq)
            if seed is None:
                seed = self._seeds[row.seq] = self._random.getrandbits(63)
        return key_of(seed, row.step)


FEW = 4
"""Up to 1/FEW of the vocabulary, logits are computed for single ids: gathering has its cost."""


def few_logits(
    rows: Sequence[Row], masks: Mapping[int, TokenMask], vocab_size: int
) -> dict[int, npt.NDArray[np.int64]]:
    """The rows that need only the logits of some ids, and these ids. Empty if these are so many that one
    product with the whole matrix costs no more."""
    few: dict[int, npt.NDArray[np.int64]] = {}
    different: dict[int, int] = {}
    for index, mask in masks.items():
        row = rows[index]
        if (
            mask.allowed is None
            or row.logprob
            or row.top_logprobs
            or row.token_ids
            or row.sampling.custom_logit_processor is not None
        ):
            continue
        ids = np.asarray(mask.allowed, dtype=np.int64)
        few[index] = ids if not len(ids) or ids[-1] < vocab_size else ids[ids < vocab_size]
        different[id(mask.allowed)] = len(ids)
    return few if sum(different.values()) * FEW <= vocab_size else {}


def with_draft_rows(rows: Sequence[Row]) -> list[Row]:
    """The expanded rows: `rows`, followed by a row for each draft, which samples after it as if it were
    right."""
    expanded = list(rows)
    for row in rows:
        first = len(row.tokens) - row.drafts
        for count in range(1, row.drafts + 1):
            output = [*row.output, *row.tokens[first : first + count]]
            expanded.append(replace(row, step=row.step + count, output=output))
    return expanded


def masks_with_drafts(
    rows: Sequence[Row], masks: Mapping[int, TokenMask]
) -> tuple[dict[int, TokenMask], set[int]]:
    """`masks`, by row, as masks of the expanded rows, and the expanded rows that must not be sampled: those
    after a draft without a mask, if their row has one. Without one they are unconstrained."""
    expanded, closed, at = dict(masks), set[int](), len(rows)
    for index, row in enumerate(rows):
        if index in masks:
            behind = masks[index].behind[: row.drafts]
            expanded |= {at + turn: mask for turn, mask in enumerate(behind)}
            closed.update(range(at + len(behind), at + row.drafts))
        at += row.drafts
    return expanded, closed


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


def sampler_on(device: torch.device) -> Sampler:
    if not compiled(device):
        return Sampler()
    from runtime.engine.sampling.fused import FusedSampler  # needs Triton, which not every torch has

    return FusedSampler()
