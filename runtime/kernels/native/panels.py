"""Matrices in panels, as panels.h describes them, in huge pages of memory.

Every step reads these matrices from end to end: processors prefetch within a page only, and look fewer
pages up. Linux gives huge pages to programs that ask (transparent_hugepage=madvise)."""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

HUGE = 2 << 20  # bytes, on x86-64 and most others
_CAN_ASK = sys.platform == "linux" and hasattr(mmap, "MADV_HUGEPAGE")


def empty(size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor on the CPU with any numbers in it. What lies behind its last whole huge page takes small ones,
    so that no more memory is used than it has numbers."""
    length = math.prod(size) * dtype.itemsize
    if not _CAN_ASK or length < HUGE:
        return torch.empty(size, dtype=dtype)
    try:
        room = mmap.mmap(-1, length + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = -torch.frombuffer(room, dtype=torch.uint8, count=1).data_ptr() % HUGE
        room.madvise(mmap.MADV_HUGEPAGE, start, length // HUGE * HUGE)
    except OSError:  # there is no room, or the kernel has no such pages
        return torch.empty(size, dtype=dtype)
    return torch.frombuffer(room, dtype=dtype, count=math.prod(size), offset=start).view(tuple(size))


PANEL = 32  # outputs of a panel, as in the source


def to_panels(weight: Tensor) -> Tensor:
    """[outputs, inputs] -> in float32 [panels, inputs, 32]; in bfloat16 [panels, inputs, 16, 2]; of integers
    of 8 bits, the inputs of an even number, [panels, inputs / 2, 32, 2]."""
    outputs, inputs = weight.shape
    if missing := -outputs % PANEL:
        weight = F.pad(weight, (0, 0, 0, missing))
    if weight.dtype == torch.int8:
        parts = weight.view(-1, PANEL, inputs // 2, 2).permute(0, 2, 1, 3)
    elif weight.dtype == torch.bfloat16:
        parts = weight.view(-1, 2, PANEL // 2, inputs).permute(0, 3, 2, 1)
    else:
        parts = weight.view(-1, PANEL, inputs).permute(0, 2, 1)
    return empty(parts.shape, parts.dtype).copy_(parts)


def from_panels(panels: Tensor, outputs: Tensor) -> Tensor:
    """Rows `outputs` (int64) of the matrix [len(outputs), inputs]."""
    panel, place = outputs // PANEL, outputs % PANEL
    if panels.dtype == torch.int8:
        return panels[panel, :, place].flatten(1)
    if panels.dtype == torch.bfloat16:
        return panels[panel, :, place % (PANEL // 2), place // (PANEL // 2)]
    return panels[panel, :, place]
