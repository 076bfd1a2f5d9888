"""RowSampler: of the hidden states that a pass leaves for sampling, what each row gives. Knows plans, and of
the model its head; not batches, nor how hidden states come about."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from runtime.engine.drafts import closed, masks_of_asked, taken
from runtime.engine.sampling.logprobs import NOT_FINITE, Logits, finite, ids_of, temperatures_of, top_of
from runtime.engine.sampling.masked import few_logits
from runtime.engine.sampling.sampler import Sampler, Then, key_of
from runtime.plan import Row, Sample, TokenMask

LOGITS_AT_ONCE = 1 << 26
"""Elements: more are computed in parts."""
Sampled: TypeAlias = Sample | str
"""What came of a sampled position, or what went wrong."""


class Head(Protocol):
    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocab] float32."""
        ...

    def logits_of(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """[rows, hidden], ids [n] int64 -> [rows, n] float32."""
        ...


class RowSampler:
    """head: may be replaced between passes. most: rows whose logits are computed at once."""

    def __init__(
        self, head: Head, sampler: Sampler, vocab_size: int, seed: int | None, *, scaled: bool, lists: bool
    ) -> None:
        """seed: keys the draws of sequences that gave none. scaled: log-probabilities are at the temperature
        of their row. lists: of rows whose masks list few ids, compute these ids' logits alone: not on a GPU,
        where a kernel would be compiled for each length. The same for all ranks of a group."""
        self.head, self.sampler = head, sampler
        self.most = max(64, LOGITS_AT_ONCE // vocab_size)
        self._vocab_size, self._scaled, self._lists = vocab_size, scaled, lists
        self._random = random.Random(seed)
        self._seeds: dict[int, int] = {}  # of live sequences that gave none

    def release(self, handles: Iterable[int]) -> None:
        """Forget sequences that will not come again."""
        handles = tuple(handles)
        for handle in handles:
            self._seeds.pop(handle, None)
        self.sampler.release(handles)

    def logits(self, last: Tensor, rows: Sequence[Row]) -> Logits:
        """last [rows, hidden]."""
        logits = self.head.logits(last)
        wanted = any(row.logprob or row.top_logprobs or row.token_ids for row in rows)
        scaled = self._scaled and wanted
        scaled_logits = logits / temperatures_of(rows, logits.device) if scaled else logits
        summed = wanted and not self.sampler.own_logsumexp
        return Logits(logits, scaled_logits, scaled_logits.logsumexp(-1) if summed else None)

    def sampled(
        self,
        last: Tensor,
        drafts: Tensor,
        asked: list[Row],
        known: Logits | None,
        mine: Mapping[int, TokenMask],
        then: Then | None,
    ) -> list[tuple[Sample, ...] | str]:
        """What each sampled row gives, or what went wrong with it: a sample, and after each draft that it
        equals another, as far as its masks go. All ranks compute the same, whatever rank 0 draws.

        last [rows, hidden], drafts [drafts, hidden]: of the rows and behind their drafts; asked: of both, see
        asked_of(). known: their logits, if they were computed already. mine: masks by row. then: what is to
        be queued behind the draws."""
        rows = asked[: len(last)]
        if len(asked) == len(rows):
            found = self._sample_rows(last, rows, mine, known, then)
            return [one if isinstance(one, str) else (one,) for one in found]
        hidden = torch.cat((last, drafts))
        theirs, places = masks_of_asked(rows, mine), list(range(len(asked)))
        out = closed(rows, mine)
        if out and known is None:
            places = [place for place in places if place not in out]
            hidden, asked = hidden[places], [asked[place] for place in places]
            theirs = {at: theirs[place] for at, place in enumerate(places) if place in theirs}
        found = self._sample_rows(hidden, asked, theirs, known)
        return taken(rows, {place: one for place, one in zip(places, found) if place not in out})

    def _sample_rows(
        self,
        last: Tensor,
        rows: Sequence[Row],
        mine: Mapping[int, TokenMask],
        known: Logits | None,
        then: Then | None = None,
    ) -> list[Sampled]:
        """last [rows, hidden]. mine: masks by row. known: the logits, if they were computed already. then:
        what is to be queued behind the draws; all rows are drawn together then, whatever masks leave."""
        most = self.most
        if known is None and len(rows) > most:
            parts = [range(first, min(first + most, len(rows))) for first in range(0, len(rows), most)]
            return [
                one
                for part in parts
                for one in self._sample_rows(
                    last[part.start : part.stop],
                    rows[part.start : part.stop],
                    {place - part.start: mask for place, mask in mine.items() if place in part},
                    None,
                )
            ]
        keys = [self._key(row) for row in rows]
        if known is not None or then is not None or not self._lists:
            return self._from_logits(known or self.logits(last, rows), rows, mine, keys, then)
        few = few_logits(rows, mine, self._vocab_size)
        rest = [place for place in range(len(rows)) if place not in few]
        found: dict[int, Sampled] = {}
        if few:
            places = list(few)
            sampled = self._from_lists(
                last[places], [rows[at] for at in places], list(few.values()), [keys[at] for at in places]
            )
            found |= zip(places, sampled)
        if rest:
            others = [rows[at] for at in rest]
            logits = self.logits(last[rest] if few else last, others)
            theirs = {place: mine[at] for place, at in enumerate(rest) if at in mine}
            found |= zip(rest, self._from_logits(logits, others, theirs, [keys[at] for at in rest]))
        return [found[place] for place in range(len(rows))]

    def _from_lists(
        self,
        last: Tensor,
        rows: Sequence[Row],
        lists: Sequence[npt.NDArray[np.int64]],
        keys: Sequence[int],
    ) -> list[Sampled]:
        """Of the logits of `lists` alone; rows with the same list share a product."""
        healthy = finite(last).tolist()
        together: dict[int, list[int]] = {}
        for place, ids in enumerate(lists):
            together.setdefault(id(ids), []).append(place)
        values: dict[int, Tensor] = {}
        for places in together.values():
            ids = lists[places[0]]
            if len(ids) < 2:  # no choice
                made = last.new_zeros((len(places), len(ids)), dtype=torch.float32)
            else:
                made = self.head.logits_of(last[places], torch.tensor(ids, device=last.device))
            values |= zip(places, made)
        known = [
            values[place] if well else values[place].new_zeros(len(lists[place]))
            for place, well in enumerate(healthy)
        ]
        tokens = self.sampler.sample_listed(known, lists, rows, keys)
        return [
            NOT_FINITE if not well else token if isinstance(token, str) else Sample(token)
            for token, well in zip(tokens, healthy)
        ]

    def _from_logits(
        self,
        given: Logits,
        rows: Sequence[Row],
        masks: Mapping[int, TokenMask],
        keys: Sequence[int],
        then: Then | None = None,
    ) -> list[Sampled]:
        if (found := self.sampler.at_once(given, rows, masks, keys, then)) is not None:
            return found
        # A row that is not finite is drawn from zeros and reported as an error: it must not disturb the
        # others.
        logits = given.logits
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
        scaled_logits = given.scaled
        total = scaled_logits.logsumexp(-1) if given.total is None else given.total
        logprobs = (scaled_logits.gather(1, chosen[:, None]).squeeze(1) - total).tolist()
        tops = top_of(scaled_logits, total, [row.top_logprobs for row in rows])
        known = ids_of(scaled_logits, total, [row.token_ids for row in rows])
        return [
            error or Sample(token, logprob if row.logprob else None, top, own)
            for row, token, logprob, top, own, error in zip(rows, ids, logprobs, tops, known, errors)
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
