"""Layers sharded over the ranks of a group (tensor parallelism, arXiv 1909.08053).

A matrix is split by outputs, and the next layer uses the rank's own; or by inputs, and the ranks' results are
summed. The vocabulary is split by ids, in the embedding and in the head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from runtime.layers.linear import Linear
from runtime.parallel import Group


@dataclass(frozen=True, slots=True, eq=False)
class Summed(Linear):
    """`part` (without bias) takes the rank's own inputs; `bias` [outputs] or None is added to the sum."""

    part: Linear
    bias: Tensor | None
    group: Group

    def __call__(self, x: Tensor) -> Tensor:
        return self._whole(self.part(x), self.bias)

    def some(self, x: Tensor, outputs: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.index_select(0, outputs)
        return self._whole(self.part.some(x, outputs), bias)

    def _whole(self, y: Tensor, bias: Tensor | None) -> Tensor:
        y = self.group.sum_(y)
        return y if bias is None else y + bias


class Gathered(Linear):
    """`part` has the outputs `local` of `outputs`; every rank gets all of them."""

    __slots__ = ("_each", "_group", "_local", "_outputs", "_part")

    def __init__(self, part: Linear, local: range, outputs: int, group: Group) -> None:
        self._part, self._local, self._outputs, self._group = part, local, outputs, group
        self._each = -(-outputs // group.size)

    def __call__(self, x: Tensor) -> Tensor:
        y = self._part(x)
        if more := self._each - len(self._local):  # all ranks must send the same size
            y = F.pad(y, (0, more))
        return self._group.gather(y)[:, : self._outputs]

    def some(self, x: Tensor, outputs: Tensor) -> Tensor:
        elsewhere = (outputs < self._local.start) | (outputs >= self._local.stop)
        y = self._part.some(x, (outputs - self._local.start).masked_fill(elsewhere, 0))
        return self._group.sum_(y.masked_fill_(elsewhere, 0.0))


class Embedding:
    """`table` [own ids, hidden], starting at id `first`."""

    __slots__ = ("_first", "_group", "table")

    def __init__(self, table: Tensor, first: int, group: Group) -> None:
        self.table, self._first, self._group = table, first, group

    def __call__(self, ids: Tensor) -> Tensor:
        """[tokens] int64 -> [tokens, hidden]."""
        if self._group.size == 1:
            return F.embedding(ids, self.table)
        local = ids - self._first
        elsewhere = (local < 0) | (local >= self.table.shape[0])
        rows = F.embedding(local.masked_fill_(elsewhere, 0), self.table)
        return self._group.sum_(rows.masked_fill_(elsewhere[:, None], 0.0))
