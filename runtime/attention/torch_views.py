"""TorchViews: attention in plain torch, on views of the pool. The reference for GPU kernels, and the fallback
on CPUs.

A run of slots shared by many rows is read once, by one product for all of them (cascade attention), and is
never copied: on CPUs a gather costs three to twelve times the product. Only the short contexts of rows that
decode are copied, padded, and computed together. Parts are merged by log-sum-exp.

On CPUs everything is computed in float32, whatever the pool's dtype. torch's product rounds its weights to
the dtype of its inputs, relative to their part; so a token's result would depend on how its context is
divided into parts, and thus on the batch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from runtime.attention.base import PLAIN, Attention, AttentionStep, Scoring
from runtime.attention.float8 import TYPES, rounded, widened
from runtime.attention.layout import Band, Member, Span, cut_runs, split
from runtime.attention.pool import HeadMajorPool, KVShape, slots_of
from runtime.plan import Run, StepPlan

BUNDLE_KEYS = 128  # decoding rows with at most this many keys of their own are computed together
SHORT_RUN = 64  # adjacent runs shorter than this are gathered into one part
GATHER_AT_MOST = 4096  # tokens of one gathered part
SCORES_AT_MOST = 1 << 25  # elements of the score matrix of one product

Index: TypeAlias = slice | Tensor  # of tokens, or of slots
Product: TypeAlias = Callable[[Tensor, Tensor, Tensor, bool, Tensor | None], tuple[Tensor, Tensor]]


class Part(NamedTuple):
    """One product: `queries` (indices of new tokens) against `keys` (slots of the pool; None: causally
    against the same tokens' own keys). `batch` rows of equal shape are concatenated in both. `mask` [batch or
    1, 1, queries, keys] is added to the scores."""

    queries: Index
    keys: Index | None = None
    batch: int = 1
    mask: Tensor | None = None


class TorchViews(Attention[HeadMajorPool]):
    def __init__(
        self, shape: KVShape, slots: int, heads: int, windows: Sequence[int | None], scoring: Scoring = PLAIN
    ) -> None:
        super().__init__(shape, slots, heads, windows, scoring)
        self._product = self._choose_product()
        self._exact = _computed_in(shape)

    def make_pool(self, shape: KVShape, slots: int) -> HeadMajorPool:
        return HeadMajorPool(shape, slots)

    def _choose_product(self) -> Product:
        if self.softcap is None and self.pool.device.type == "cpu" and _fused_works():
            return functools.partial(_fused, self.scale)
        return self._plain_product()

    def _plain_product(self) -> Product:
        return functools.partial(_plain, self.scale, self.softcap)

    def begin(self, plan: StepPlan) -> AttentionStep:
        parts = {window: self._parts(plan, window) for window in dict.fromkeys(self.windows)}
        new_index = self.pool.index_of(run for row in plan.rows for run in row.slots)
        pool, heads, exact = self.pool, self.heads, self._exact
        shape = (plan.token_count, pool.kv_heads, self.group, pool.head_dim)

        def attend(layer: int, qkv: Tensor) -> Tensor:
            qkv = qkv.contiguous()
            pool.write(layer, new_index, qkv[:, heads:])
            q = qkv[:, :heads].reshape(shape).transpose(0, 1).to(exact).contiguous()
            # Rounded to the pool's dtype, so that results do not depend on which keys are new in this pass.
            new = widened(rounded(qkv[:, heads:], pool.kv.dtype), exact)
            mine = parts[self.windows[layer]]
            if len(mine) == 1:  # it has all tokens
                out, lse = self._attend(layer, q, new, mine[0])
            else:
                out, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], -math.inf, dtype=torch.float32)
                for part in mine:
                    _merge(out, lse, part.queries, *self._attend(layer, q, new, part))
            if self.sinks:  # the sink's weight is missing from the sum; its value is zero
                sink = self.sinks[layer].view(pool.kv_heads, 1, self.group)
                out = out * torch.sigmoid(lse - sink).unsqueeze(-1).to(out.dtype)
            return out.transpose(0, 1).reshape(len(qkv), -1).to(qkv.dtype)

        return attend

    # -- once per pass ---------------------------------------------------------------------------------------

    def _parts(self, plan: StepPlan, window: int | None) -> list[Part]:
        bands, members, shared = split(plan, window)
        parts = [self._band(band) for band in bands]
        short = []
        for member in members:
            if member.span.size == 1 and member.past < BUNDLE_KEYS:
                short.append(member)
            elif member.span.size == 1:
                parts += self._full((member.span,), member.runs)
            else:
                parts += self._full((member.span,), cut_runs(member.runs, 0, member.past))
                parts.append(Part(self._tokens((member.span,))))
        if len(short) == 1:
            parts += self._full((short[0].span,), short[0].runs)
        elif short:
            parts.append(self._bundle(short))
        for full in shared:
            parts += self._full(full.spans, full.runs)
        return parts

    def _tokens(self, spans: Iterable[Span]) -> Index:
        return self.pool.index_of(Run(*span) for span in spans)

    def _full(self, spans: Sequence[Span], runs: Sequence[Run]) -> list[Part]:
        """Views of long runs; adjacent short runs are gathered."""
        queries = self._tokens(spans)
        parts: list[Part] = []
        short: list[Run] = []
        gathered = 0
        for run in (*runs, None):
            if short and (run is None or run.length >= SHORT_RUN or gathered + run.length > GATHER_AT_MOST):
                parts.append(Part(queries, self.pool.index_of(short)))
                short, gathered = [], 0
            if run is not None and run.length >= SHORT_RUN:
                parts.append(Part(queries, slice(run.start, run.start + run.length)))
            elif run is not None:
                short.append(run)
                gathered += run.length
        return parts

    def _band(self, band: Band) -> Part:
        of = torch.arange(sum(run.length for run in band.runs), device=self.pool.device)
        at = torch.arange(band.span.size, device=self.pool.device)[:, None] + band.lead
        mask = self._mask((of <= at) & (of > at - band.window))[None]
        return Part(self._tokens((band.span,)), self.pool.index_of(band.runs), mask=mask)

    def _bundle(self, members: Sequence[Member]) -> Part:
        """Rows of one token. Keys of shorter rows are padded with their last one, which the mask hides."""
        device = self.pool.device
        lengths = torch.tensor([member.past + 1 for member in members], device=device)
        flat = slots_of([run for member in members for run in member.runs], device)
        column = torch.arange(int(lengths.max()), device=device)
        index = column.minimum(lengths[:, None] - 1) + (lengths.cumsum(0) - lengths)[:, None]
        mask = self._mask((column < lengths[:, None])[:, None])
        queries = self._tokens(member.span for member in members)
        return Part(queries, flat[index.flatten()], len(members), mask)

    def _mask(self, seen: Tensor) -> Tensor:
        """seen [(batch,) queries, keys] -> [(batch,) 1, queries * group, keys], 0 where seen, else -inf."""
        mask = torch.zeros(seen.shape, dtype=self._exact, device=seen.device).masked_fill_(~seen, -math.inf)
        return mask.repeat_interleave(self.group, -2).unsqueeze(-3)

    # -- once per layer --------------------------------------------------------------------------------------

    def _attend(self, layer: int, q: Tensor, new: Tensor, part: Part) -> tuple[Tensor, Tensor]:
        """q [kv_heads, tokens, group, head_dim], new [tokens, 2 * kv_heads, head_dim] -> results [kv_heads,
        queries, group, head_dim] and their log-sum-exp [kv_heads, queries, group]."""
        kv_heads, _, group, dim = q.shape
        picked = q[:, part.queries] if isinstance(part.queries, slice) else q.index_select(1, part.queries)
        if part.keys is None:
            pair = new[part.queries].transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)
            out, lse = self._product(picked.transpose(1, 2), pair[:kv_heads], pair[kv_heads:], True, None)
            return out.transpose(1, 2), lse.transpose(1, 2)
        k, v = self._read(layer, part.keys, part.batch)
        rows = picked.shape[1] // part.batch
        side_by_side = picked.reshape(kv_heads, part.batch, rows * group, dim).transpose(0, 1)
        out, lse = self._product(side_by_side, k, v, False, part.mask)  # [batch, kv_heads, rows * group, ...]
        shape = (kv_heads, part.batch * rows, group)
        return out.transpose(0, 1).reshape(*shape, dim), lse.transpose(0, 1).reshape(shape)

    def _read(self, layer: int, keys: Index, batch: int) -> tuple[Tensor, Tensor]:
        """Keys and values in these slots: [batch, kv_heads, keys, head_dim]; views if they are one run."""
        data, kv_heads = self.pool.data[layer], self.pool.kv_heads
        kept = data[:, keys] if isinstance(keys, slice) else data.index_select(1, keys)
        rows = widened(kept.unflatten(1, (batch, -1)).transpose(0, 1), self._exact)
        return rows[:, :kv_heads], rows[:, kv_heads:]


def _merge(out: Tensor, lse: Tensor, queries: Index, result: Tensor, result_lse: Tensor) -> None:
    """Add results of some queries to out [kv_heads, tokens, group, head_dim] and lse, their log-sum-exp."""
    before = lse[:, queries]
    both = torch.logaddexp(before, result_lse)
    weight = (result_lse - both).exp_().unsqueeze(-1).to(out.dtype)
    out[:, queries] = out[:, queries].lerp(result, weight)
    lse[:, queries] = both


class TorchPlain(TorchViews):
    """TorchViews with torch's public operations only."""

    def _choose_product(self) -> Product:
        return self._plain_product()


