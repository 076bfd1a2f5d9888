"""Forbidden: packed token masks -> which logits to forbid. Its buffers are kept from step to step; it knows
no rows and no grammar."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

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
