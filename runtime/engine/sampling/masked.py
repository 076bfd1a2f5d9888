"""Packed token masks: which logits they forbid, and the rows of which a few logits are enough. Knows no
grammar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from runtime.plan import Row, TokenMask

_EIGHT = (np.arange(256)[:, None] >> np.arange(8) & 1).astype(np.uint8).view(np.uint64).reshape(256)
"""The bits of each byte, one to a byte, the lowest first."""


class Forbidden:
    """Masks of one width at a time. On a GPU the packed bits travel, and are taken apart there."""

    def __init__(self) -> None:
        self._bits = np.empty((0, 0), dtype=np.uint32)
        self._bytes = np.empty((0, 0), dtype=np.uint64)

    def fill(self, masks: Sequence[npt.NDArray[np.uint32]], vocab: int, device: torch.device) -> Tensor:
        """Packed little-endian words of each row -> bool [rows, vocab] on `device`, True where the bit is 0;
        ids beyond a row's words are forbidden too. On the CPU good until the next call."""
        rows, words = len(masks), -(-vocab // 32)
        if self._bits.shape[0] < rows or self._bits.shape[1] != words:
            self._bits = np.empty((rows, words), dtype=np.uint32)
            self._bytes = np.empty((rows, words * 4), dtype=np.uint64)
        bits = self._bits[:rows]
        for row, mask in zip(bits, masks, strict=True):
            given = min(len(mask), words)
            np.invert(mask[:given], out=row[:given])
            row[given:] = 0xFFFFFFFF
        if device.type == "cpu":
            spread = self._bytes[:rows]
            np.take(_EIGHT, bits.view(np.uint8), out=spread, mode="clip")
            return torch.from_numpy(spread.view(np.bool_)[:, :vocab])
        packed = torch.from_numpy(bits.view(np.int32)).to(device)
        shifts = torch.arange(32, dtype=torch.int32, device=device)
        return ((packed[:, :, None] >> shifts) & 1).bool().view(rows, -1)[:, :vocab]


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
