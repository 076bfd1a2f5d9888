"""NativeViews: TorchViews, with the attention of single queries computed in C.

A row's own keys, and those that it shares with few others, are read where they lie, run by run, in one pass:
no gather into a padded buffer, no call per run, no merging. What many rows share, and the prompts of rows
with many new tokens, stay products of matrices, which do more with what is read; the two are merged by
log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from runtime.attention.base import PLAIN, AttentionStep, Scoring
from runtime.attention.layout import Bundle, Full, Piece, Span, layout
from runtime.attention.native.library import DIM_STEP, MOST_DIM, Library, library
from runtime.attention.pool import KVShape
from runtime.attention.runs import cut_runs
from runtime.attention.torch_views import Level, TorchViews
from runtime.plan import Run, StepPlan

SHARED_AT_MOST = 1 << 20
"""Numbers of queries times keys up to which a shared piece is read by each row alone."""
ALONE = 1 << 20
"""Numbers read up to which one thread computes them: to hand them over has its price."""


@dataclass(slots=True)
class Jobs:
    """Tokens whose own runs are read in C. tokens: the spans' first ones. slices: jobs, as [token, first run,
    runs], of which each can be computed by another thread; runs [runs, 2]: start and length. Both int32."""

    of: dict[int, list[Run]] = field(default_factory=dict)
    spans: set[int] = field(default_factory=set)
    slices: list[Tensor] = field(default_factory=list)
    runs: Tensor = field(default_factory=lambda: torch.empty(0, 2, dtype=torch.int32))

    def pack(self, threads: int, width: int) -> None:
        """Once all are known. width: numbers read per key."""
        flat: list[Run] = []
        jobs, keys = [], []
        for token, runs in self.of.items():
            jobs.append((token, len(flat), len(runs)))
            flat += runs
            keys.append(sum(run.length for run in runs))
        self.runs = torch.tensor(flat, dtype=torch.int32)
        packed = torch.tensor(jobs, dtype=torch.int32)
        if threads > 1 and sum(keys) * width > ALONE:
            ends, total, done = [0], sum(keys), 0
            for number, count in enumerate(keys, 1):
                done += count
                if done * threads >= len(ends) * total:
                    ends.append(number)
            self.slices = [packed[first:last] for first, last in pairwise(ends)]
        else:
            self.slices = [packed]


class NativeViews(TorchViews):
    """Where the source cannot be used (no compiler, numbers of another type, capped scores, a head size that
    is no multiple of 16) it is TorchViews."""

    def __init__(
        self,
        shape: KVShape,
        slots: int,
        heads: int,
        windows: Sequence[int | None],
        scoring: Scoring = PLAIN,
    ) -> None:
        super().__init__(shape, slots, heads, windows, scoring)
        fits = (
            shape.device.type == "cpu"
            and shape.dtype in (torch.float32, torch.bfloat16)
            and shape.head_dim % DIM_STEP == 0
            and shape.head_dim <= MOST_DIM
            and self.softcap is None
        )
        self._library = library() if fits else None
        self._threads: ThreadPoolExecutor | None = None

    def begin(self, plan: StepPlan) -> AttentionStep:
        if self._library is None:
            return super().begin(plan)
        return self._step(plan, self._library)

    def _step(self, plan: StepPlan, made: Library) -> AttentionStep:
        split = {window: self._split(layout(plan, window)) for window in dict.fromkeys(self.windows)}
        pool, heads, tokens = self.pool, self.heads, plan.token_count
        kv_heads, dim, group, slots = pool.kv_heads, pool.head_dim, self.group, pool.slots
        runs = [run for row in plan.rows for run in row.slots]
        places = torch.tensor([slot for start, length in runs for slot in range(start, start + length)])
        half, width = int(pool.kv.dtype == torch.bfloat16), pool.kv.dtype.itemsize
        first, each = pool.data.data_ptr(), pool.data.stride(0) * width  # of a layer
        # Used by one layer after the other: each result is read before the next one is made.
        out = torch.empty(tokens, heads, dim)
        lse = torch.empty(tokens, heads)
        out_at, lse_at, places_at = out.data_ptr(), lse.data_ptr(), places.data_ptr()

        def attend(layer: int, qkv: Tensor) -> Tensor:
            jobs, levels = split[self.windows[layer]]
            qkv, data = qkv.contiguous(), first + layer * each
            stride = qkv.stride(0)
            if qkv.dtype == pool.data.dtype:
                kv = qkv.data_ptr() + heads * dim * width
                made.put(data, slots, 2 * kv_heads, dim, width, kv, stride, places_at, tokens)
            else:
                pool.write(layer, places, qkv[:, heads:])
            queries = qkv
            if qkv.dtype != torch.float32:
                queries, stride = qkv[:, :heads].float().contiguous(), heads * dim
            given, seen = queries.data_ptr(), jobs.runs.data_ptr()

            def compute(some: Tensor) -> None:
                count = some.shape[0]
                made.attend(
                    *(data, slots, kv_heads, dim, half, group, given, stride, some.data_ptr(), count),
                    *(seen, self.scale, out_at, lse_at),
                )

            self._each(compute, jobs.slices)
            if not levels and not self.sinks:
                return out.view(tokens, -1).to(qkv.dtype)
            base = out.view(tokens, kv_heads, group, dim).transpose(0, 1)
            sums = lse.view(tokens, kv_heads, group).transpose(0, 1)
            mine = queries[:, :heads].reshape(tokens, kv_heads, group, dim).transpose(0, 1)
            own = qkv[:, heads:].to(pool.kv.dtype).float()
            merged = self._merged(layer, mine.contiguous(), own, levels, (base, sums))
            return merged.to(qkv.dtype)

        return attend

    def _each(self, compute: Callable[[Tensor], None], slices: Sequence[Tensor]) -> None:
        """The last slice by this thread, the others beside it: the interpreter is let go of meanwhile."""
        if not slices:
            return
        *others, last = slices
        if others and self._threads is None:
            self._threads = ThreadPoolExecutor(max_workers=len(others), thread_name_prefix="attention")
        beside = [self._threads.submit(compute, some) for some in others if self._threads is not None]
        compute(last)
        for future in beside:
            future.result()

    def _split(self, pieces: Iterable[Piece]) -> tuple[Jobs, list[Level]]:
        """What is computed in C, and what is left."""
        jobs = Jobs()
        rest = [piece for piece in pieces if not self._taken(piece, jobs)]
        if jobs.of:
            jobs.pack(torch.get_num_threads(), 2 * self.pool.kv_heads * self.pool.head_dim)
        return jobs, self._levels(rest, dict.fromkeys(jobs.spans, 1))

    def _taken(self, piece: Piece, jobs: Jobs) -> bool:
        """Own pieces come first: what is shared only goes to tokens that are there already."""
        match piece:
            case Bundle(members):
                for member in members:
                    jobs.spans.add(member.span.first)
                    for place in range(member.span.size):
                        seen = cut_runs(member.runs, 0, member.past + place + 1)
                        jobs.of[member.span.first + place] = list(seen)
            case Full((Span(first, 1),), runs) if first not in jobs.of:
                jobs.spans.add(first)
                jobs.of[first] = list(runs)
            case Full(spans, runs) if all(span.first in jobs.spans for span in spans):
                tokens = sum(span.size for span in spans)
                numbers = tokens * self.heads * self.pool.head_dim * sum(run.length for run in runs)
                if numbers > SHARED_AT_MOST:
                    return False
                for span in spans:
                    for token in range(span.first, span.first + span.size):
                        jobs.of[token] += runs
            case _:
                return False
        return True
