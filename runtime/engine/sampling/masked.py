"""Packed token masks: the logits they forbid, and the rows for which a few logits suffice. Knows no
grammar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from runtime.plan import Row, TokenMask

_EIGHT = (np.arange(256)[:, None] >> np.arange(8) & 1).astype(np.uint8).view(np.uint64).reshape(256)
"""The bits of each byte value, one per byte, the lowest first."""


class Forbidden:
    """Unpacks masks of one width at a time. On a GPU the packed bits are transferred and unpacked there."""

    def __init__(self) -> None:
        self._bits = np.empty((0, 0), dtype=np.uint32)
        self._bytes = np.empty((0, 0), dtype=np.uint64)

    def fill(self, masks: Sequence[npt.NDArray[np.uint32]], vocab: int, device: torch.device) -> Tensor:
        """Packed little-endian words of each row -> bool [rows, vocab] on `device`, True if the bit is 0; ids
        beyond a row's words are forbidden too. On the CPU the result is valid until the next call."""
        rows, words = len(masks), -(-vocab // 32)
        if self._bits.shape[0] < rows or self._bits.shape[1] != words:
            self._bits = np.empty((rows, words), dtype=np.uint32)
            self._bytes = np.empty((rows, words * 4), dtype=np.uint64)
        bits = self._bits[:rows]
        for row, mask in zip(bits, masks, strict=True):
            count = min(len(mask), words)
            np.invert(mask[:count], out=row[:count])
            row[count:] = 0xFFFFFFFF
        if device.type == "cpu":
            spread = self._bytes[:rows]
            np.take(_EIGHT, bits.view(np.uint8), out=spread, mode="clip")
            return torch.from_numpy(spread.view(np.bool_)[:, :vocab])
        packed = torch.from_numpy(bits.view(np.int32)).to(device)
        shifts = torch.arange(32, dtype=torch.int32, device=device)
        return ((packed[:, :, None] >> shifts) & 1).bool().view(rows, -1)[:, :vocab]


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
