"""Reference: slow and simple. One row at a time: gather everything, one softmax, in float32.

The contract suite compares the other implementations with it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from runtime.attention.base import Attention, AttentionStep
from runtime.attention.float8 import rounded
from runtime.attention.pool import KVShape, PageMajorPool, slots_of
from runtime.plan import Run, StepPlan


class Reference(Attention[PageMajorPool]):
    def make_pool(self, shape: KVShape, slots: int) -> PageMajorPool:
        return PageMajorPool(shape, slots)

    def begin(self, plan: StepPlan) -> AttentionStep:
        pool = self.pool
        slots = []
        for index, row in enumerate(plan.rows):
            mine = sorted((s for s in plan.segments if index in s.rows), key=lambda segment: segment.position)
            runs: list[Run] = [run for segment in mine for run in segment.runs]
            slots.append(slots_of([*runs, *row.slots], pool.device))

        def attend(layer: int, qkv: Tensor) -> Tensor:
            q, new = qkv.split((self.heads, 2 * pool.kv_heads), 1)
            kv = pool.kv[:, layer]
            outs, first = [], 0
            for row, row_slots in zip(plan.rows, slots):
                count = len(row.tokens)
                tokens = slice(first, first + count)
                first += count
                kv[row_slots[row.position :]] = rounded(new[tokens], kv.dtype)
                seen_kv = kv[row_slots].float().transpose(0, 1)
                keys, values = (part.repeat_interleave(self.group, 0) for part in seen_kv.chunk(2))
                queries = q[tokens].transpose(0, 1).float()
                scores = queries @ keys.transpose(1, 2) * self.scale
                if self.softcap is not None:
                    scores = (scores / self.softcap).tanh() * self.softcap
                at = torch.arange(row.position, row.position + count, device=pool.device)[:, None]
                of = torch.arange(row.position + count, device=pool.device)[None]
                seen = of <= at
                window = self.windows[layer]
                if window is not None:
                    seen &= of > at - window
                scores = scores.masked_fill(~seen, -math.inf)
                if self.sinks:
                    sink = self.sinks[layer].to(pool.device).view(-1, 1, 1).expand(-1, count, -1)
                    weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
                else:
                    weights = scores.softmax(-1)
                outs.append((weights @ values).transpose(0, 1).reshape(count, -1).to(q.dtype))
            return torch.cat(outs)

        return attend
