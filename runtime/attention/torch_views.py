"""TorchViews: attention in plain torch, on views of the pool. The reference for GPU kernels, and the fallback
on CPUs.

A run of slots shared by many rows is read once, by one product for all of them (cascade attention), and is
never copied: on CPUs a gather costs three to twelve times the product. The short own parts of rows are copied
into a padded buffer and computed together. Parts are merged by log-sum-exp.

On CPUs everything is computed in float32, whatever the pool's dtype. torch's product rounds its weights to
the dtype of its inputs, relative to their part; so a token's result would depend on how its context is
divided into parts, and thus on the batch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from runtime.attention.base import PLAIN, Attention, AttentionStep, Scoring
from runtime.attention.float8 import TYPES, rounded, widened
from runtime.attention.layout import Band, Bundle, Causal, Full, Piece, Span, join, layout
from runtime.attention.pool import HeadMajorPool, KVShape, slots_of
from runtime.plan import Run, StepPlan

SHORT_RUN = 64  # adjacent runs shorter than this are gathered into one part
GATHER_AT_MOST = 4096  # tokens of one gathered part: limits the scratch buffer
SCORES_AT_MOST = 1 << 25  # elements of the score matrix of one product

Index: TypeAlias = slice | Tensor  # of tokens, or of slots
Product: TypeAlias = Callable[[Tensor, Tensor, Tensor, bool, Tensor | None], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One product: `queries` (indices of new tokens) against `keys` (slots of the pool; None = the new
    tokens' own, from qkv). `batch` rows of equal shape are concatenated in both. `mask` [batch or 1, 1,
    queries, keys] is added to the scores. `kept`: the results that count (None = all); `into`: where they are
    written."""

    queries: Index
    keys: Index | None
    batch: int = 1
    causal: bool = False
    mask: Tensor | None = None
    kept: Tensor | None = None
    into: Index | None = None


@dataclass(frozen=True, slots=True)
class Level:
    """Parts that share no new token. `first`, `last`: the range of tokens that contains them; `whole`:
    whether they cover it."""

    parts: tuple[Part, ...]
    first: int
    last: int
    whole: bool


