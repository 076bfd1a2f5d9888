"""Matrices in panels, as panels.h describes them, in huge pages of memory: each step reads them from end
to end, and processors prefetch only within a page. Linux gives huge pages to programs that ask."""

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
    """An uninitialised tensor on the CPU. The part behind the last whole huge page uses small pages, so that
    no memory is wasted."""
    length = math.prod(size) * dtype.itemsize
    if not _CAN_ASK or length < HUGE:
        return torch.empty(size, dtype=dtype)
    try:
        buffer = mmap.mmap(-1, length + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = -torch.frombuffer(buffer, dtype=torch.uint8, count=1).data_ptr() % HUGE
        buffer.madvise(mmap.MADV_HUGEPAGE, start, length // HUGE * HUGE)
    except OSError:  # not enough memory, or the kernel has no such pages
        return torch.empty(size, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype, count=math.prod(size), offset=start).view(tuple(size))


PANEL = 32  # outputs per panel, as in the source


def to_panels(weight: Tensor) -> Tensor:
    """[outputs, inputs] -> float32 [panels, inputs, 32], bfloat16 [panels, inputs, 16, 2], or int8 [panels,
    inputs / 2, 32, 2] (the number of inputs must be even)."""
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
    """Rows `outputs` (int64) of the matrix, [len(outputs), inputs]."""
    panel, column = outputs // PANEL, outputs % PANEL
    if panels.dtype == torch.int8:
        return panels[panel, :, column].flatten(1)
    if panels.dtype == torch.bfloat16:
        return panels[panel, :, column % (PANEL // 2), column // (PANEL // 2)]
    return panels[panel, :, column]
