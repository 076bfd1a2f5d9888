"""Rows of which the logits of some ids are enough: those whose masks list them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from runtime.plan import Row, TokenMask

FEW = 4
"""Logits of less than 1/FEW of the vocabulary are computed apart: gathering has its price."""


def few_logits(
    rows: Sequence[Row], masks: Mapping[int, TokenMask], vocab_size: int
) -> dict[int, npt.NDArray[np.int64]]:
    """Rows that need the logits of some ids only, and these ids. None where together they are so many that
    one product with the whole matrix costs no more."""
    few: dict[int, npt.NDArray[np.int64]] = {}
    different: dict[int, int] = {}
    for place, mask in masks.items():
        row = rows[place]
        if (
            mask.allowed is None
            or row.logprob
            or row.top_logprobs
            or row.token_ids
            or row.sampling.custom_logit_processor is not None
        ):
            continue
        ids = np.asarray(mask.allowed, dtype=np.int64)
        few[place] = ids if not len(ids) or ids[-1] < vocab_size else ids[ids < vocab_size]
        different[id(mask.allowed)] = len(ids)
    return few if sum(different.values()) * FEW <= vocab_size else {}
