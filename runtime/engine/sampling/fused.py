"""Sampling on GPUs: all rows of a step in a few kernels, with one copy to the device and one back.

The same tokens as with Sampler, except for rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from runtime.engine.sampling.logprobs import NOT_FINITE, Logits
from runtime.engine.sampling.penalties import changes_of, every
from runtime.engine.sampling.sampler import NOTHING_ALLOWED, Sampler, Then
from runtime.kernels.device import copied, to_host
from runtime.kernels.gumbel import halves
from runtime.kernels.logprobs import gather_logprobs
from runtime.kernels.sampling import Changes, Draws, change, sample
from runtime.plan import Row, Sample, TokenMask

_WRONG = {-1: NOTHING_ALLOWED, -2: NOT_FINITE}
_NO_BITS = np.zeros((1, 1), dtype=np.int32)


class FusedSampler(Sampler):
    computes_logsumexp = True

    def sample(
        self, logits: Tensor, rows: Sequence[Row], masks: Mapping[int, TokenMask], keys: Sequence[int]
    ) -> list[int | str]:
        faults: dict[int, str] = {}
        if any(row.sampling.custom_logit_processor is not None for row in rows):
            logits = logits.clone()
            faults = self._change(logits, rows, [masks.get(index) for index in range(len(rows))])
            tokens = self._drawn(logits, rows, keys, {}, changed=True)
        else:
            tokens = self._drawn(logits, rows, keys, masks)
        return [
            self._answer(row, None if token < 0 else token, faults.get(index))
            for index, (row, token) in enumerate(zip(rows, tokens.tolist()))
        ]

    def at_once(
        self,
        logits: Logits,
        rows: Sequence[Row],
        masks: Mapping[int, TokenMask],
        keys: Sequence[int],
        then: Then | None = None,
    ) -> list[Sample | str] | None:
        if any(
            row.sampling.custom_logit_processor is not None or row.top_logprobs or row.token_ids
            for row in rows
        ):
            return None
        tokens = self._drawn(logits.logits, rows, keys, masks)
        facts = [tokens.double()]
        if any(row.logprob for row in rows):
            logprobs, _ = gather_logprobs(logits.scaled, tokens.clamp(min=0).long()[:, None])
            facts.append(logprobs.squeeze(1).double())
        fetched = to_host(torch.stack(facts))
        if then is not None:
            then(tokens)
        token_ids, *known = fetched().tolist()
        return [
            _WRONG[int(token)] if token < 0 else Sample(int(token), logprob if row.logprob else None)
            for row, token, logprob in zip(rows, token_ids, known[0] if known else token_ids)
        ]

    def _drawn(
        self,
        scores: Tensor,
        rows: Sequence[Row],
        keys: Sequence[int],
        masks: Mapping[int, TokenMask],
        *,
        changed: bool = False,
    ) -> Tensor:
        """[rows] int32: columns of the scores, -1 if none is allowed, -2 if some are not finite. changed: by
        penalties, processors and masks already, so that some are -inf."""
        params = [row.sampling for row in rows]
        mask_of = np.full(len(rows), -1, dtype=np.int32)
        bits = _NO_BITS
        if masks:
            bits = np.zeros((len(masks), -(-scores.shape[1] // 32)), dtype=np.int32)
            for number, (index, mask) in enumerate(masks.items()):
                packed = mask.bits[: bits.shape[1]]
                bits[number, : len(packed)] = packed.view(np.int32)
                mask_of[index] = number
        changes = [] if changed else changes_of(rows, self._histograms, every(scores.shape[1]))
        arrays = [
            halves(keys).ravel(),
            np.array([0.0 if one.greedy else one.temperature for one in params], dtype=np.float32),
            np.array([one.top_k for one in params], dtype=np.int32),
            np.array([one.top_p for one in params], dtype=np.float32),
            np.array([one.min_p for one in params], dtype=np.float32),
            mask_of,
            bits.ravel(),
            *(array for one in changes for array in one),
        ]
        there = copied(arrays, scores.device)
        key_halves, temperatures, top_k, top_p, min_p, of, packed, *rest = there
        if changes:
            scores = scores.clone()
            for first in range(0, len(rest), 4):
                change(scores, Changes(*rest[first : first + 4]))
        draws = Draws(temperatures, top_k, top_p, min_p, key_halves.view(-1, 2), of, packed.view(bits.shape))
        return sample(scores if scores.stride(1) == 1 else scores.contiguous(), draws, check=not changed)
