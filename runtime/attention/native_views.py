"""NativeViews: attention on CPUs by a kernel in C, with one call per layer. The pool and the sharing among
rows are as in TorchViews; the kernel computes all pieces in one call, and keeps scores in registers and
the L1 cache."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from ctypes import c_void_p
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from runtime.attention.base import PLAIN, AttentionStep, Scoring
from runtime.attention.layout import Span, split
from runtime.attention.pool import KVShape
from runtime.attention.torch_views import TorchViews
from runtime.kernels.native.library import DIM_STEP, ROWS, TYPES, Library, Pass, library
from runtime.plan import Run, StepPlan

WORTH = 256
"""Shared runs are a separate piece if that saves at least this many key reads: its results must be merged."""


class Prepared(NamedTuple):
    """The struct, and the memory that it points to."""

    native_pass: Pass
    numbers: array[int]
    memory: list[Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class NativeStep:
    """The AttentionStep of a pass. of_windows: the structs. windows, pools, sinks: per layer. shape: of the
    result."""

    native: Library
    of_windows: Mapping[int | None, Prepared]
    windows: Sequence[int | None]
    pools: ctypes.Array[c_void_p]
    sinks: ctypes.Array[c_void_p]
    shape: tuple[int, int]

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        inputs = qkv.contiguous() if qkv.dtype in TYPES else qkv.float().contiguous()
        out = inputs.new_empty(self.shape)
        mine = self.of_windows[self.windows[layer]].native_pass
        mine.short_queries = inputs.dtype == torch.bfloat16
        address = ctypes.byref(mine)
        self.native.attend(address, inputs.data_ptr(), self.pools[layer], out.data_ptr(), self.sinks[layer])
        return out.to(qkv.dtype)

    def passes(self, dtype: torch.dtype) -> ctypes.Array[c_void_p]:
        """The struct's address for each layer, for queries of `dtype` (one of the kernel's). This object owns
        the structs."""
        addresses = {}
        for window, prepared in self.of_windows.items():
            prepared.native_pass.short_queries = dtype == torch.bfloat16
            addresses[window] = ctypes.addressof(prepared.native_pass)
        return (c_void_p * len(self.windows))(*[addresses[window] for window in self.windows])


class NativeViews(TorchViews):
    """Falls back to TorchViews if the kernel cannot be used: no compiler, another pool dtype, a head_dim that
    is not a multiple of 16, or several threads that it cannot start."""

    def __init__(
        self, shape: KVShape, slots: int, heads: int, windows: Sequence[int | None], scoring: Scoring = PLAIN
    ) -> None:
        super().__init__(shape, slots, heads, windows, scoring)
        fits = shape.device.type == "cpu" and shape.dtype in TYPES and shape.head_dim % DIM_STEP == 0
        self._library = library() if fits else None
        self._work_size = 0 if self._library is None else self._library.work_size(shape.head_dim)
        self._memory, self._sizes = [torch.empty(0)] * 3, (0, 0)
        addresses = c_void_p * shape.layers
        self._pools = addresses(*(self.pool.data[layer].data_ptr() for layer in range(shape.layers)))
        self._float_sinks = [sink.float().contiguous() for sink in self.sinks]
        self._sinks = addresses(*(sink.data_ptr() for sink in self._float_sinks))

    def begin(self, plan: StepPlan) -> AttentionStep:
        native, threads = self._library, torch.get_num_threads()
        if native is None or (threads > 1 and native.parallel is None):
            return super().begin(plan)
        tables = {
            window: _Tables(plan, window, self.group, self.pool.kv_heads)
            for window in dict.fromkeys(self.windows)
        }
        memory = self._memory_for(max(one.part_tokens for one in tables.values()), threads)
        passes = {window: self._pass(one, native, threads, memory) for window, one in tables.items()}
        shape = (plan.token_count, self.heads * self.pool.head_dim)
        return NativeStep(native, passes, self.windows, self._pools, self._sinks, shape)

    def _memory_for(self, part_tokens: int, threads: int) -> list[Tensor]:
        """Buffers for partial results, their sums and the threads' working memory. They grow with the largest
        pass."""
        if part_tokens > self._sizes[0] or threads > self._sizes[1]:
            part_tokens, threads = self._sizes = (
                max(part_tokens, self._sizes[0]),
                max(threads, self._sizes[1]),
            )
            rows = part_tokens * self.heads
            sizes = (rows * self.pool.head_dim, 2 * rows, threads * self._work_size)
            self._memory = [torch.empty(size, dtype=torch.float32) for size in sizes]
        return self._memory

    def _pass(self, tables: _Tables, native: Library, threads: int, memory: list[Tensor]) -> Prepared:
        pool = self.pool
        numbers = array("q")
        starts = []
        for mine in tables.lists:
            starts.append(8 * len(numbers))
            numbers.fromlist(mine)
        address, _ = numbers.buffer_info()
        piece, span, run, new_run, merge, first_part, part = [address + start for start in starts]
        parts, sums, work = (one.data_ptr() for one in memory)
        native_pass = Pass(
            tokens=tables.tokens, kv_heads=pool.kv_heads, group=self.group, dim=pool.head_dim,
            slots=pool.slots, short_pool=pool.kv.dtype == torch.bfloat16, pieces=tables.pieces,
            tasks=tables.tasks, places=len(tables.new_runs) // 2, merged=len(tables.merges) // 2,
            part_tokens=tables.part_tokens, threads=threads, work_size=self._work_size,
            piece=piece, span=span, run=run, place=new_run, merge=merge, first_part=first_part, part=part,
            parts=parts, sums=sums, work=work, parallel=native.parallel, scale=self.scale,
            softcap=self.softcap or 0.0,
        )  # fmt: skip
        return Prepared(native_pass, numbers, memory)


class _Tables:
    """The kernel's inputs for one pass under one window, as flat lists of numbers."""

    def __init__(self, plan: StepPlan, window: int | None, group: int, kv_heads: int) -> None:
        self._group, self._kv_heads = group, kv_heads
        self.tokens, self.tasks, self.part_tokens, self.pieces = plan.token_count, 0, 0, 0
        self._pieces: list[int] = []
        self._spans: list[int] = []
        self._runs: list[int] = []
        self.new_runs = list(chain.from_iterable(run for row in plan.rows for run in row.slots))
        bands, members, shared = split(plan, window, WORTH)
        parts: dict[Span, list[int]] = {span: [] for full in shared for span in full.spans}
        for full in shared:
            base = self._add(full.spans, full.runs, None, 0, merged=True)
            for span in full.spans:
                parts[span].append(base)
                base += span.size
        for member in members:
            base = self._add((member.span,), member.runs, member.past, 0, merged=member.span in parts)
            if base >= 0:
                parts[member.span].append(base)
        for band in bands:
            self._add((band.span,), band.runs, band.lead, band.window, merged=False)
        self.merges = list(chain.from_iterable(parts))
        firsts = [0]
        for mine in parts.values():
            firsts.append(firsts[-1] + len(mine))
        every = list(chain.from_iterable(parts.values()))
        self.lists = (self._pieces, self._spans, self._runs, self.new_runs, self.merges, firsts, every)

    def _add(
        self, spans: Sequence[Span], runs: Sequence[Run], lead: int | None, window: int, *, merged: bool
    ) -> int:
        """Add a piece; lead None: all its tokens see all its keys. Returns the index of its partial results;
        -1: it writes directly to the output."""
        keys = sum(run.length for run in runs)
        tokens = sum(span.size for span in spans)
        base = self.part_tokens if merged else -1
        self._pieces += (
            len(self._spans) // 2, len(spans), len(self._runs) // 2, len(runs), keys,
            keys if lead is None else lead, window, base, tokens, self.tasks,
        )  # fmt: skip
        self._spans += chain.from_iterable(spans)
        self._runs += chain.from_iterable(runs)
        self.pieces += 1
        self.tasks += -(-tokens * self._group // ROWS) * self._kv_heads
        if merged:
            self.part_tokens += tokens
        return base
