"""TritonTiles: attention in a few kernels for any plan; for CUDA GPUs, and in Triton's interpreter for tests.

Keys that many rows share are read once, long contexts are split among programs. All tables are computed on
the host from the plan and copied at once; `fixed` has tables of fixed size and address, for a CUDA graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from runtime.attention.base import PLAIN, Attention, AttentionStep, FixedStep, Scoring
from runtime.attention.float8 import TYPES, rounded
from runtime.attention.pool import KVShape, LayerMajorPool
from runtime.attention.tiles import Cut, Ints, Tables, cut, tables_of
from runtime.kernels.device import compiled, copied
from runtime.kernels.kv_store import store_kv
from runtime.kernels.merge_states import merge_states
from runtime.kernels.paged_attention import FIELDS, Form, Shape, States, Tiles, attend_tiles
from runtime.plan import StepPlan

ALIGN = 4
"""Tables begin at multiples of this: Triton compiles another kernel for pointers not aligned to 16 bytes."""
PROGRAMS_PER_UNIT = 4  # per multiprocessor of the GPU: the target when keys are split
Windows: TypeAlias = dict[int | None, Cut]


class _Window(NamedTuple):
    """The tables of one window, on the device; int32."""

    narrow: Tensor
    wide: Tensor
    of: Tensor
    ends: Tensor

    @classmethod
    def of_parts(cls, parts: Iterator[Tensor]) -> _Window:
        return cls(next(parts).view(-1, FIELDS), next(parts).view(-1, FIELDS), next(parts), next(parts))


class _Prepared(NamedTuple):
    """The tables of a pass, on the device; int32. states: a buffer for the partial results of any window."""

    slot_indices: Tensor
    positions: Tensor
    queries: Tensor
    slots: Tensor
    windows: dict[int | None, _Window]
    states: States


class Capacity(NamedTuple):
    """The sizes of fixed tables: rows, queries, tiles of each kind, partial results."""

    rows: int
    queries: int
    narrow: int
    wide: int
    partials: int


class TritonTiles(Attention[LayerMajorPool]):
    def __init__(
        self, shape: KVShape, slots: int, heads: int, windows: Sequence[int | None], scoring: Scoring = PLAIN
    ) -> None:
        super().__init__(shape, slots, heads, windows, scoring)
        device = shape.device
        units = torch.cuda.get_device_properties(device).multi_processor_count if compiled(device) else 4
        self.splits = max(2, PROGRAMS_PER_UNIT * units // shape.kv_heads)
        self._shape = Shape.of(self.group, shape.head_dim)
        self._numbers = torch.arange(slots, dtype=torch.int32, device=device)
        self._states: States | None = None  # of fixed steps, which run one at a time
        self._forms = [
            Form(
                self.scale,
                self.softcap,
                window,
                self.sinks[layer].to(device, torch.float32) if self.sinks else None,
            )
            for layer, window in enumerate(self.windows)
        ]

    def make_pool(self, shape: KVShape, slots: int) -> LayerMajorPool:
        return LayerMajorPool(shape, slots)

    def begin(self, plan: StepPlan) -> AttentionStep:
        tables, windows = self._tables(plan)
        arrays = [tables.slot_indices, tables.positions, tables.queries, *_ends(tables)]
        for one in windows.values():
            arrays += [one.narrow.ravel(), one.wide.ravel(), one.of, one.ends]
        parts = iter(self._copied(arrays))
        slot_indices, positions, queries, shift, ends = (next(parts) for _ in range(5))
        slots = self._slots(shift, ends, tables.keys)
        device_windows = {window: _Window.of_parts(parts) for window in windows}
        partials = max(len(one.of) for one in windows.values())
        states = States.empty(partials, self.heads, self.pool.head_dim, self.pool.device)
        return self._step(_Prepared(slot_indices, positions, queries, slots, device_windows, states))

    def fixed(self, rows: int) -> FixedStep:
        # Each row has keys of its own; there are also splits, and shared prefixes some levels deep.
        partials = 8 * rows + self.splits * (self._shape.wide // self._shape.heads)
        tiles = 2 * rows + self.splits
        shared = rows > self._shape.narrow // self._shape.heads  # a prefix of fewer rows needs no wide tile
        capacity = Capacity(rows, 8 * rows, tiles, tiles if shared else 0, partials)
        if self._states is None or len(self._states.values) < capacity.partials:
            self._states = States.empty(capacity.partials, self.heads, self.pool.head_dim, self.pool.device)
        return _Fixed(self, capacity, self._states)

    def _tables(self, plan: StepPlan) -> tuple[Tables, Windows]:
        shape = self._shape
        tables = tables_of(plan, shape.narrow // shape.heads, shape.wide // shape.heads)
        windows = {window: cut(tables, window, self.splits) for window in dict.fromkeys(self.windows)}
        return tables, windows

    def _copied(self, arrays: Sequence[Ints]) -> list[Tensor]:
        return copied([array.astype(np.int32) for array in arrays], self.pool.device)

    def _slots(self, shift: Tensor, ends: Tensor, keys: int) -> Tensor:
        """The slots of `keys` tokens: run r ends before token ends[r], and its token t is in slot shift[r] +
        t."""
        number = self._numbers[:keys] if keys <= len(self._numbers) else _numbers(keys, self.pool.device)
        run = torch.searchsorted(ends, number, right=True, out_int32=True)
        return shift.index_select(0, run).add_(number)

    def _step(self, prepared: _Prepared) -> AttentionStep:
        pool, heads, forms = self.pool, self.heads, self._forms
        slot_indices, positions, queries, slots, windows, states = prepared

        def attend(layer: int, qkv: Tensor) -> Tensor:
            if qkv.stride(2) != 1 or qkv.stride(1) != qkv.shape[2]:
                qkv = qkv.contiguous()
            kept, form = pool.data[layer], forms[layer]
            new, target = qkv[:, heads:], kept
            if kept.dtype != new.dtype:  # rounded as every implementation does
                new = rounded(new, kept.dtype).contiguous()
            if kept.dtype in TYPES:  # copied as bytes: not every GPU converts float8
                new, target = new.view(torch.uint8), kept.view(torch.uint8)
            store_kv(new, target, slots, slot_indices)
            out = torch.empty(len(qkv), heads, pool.head_dim, dtype=qkv.dtype, device=qkv.device)
            window = windows[form.window]
            for fields, rows in ((window.narrow, self._shape.narrow), (window.wide, self._shape.wide)):
                if len(fields):
                    tiles = Tiles(fields, queries, positions, slots)
                    attend_tiles(qkv, kept, tiles, form, out, states, rows)
            if len(window.of):
                merge_states(states, window.of, window.ends, out, form.sinks)
            return out.view(len(qkv), heads * pool.head_dim)

        return attend


class _Fixed(FixedStep):
    """The tables of a pass overwrite those of the pass before."""

    def __init__(self, attention: TritonTiles, capacity: Capacity, states: States) -> None:
        self._attention, self._capacity = attention, capacity
        rows, queries, narrow, wide, partials = capacity
        windows = list(dict.fromkeys(attention.windows))
        sizes = [rows, rows, queries]
        for _ in windows:
            sizes += [FIELDS * narrow, FIELDS * wide, partials, rows + 1]
        device = attention.pool.device
        self._sizes = sizes
        self._starts, self._whole = _starts(sizes)
        self._tables = torch.zeros(self._whole, dtype=torch.int32, device=device)
        self._slots = torch.zeros(attention.pool.slots, dtype=torch.int32, device=device)
        parts = iter(_parts(self._tables, self._starts, sizes))
        slot_indices, positions, queries_ = (next(parts) for _ in range(3))
        slot_indices.fill_(-1)
        device_windows = {window: _Window.of_parts(parts) for window in windows}
        self.step: AttentionStep = attention._step(
            _Prepared(slot_indices, positions, queries_, self._slots, device_windows, states)
        )

    def load(self, plan: StepPlan) -> bool:
        attention, capacity = self._attention, self._capacity
        tables, windows = attention._tables(plan)
        fits = (
            len(tables.slot_indices) <= capacity.rows
            and len(tables.queries) <= capacity.queries
            and tables.keys <= len(self._slots)
            and all(
                len(one.narrow) <= capacity.narrow
                and len(one.wide) <= capacity.wide
                and len(one.of) <= capacity.partials
                for one in windows.values()
            )
        )
        if not fits:
            return False
        flat = np.zeros(self._whole, dtype=np.int64)
        flat[: capacity.rows] = -1  # rows without a token write nothing
        arrays = [tables.slot_indices, tables.positions, tables.queries]
        for one in windows.values():
            arrays += [one.narrow.ravel(), one.wide.ravel(), one.of]
            # Rows without a token have no parts.
            arrays.append(np.append(one.ends, np.full(capacity.rows + 1 - len(one.ends), one.ends[-1])))
        for first, array in zip(self._starts, arrays, strict=True):
            flat[first : first + len(array)] = array
        shift, ends = _ends(tables)
        fixed, shifts, limits = attention._copied([flat, shift, ends])
        self._tables.copy_(fixed)
        self._slots[: tables.keys] = attention._slots(shifts, limits, tables.keys)
        return True


def _starts(sizes: Sequence[int]) -> tuple[list[int], int]:
    """The offsets of tables of these sizes, and their total size."""
    padded = [-(-size // ALIGN) * ALIGN for size in sizes]
    return list(itertools.accumulate(padded[:-1], initial=0)), sum(padded)


def _parts(flat: Tensor, starts: Sequence[int], sizes: Sequence[int]) -> list[Tensor]:
    return [flat[start : start + size] for start, size in zip(starts, sizes)]


def _ends(tables: Tables) -> tuple[Ints, Ints]:
    """Per run: the shift from a token's index in the table of slots to its slot, and the run's end in the
    table."""
    ends: Ints = tables.lengths.cumsum()
    shift: Ints = tables.starts - (ends - tables.lengths)
    return shift, ends


def _numbers(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, dtype=torch.int32, device=device)