class TorchViews(Attention[HeadMajorPool]):
    def __init__(
        self, shape: KVShape, slots: int, heads: int, windows: Sequence[int | None], scoring: Scoring = PLAIN
    ) -> None:
        super().__init__(shape, slots, heads, windows, scoring)
        self._product = self._choose_product()
        self._scratch = self.pool.data.new_empty(0)
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
        levels = {window: self._levels(layout(plan, window)) for window in dict.fromkeys(self.windows)}
        new_index = self.pool.index_of(run for row in plan.rows for run in row.slots)
        pool, heads, exact = self.pool, self.heads, self._exact
        shape = (plan.token_count, pool.kv_heads, self.group, pool.head_dim)

        def attend(layer: int, qkv: Tensor) -> Tensor:
            qkv = qkv.contiguous()
            pool.write(layer, new_index, qkv[:, heads:])
            queries = qkv[:, :heads].reshape(shape).transpose(0, 1).to(exact).contiguous()
            # Rounded to the pool's dtype, so that results do not depend on which keys are new in this pass.
            new = widened(rounded(qkv[:, heads:], pool.kv.dtype), exact)
            merged = self._merged(layer, queries, new, levels[self.windows[layer]])
            return merged.to(qkv.dtype)

        return attend

    # -- once per pass
    # -------------------------------------------------------------------------------------------

    def _levels(self, pieces: Iterable[Piece]) -> list[Level]:
        """Each row's first part in level 0, its second in level 1, and so on. Own pieces come first, so that
        level 0 covers every token."""
        height: dict[int, int] = {}  # of a row or band, by its first token
        parts: list[list[Part]] = []
        reach: list[list[Span]] = []
        for piece in pieces:
            for part, spans in self._parts(piece):
                level = max(height.get(span.first, 0) for span in spans)
                height.update((span.first, level + 1) for span in spans)
                if level == len(parts):
                    parts.append([])
                    reach.append([])
                parts[level].append(part)
                reach[level] += spans
        return [_level(mine, spans) for mine, spans in zip(parts, reach)]

    def _parts(self, piece: Piece) -> Iterable[tuple[Part, tuple[Span, ...]]]:
        match piece:
            case Full(spans, runs):
                queries = self._tokens(spans)
                return [(Part(queries, keys), spans) for keys in self._keys(runs)]
            case Causal(span):
                return [(Part(self._tokens((span,)), None, causal=True), (span,))]
            case Band():
                return [(self._band(piece), (piece.span,))]
            case Bundle():
                return [(self._bundle(piece), tuple(member.span for member in piece.members))]

    def _tokens(self, spans: Sequence[Span]) -> Index:
        return self.pool.index_of(Run(*span) for span in spans)

    def _keys(self, runs: Iterable[Run]) -> list[Index]:
        """Views of long runs; adjacent short runs are gathered."""
        indices: list[Index] = []
        short: list[Run] = []
        gathered = 0
        for run in (*runs, None):
            if short and (run is None or run.length >= SHORT_RUN or gathered + run.length > GATHER_AT_MOST):
                indices.append(self.pool.index_of(short))
                short, gathered = [], 0
            if run is None:
                break
            if run.length >= SHORT_RUN:
                indices.append(slice(run.start, run.start + run.length))
            else:
                short.append(run)
                gathered += run.length
        return indices

    def _band(self, band: Band) -> Part:
        keys = self.pool.index_of(band.runs)
        of = torch.arange(sum(run.length for run in band.runs), device=self.pool.device)
        at = torch.arange(band.span.size, device=self.pool.device)[:, None] + band.lead
        return Part(
            self._tokens((band.span,)), keys, mask=self._mask((of <= at) & (of > at - band.window))[None]
        )

    def _bundle(self, bundle: Bundle) -> Part:
        members, device = bundle.members, self.pool.device
        rows = len(members)
        spans = [member.span for member in members]
        counts = torch.tensor([span.size for span in spans], device=device)
        past = torch.tensor([member.past for member in members], device=device)
        most, widest = int(counts.max()), int((past + counts).max())
        # Queries and keys of shorter rows are padded by repetition; the mask hides such keys, `kept` drops
        # such queries.
        query = torch.arange(most, device=device).expand(rows, most)
        real = query < counts[:, None]
        query = query.minimum(counts[:, None] - 1)
        tokens = query + torch.tensor([span.first for span in spans], device=device)[:, None]
        seen = torch.arange(widest, device=device) <= (past[:, None] + query)[:, :, None]
        queries: Index = tokens.flatten()
        kept: Tensor | None = None
        into: Index = queries
        if bool(real.all()):
            joined = join(Run(*span) for span in spans)
            if len(joined) == 1:
                queries = into = slice(joined[0].start, joined[0].start + joined[0].length)
        else:
            kept = real.flatten().nonzero().flatten()
            into = tokens.flatten()[kept]
        keys = self._padded(
            members_runs=[member.runs for member in members], lengths=past + counts, width=widest
        )
        return Part(queries, keys, batch=rows, mask=self._mask(seen), kept=kept, into=into)

    def _padded(self, members_runs: Sequence[Sequence[Run]], lengths: Tensor, width: int) -> Tensor:
        """Slots of each member's runs, with the last one repeated up to `width`: [members * width]."""
        flat = slots_of([run for runs in members_runs for run in runs], self.pool.device)
        column = torch.arange(width, device=self.pool.device).minimum(lengths[:, None] - 1)
        return flat[(column + (lengths.cumsum(0) - lengths)[:, None]).flatten()]

    def _mask(self, seen: Tensor) -> Tensor:
        """seen [(batch,) queries, keys] -> [(batch,) 1, queries * group, keys], 0 where seen, else -inf."""
        mask = torch.zeros(seen.shape, dtype=self._exact, device=seen.device).masked_fill_(~seen, -math.inf)
        return mask.repeat_interleave(self.group, -2).unsqueeze(-3)

    # -- once per layer
    # ------------------------------------------------------------------------------------------

    def _merged(self, layer: int, q: Tensor, new: Tensor, levels: Sequence[Level]) -> Tensor:
        """q [kv_heads, tokens, group, head_dim] -> [tokens, heads * head_dim]."""
        kv_heads, tokens, group, dim = q.shape
        base = levels[0]
        if len(base.parts) == 1 and base.whole and base.parts[0].kept is None:
            out, lse = self._attend(layer, q, new, base.parts[0])
        else:
            out, lse = q.new_empty(q.shape), q.new_empty((kv_heads, tokens, group), dtype=torch.float32)
            self._fill(layer, q, new, base.parts, out, lse, 0)
        for level in levels[1:]:
            span = slice(level.first, level.last)
            shape = (kv_heads, level.last - level.first, group)
            if level.whole:
                more, more_lse = q.new_empty((*shape, dim)), q.new_empty(shape, dtype=torch.float32)
            else:
                more, more_lse = q.new_zeros((*shape, dim)), q.new_full(shape, -math.inf, dtype=torch.float32)
            self._fill(layer, q, new, level.parts, more, more_lse, level.first)
            both = torch.logaddexp(lse[:, span], more_lse)
            out[:, span].lerp_(more, (more_lse - both).exp_().unsqueeze(-1).to(out.dtype))
            lse[:, span] = both
        if self.sinks:  # the sink's weight is missing from the sum; its value is zero
            sink = self.sinks[layer].view(kv_heads, 1, group)
            out = out * torch.sigmoid(lse - sink).unsqueeze(-1).to(out.dtype)
        return out.permute(1, 0, 2, 3).reshape(tokens, -1)

    def _fill(
        self, layer: int, q: Tensor, new: Tensor, parts: Iterable[Part], out: Tensor, lse: Tensor, first: int
    ) -> None:
        """Write each part's results into out, lse [kv_heads, tokens - first, ...]."""
        for part in parts:
            result, result_lse = self._attend(layer, q, new, part)
            into = part.queries if part.into is None else part.into
            if part.kept is not None:
                result, result_lse = (
                    result.index_select(1, part.kept),
                    result_lse.index_select(1, part.kept),
                )
            if isinstance(into, slice):
                here = slice(into.start - first, into.stop - first)
                out[:, here], lse[:, here] = result, result_lse
            else:
                here = into - first if first else into
                out.index_copy_(1, here, result)
                lse.index_copy_(1, here, result_lse)

    def _attend(self, layer: int, q: Tensor, new: Tensor, part: Part) -> tuple[Tensor, Tensor]:
        """One product: results [kv_heads, queries, group, head_dim] and their log-sum-exp [kv_heads, queries,
        group]."""
        kv_heads, _, group, dim = q.shape
        picked = q[:, part.queries] if isinstance(part.queries, slice) else q.index_select(1, part.queries)
        if part.causal:
            mine = new[part.queries].transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)
            k, v = mine[:kv_heads], mine[kv_heads:]
            out, lse = self._product(
                picked.transpose(1, 2), k, v, True, None
            )  # [kv_heads, group, queries, ...]
            return out.transpose(1, 2), lse.transpose(1, 2)
        k, v = self._read(layer, part)
        rows = picked.shape[1] // part.batch
        side_by_side = picked.reshape(kv_heads, part.batch, rows * group, dim).transpose(0, 1)
        out, lse = self._product(side_by_side, k, v, False, part.mask)  # [batch, kv_heads, rows * group, ...]
        shape = (kv_heads, part.batch * rows, group)
        return out.transpose(0, 1).reshape(*shape, dim), lse.transpose(0, 1).reshape(shape)

    def _read(self, layer: int, part: Part) -> tuple[Tensor, Tensor]:
        """Keys and values of a part: [batch, kv_heads, keys, head_dim]; views if they are one run."""
        data, kv_heads = self.pool.data[layer], self.pool.kv_heads
        if isinstance(part.keys, slice):
            run = widened(data[None, :, part.keys], self._exact)
            return run[:, :kv_heads], run[:, kv_heads:]
        assert part.keys is not None
        shape = (data.shape[0], part.keys.numel(), data.shape[2])
        needed = math.prod(shape)
        if self._scratch.numel() < needed:
            self._scratch = data.new_empty(needed)
        buffer = self._scratch[:needed].view(shape)
        torch.index_select(data, 1, part.keys, out=buffer)
        rows = buffer.view(data.shape[0], part.batch, -1, data.shape[2]).transpose(0, 1)
        rows = widened(rows, self._exact)
        return rows[:, :kv_heads], rows[:, kv_heads:]


class TorchPlain(TorchViews):
    """TorchViews with torch's public operations only."""

    def _choose_product(self) -> Product:
        return self._plain_product()


def _computed_in(shape: KVShape) -> torch.dtype:
    if shape.device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if shape.dtype in TYPES else shape.dtype


def _level(parts: Sequence[Part], spans: Sequence[Span]) -> Level:
    first = min(span.first for span in spans)
    last = max(span.first + span.size for span in spans)
    return Level(tuple(parts), first, last, whole=sum(span.size for span in spans) == last - first)


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
