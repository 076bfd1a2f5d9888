"""A KV pool of tensors as bytes for KV transfers (runtime.disagg.transfer.memory)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from runtime.attention.pool import KVPool
from runtime.disagg.transfer.memory import (
    ArrayMemory,
    KVLayout,
    KVMapping,
    KVMemory,
    Order,
    check_size,
    check_slots,
    size_of,
)
from runtime.plan import Run


def pool_memory(
    pool: KVPool, file: int | None = None, *, first: int = 0, total_heads: int | None = None
) -> KVMemory:
    """file: the file of the pool (KVShape.file). first, total_heads: the pool's first head and the number of
    heads in the model; default: it has all of them."""
    kv = pool.kv
    layout = KVLayout(
        layers=pool.layers,
        total_heads=total_heads or pool.kv_heads,
        head_bytes=pool.head_dim * kv.dtype.itemsize,
        dtype=str(kv.dtype).removeprefix("torch."),
        first=first,
        heads=pool.kv_heads,
        # The order with longer pieces: in a pool of whole tokens a slot is one piece.
        order="token" if kv.stride(0) >= kv.stride(1) else "head",
    )
    octets = kv.view(torch.uint8)
    if kv.device.type != "cpu":
        return TensorMemory(octets, layout)
    mapping = None
    if file is not None:
        slot, layer, head, _ = octets.stride()
        mapping = KVMapping(layout, pool.slots, (slot, layer, head), octets.untyped_storage().nbytes())
    return ArrayMemory(octets.numpy(), layout, file, mapping)


class TensorMemory(KVMemory):
    """KVMemory over bytes [slots, layers, 2 * heads, head_bytes] on a device. Copies run on their own stream
    and are complete when the call returns."""

    def __init__(self, octets: Tensor, layout: KVLayout) -> None:
        self.slots, self.layout = octets.shape[0], layout
        self.file, self.mapping = None, None
        self._device = octets.device
        # [slots, layers, 2, heads, width]
        self._view = octets.unflatten(2, (2, layout.heads))

    def read(self, runs: Sequence[Run], heads: range, order: Order) -> memoryview:
        parts = self._parts(runs, heads)
        size = size_of(self.layout, runs, heads)
        piece = torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        with torch.inference_mode(), self._aside():
            tokens = torch.cat(parts)
            lying = tokens if order == "token" else tokens.permute(1, 2, 3, 0, 4)
            piece.copy_(lying.reshape(-1))
        return piece.numpy().data

    def write(self, runs: Sequence[Run], heads: range, order: Order, data: memoryview) -> None:
        parts = self._parts(runs, heads)
        check_size(self.layout, runs, heads, data)
        piece = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        with torch.inference_mode(), self._aside():
            there = piece.to(self._device)
            layout, count = self.layout, len(heads)
            if order == "token":
                tokens = there.view(-1, layout.layers, 2, count, layout.head_bytes)
            else:
                tokens = there.view(layout.layers, 2, count, -1, layout.head_bytes).permute(3, 0, 1, 2, 4)
            for part, numbers in zip(parts, tokens.split([len(part) for part in parts])):
                part.copy_(numbers)

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """A stream beside the model's passes."""
        if self._device.type != "cuda":
            yield
            return
        stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()

    def _parts(self, runs: Sequence[Run], heads: range) -> list[Tensor]:
        check_slots(self.layout, self.slots, runs, heads)
        first = heads.start - self.layout.first
        selected = self._view[:, :, :, first : first + len(heads)]
        return [selected[run.start : run.start + run.length] for run in runs]