def _computed_in(shape: KVShape) -> torch.dtype:
    if shape.device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if shape.dtype in TYPES else shape.dtype


def _fused(
    scale: float, q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """torch's fused CPU attention: q, k, v [batch, heads, tokens, dim] -> (out, log-sum-exp). The last
    dimension must be contiguous: the operation ignores its stride."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask, scale=scale
    )


def _plain(
    scale: float, softcap: float | None, q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The same with public operations, on any device, and with softcap. Blocks of queries limit the score
    matrix."""
    queries, keys = q.shape[2], k.shape[2]
    block = max(1, SCORES_AT_MOST // max(1, q.shape[0] * q.shape[1] * keys))
    outs, sums = [], []
    for first in range(0, queries, block):
        last = min(first + block, queries)
        seen = last if causal else keys
        scores = (q[:, :, first:last] @ k[:, :, :seen].transpose(2, 3)).float() * scale
        if softcap is not None:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        if causal:
            later = torch.ones(last - first, seen, dtype=torch.bool, device=q.device).triu_(first + 1)
            scores.masked_fill_(later, -math.inf)
        if mask is not None:
            scores += mask[:, :, first:last]
        total = scores.logsumexp(-1, keepdim=True)
        outs.append((scores - total).exp_().to(v.dtype) @ v[:, :, :seen])
        sums.append(total.squeeze(-1))
    return (outs[0], sums[0]) if len(outs) == 1 else (torch.cat(outs, 2), torch.cat(sums, 2))


def _fused_works() -> bool:
    """Whether this torch has the (private) fused operation, and its results are right."""
    q, k, v = torch.randn(2, 3, 4, 8), torch.randn(2, 1, 5, 8).expand(-1, 3, -1, -1), torch.randn(2, 3, 5, 8)
    mask = torch.zeros(2, 1, 4, 5).masked_fill_(torch.arange(5) > 3, -math.inf)
    try:
        pairs = zip(_fused(0.3, q, k, v, False, mask), _plain(0.3, None, q, k, v, False, mask))
        return all(torch.allclose(mine, right, atol=1e-5) for mine, right in pairs)
    except (RuntimeError, AttributeError, TypeError):
        return False
