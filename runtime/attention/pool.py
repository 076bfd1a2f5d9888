"""KVPool: keys and values of all layers, one slot per token. Each attention implementation creates its own,
in the layout that it reads best. Knows slots; not who owns them."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from runtime.attention.float8 import TYPES, rounded
from runtime.attention.layout import join
from runtime.kernels.table import kernel
from runtime.plan import Run


class KVShape(NamedTuple):
    """The shape of the KV of one token, and where it is stored. file: an open file whose memory holds the
    pool, so that other processes can map it; on the CPU only."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    file: int | None = None

    def zeros(self, *size: int) -> Tensor:
        """Memory for a pool. It is zeroed because pages are sent whole, including unwritten slots."""
        if self.file is None or self.device.type != "cpu":
            return torch.zeros(size, dtype=self.dtype, device=self.device)
        length = self.dtype.itemsize
        for number in size:
            length *= number
        os.ftruncate(self.file, length)
        return torch.frombuffer(mmap.mmap(self.file, length), dtype=self.dtype).view(size)


class KVPool:
    """kv: a view [slots, layers, 2 * kv_heads, head_dim] of the pool, key heads before value heads, whatever
    its layout in memory. Code that copies or transfers whole tokens uses it. Slots that were never written
    hold garbage."""

    def __init__(self, kv: Tensor) -> None:
        self.kv = kv
        self.slots, self.layers, heads, self.head_dim = kv.shape
        self.kv_heads, self.device = heads // 2, kv.device

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Move the tokens in slots `sources` to slots `targets`; int32, on the device, each slot at most
        once."""
        octets = self.kv.view(torch.uint8) if self.kv.dtype in TYPES else self.kv
        octets.index_copy_(0, targets.long(), octets.index_select(0, sources))

    def index_of(self, runs: Iterable[Run]) -> slice | Tensor:
        """The index of the tokens of `runs`: a slice if they are consecutive, else their slots [tokens]
        int64."""
        joined = join(runs)
        if len(joined) == 1:
            return slice(joined[0].start, joined[0].start + joined[0].length)
        return slots_of(joined, self.device)


class HeadMajorPool(KVPool):
    """data: [layers, 2 * kv_heads, slots, head_dim]. In a run of slots the tokens of a head are contiguous:
    views for products on the CPU."""

    def __init__(self, shape: KVShape, slots: int) -> None:
        self.data = shape.zeros(shape.layers, 2 * shape.kv_heads, slots, shape.head_dim)
        super().__init__(self.data.permute(2, 0, 1, 3))

    def write(self, layer: int, index: slice | Tensor, kv: Tensor) -> None:
        """Write kv [tokens, 2 * kv_heads, head_dim] to the slots of `index`, which index_of() returned."""
        new, data = rounded(kv, self.kv.dtype).transpose(0, 1), self.data[layer]
        if isinstance(index, slice):
            data[:, index].copy_(new)
        elif data.dtype in TYPES:  # torch has no index_copy_ for these
            data.view(torch.uint8).index_copy_(1, index, new.view(torch.uint8))
        else:
            data.index_copy_(1, index, new)


class LayerMajorPool(KVPool):
    """data: [layers, slots, 2 * kv_heads, head_dim]. The numbers of a token in one layer are contiguous, and
    neighbouring slots adjacent: for kernels that read one layer through a table of slots."""

    def __init__(self, shape: KVShape, slots: int) -> None:
        self.data = shape.zeros(shape.layers, slots, 2 * shape.kv_heads, shape.head_dim)
        super().__init__(self.data.transpose(0, 1))

    def move(self, sources: Tensor, targets: Tensor) -> None:
        if (moved := kernel("move_kv", self.device)) is None:
            super().move(sources, targets)
        else:
            moved(self.data.view(torch.uint8) if self.data.dtype in TYPES else self.data, sources, targets)


class PageMajorPool(KVPool):
    """`kv` is stored as it is: a run of slots, and so a page of any size, is one piece with all its layers.
    For transfers, and for kernels that read a layer's pages through a page table: kv[:, layer]."""

    def __init__(self, shape: KVShape, slots: int) -> None:
        super().__init__(shape.zeros(slots, shape.layers, 2 * shape.kv_heads, shape.head_dim))


def slots_of(runs: Sequence[Run], device: torch.device) -> Tensor:
    """The slots of `runs`, in order: [tokens] int64."""
    starts = torch.tensor([run.start for run in runs], dtype=torch.int64)
    lengths = torch.tensor([run.length for run in runs], dtype=torch.int64)
    # Slot of token t in run r = start[r] + t - (tokens before r).
    offsets = starts - (lengths.cumsum(0) - lengths)
    slots = torch.repeat_interleave(offsets, lengths).add_(torch.arange(int(lengths.sum())))
    return slots.to(device)
