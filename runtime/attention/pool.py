"""KVPool: keys and values of all layers, one slot per token. Knows slots; not who owns them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from runtime.attention.runs import join
from runtime.plan import Run


class KVPool:
    """data: [layers, 2 * kv_heads, slots, head_dim], key heads before value heads; `keys` and `values` are
    views [layers, kv_heads, slots, head_dim]. In a run of slots each head's tokens lie one behind the other.
    Slots that were never written hold garbage."""

    def __init__(
        self, layers: int, kv_heads: int, slots: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.kv_heads = kv_heads
        self.data = torch.empty((layers, 2 * kv_heads, slots, head_dim), dtype=dtype, device=device)
        self.keys, self.values = self.data[:, :kv_heads], self.data[:, kv_heads:]

    @property
    def layers(self) -> int:
        return self.data.shape[0]

    @property
    def slots(self) -> int:
        return self.data.shape[2]

    @property
    def head_dim(self) -> int:
        return self.data.shape[3]

    @property
    def device(self) -> torch.device:
        return self.data.device

    def place(self, runs: Iterable[Run]) -> slice | Tensor:
        """Where the tokens of `runs` go: a slice where they are consecutive, else their slots [tokens]
        int64."""
        joined = join(runs)
        if len(joined) == 1:
            return slice(joined[0].start, joined[0].start + joined[0].length)
        return slots_of(joined, self.device)

    def write(self, layer: int, place: slice | Tensor, kv: Tensor) -> None:
        """kv [tokens, 2 * kv_heads, head_dim] into the slots that `place` gave."""
        if isinstance(place, slice):
            self.data[layer, :, place].copy_(kv.transpose(0, 1))
        else:
            self.data[layer].index_copy_(1, place, kv.transpose(0, 1))

    def copy(self, pairs: Sequence[tuple[Run, Run]]) -> None:
        """Copy between equally long runs (source, target), one pair after the other; a pair may overlap."""
        for source, target in pairs:
            if source.length != target.length:
                raise ValueError(f"cannot copy {source} to {target}: their lengths differ")
            moved = self.data[:, :, source.start : source.start + source.length]
            if abs(source.start - target.start) < source.length:
                moved = moved.clone()
            self.data[:, :, target.start : target.start + target.length].copy_(moved)


def slots_of(runs: Sequence[Run], device: torch.device) -> Tensor:
    """The slots of `runs`, in order: [tokens] int64."""
    starts = torch.tensor([run.start for run in runs], dtype=torch.int64)
    lengths = torch.tensor([run.length for run in runs], dtype=torch.int64)
    # Slot of token t in run r = start[r] + t - (tokens before r).
    offsets = starts - (lengths.cumsum(0) - lengths)
    slots = torch.repeat_interleave(offsets, lengths).add_(torch.arange(int(lengths.sum())))
    return slots.to(device)
