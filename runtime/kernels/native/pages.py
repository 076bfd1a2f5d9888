"""Memory in huge pages, for matrices that every step reads from end to end: processors fetch ahead within a
page only, and look fewer pages up. Linux gives such pages to whoever asks (transparent_hugepage=madvise)."""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Sequence

import torch
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
