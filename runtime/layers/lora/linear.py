"""Adapted: a LinearMethod that adds low-rank adapters to the results of another one.

The adapters of a pass lie in a few slots: `down` [slots, parts * rank, inputs] and, for each projection, `up`
[slots, rank, outputs], with zeros if an adapter's rank is smaller. If tokens of different adapters alternate,
all adapters are applied to all tokens in two products, with a mask [tokens, slots] between them. Long
stretches with one adapter are computed separately. If ranks share a matrix, each holds its part of A or of B.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.layers.dense import size_of
from runtime.layers.linear import Linear, LinearMethod, Parts, Projection
from runtime.layers.weights import Weights
from runtime.protocol.errors import InternalFault

LONG = 16
"""Stretches of at least this many tokens on average are computed separately."""


class Stretch(NamedTuple):
    """Tokens first to last of a pass and the adapter slots they use: `bits`, all of them in range(low, high).
    mask: [tokens, high - low], 1 if a token uses a slot, else 0; None: all use the only one."""

    first: int
    last: int
    low: int
    high: int
    bits: int
    mask: Tensor | None = None


class ActiveAdapters:
    """The adapters of the current pass: one object for all matrices of a model, changed between passes.
    tokens: in the pass; 0: it uses no adapter. stretches: of tokens with adapters, separate if they are long,
    as prompts are, else all tokens as one. bits: one for each slot in use."""

    __slots__ = ("bits", "stretches", "tokens")

    def __init__(self) -> None:
        self.tokens = self.bits = 0
        self.stretches: tuple[Stretch, ...] = ()

    def none(self) -> None:
        """The pass uses no adapter."""
        self.tokens = self.bits = 0
        self.stretches = ()

    def some(self, lengths: Sequence[int], chosen: Sequence[int], like: Tensor) -> None:
        """Set the rows of the pass: `lengths` (tokens of each row) and `chosen` (each row's adapter slot, or
        -1). At least one row has an adapter. `like`: a tensor of the pass's dtype and device."""
        used = sorted({slot for slot in chosen if slot >= 0})
        self.tokens, self.bits = sum(lengths), sum(1 << slot for slot in used)
        first, apart = 0, []
        for slot, rows in groupby(zip(chosen, lengths), key=lambda row: row[0]):
            last = first + sum(length for _, length in rows)
            apart.append((slot, first, last))
            first = last
        if self.tokens >= LONG * len(apart) or len(apart) == 1:
            self.stretches = tuple(
                [Stretch(first, last, at, at + 1, 1 << at) for at, first, last in apart if at >= 0]
            )
            return
        low, high = used[0], used[-1] + 1
        of_token = torch.tensor(chosen).repeat_interleave(torch.tensor(lengths))
        mask = (of_token[:, None] == torch.arange(low, high)).to(like.device, like.dtype)
        self.stretches = (Stretch(0, self.tokens, low, high, self.bits, mask),)


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """The factors of one projection, in the model's dtype: down [rank, inputs]; up [outputs, rank], which
    includes the scale. If ranks share the matrix, only this rank's inputs and outputs."""

    down: Tensor
    up: Tensor

    @property
    def rank(self) -> int:
        return self.down.shape[0]


class AdaptedLinear(Linear):
    """`base`, and the adapters of its projections.

    inputs  of the whole matrix
    local   the inputs it gets; None: all
    like    a tensor of the dtype and device of its products
    """

    __slots__ = ("_active", "_base", "_bits", "_down", "_ups", "_used", "inputs", "like", "local", "parts")

    def __init__(
        self,
        base: Linear,
        parts: Sequence[Projection],
        inputs: int,
        local: range | None,
        active: ActiveAdapters,
        like: Tensor,
    ) -> None:
        self.parts, self.local = tuple(parts), local
        self._base, self._active, self.like = base, active, like
        self.inputs = inputs
        self._down: Tensor | None = None  # allocated for the first adapter
        self._ups: list[Tensor] = []
        self._bits = 0  # a bit for each slot in use
        self._used = [0] * len(self.parts)  # the same for each projection

    def __call__(self, x: Tensor) -> Tensor:
        y = self._base(x)
        active = self._active
        if not active.bits & self._bits:
            return y
        if len(x) != active.tokens:
            raise InternalFault(
                f"{self.parts[0].name} got {len(x)} rows of a pass of {active.tokens} tokens",
                where="adapters",
            )
        for stretch in active.stretches:
            if stretch.bits & self._bits:
                self._add(x[stretch.first : stretch.last], y[stretch.first : stretch.last], stretch)
        return y

    def some(self, x: Tensor, outputs: Tensor) -> Tensor:
        if self._bits:
            raise InternalFault("some outputs alone have no adapters", where=self.parts[0].name)
        return self._base.some(x, outputs)

    def _add(self, x: Tensor, y: Tensor, stretch: Stretch) -> None:
        """Add to y [rows, outputs] the adapters' results for x [rows, inputs]."""
        assert self._down is not None
        rows, low, high = len(x), stretch.low, stretch.high
        if x.device.type == "cpu" and x.dtype != torch.float32:
            # Products come in few sizes there: see runtime/layers/dense.py.
            x = F.pad(x, (0, 0, 0, size_of(rows) - rows))
        rank = self._down.shape[1] // len(self.parts)
        inner = (x @ self._down[low:high].flatten(0, 1).t()).unflatten(-1, (high - low, -1))
        if stretch.mask is not None:
            inner[:rows] *= stretch.mask[:, :, None]
        start = 0
        for index, (part, up) in enumerate(zip(self.parts, self._ups)):
            end = start + part.computed
            if self._used[index] & stretch.bits:
                mine = inner[:, :, index * rank : (index + 1) * rank].flatten(1)
                matrix = up[low:high].flatten(0, 1)
                if len(x) == rows:
                    y[:, start:end].addmm_(mine, matrix)
                else:
                    y[:, start:end] += (mine @ matrix)[:rows]
            start = end

    def reserve(self, slots: int, rank: int) -> None:
        """Allocate `slots` adapter slots of up to `rank`; their contents stay. Raises RuntimeError if there
        is not enough memory."""
        old_rank = 0 if self._down is None else self._down.shape[1] // len(self.parts)
        if rank <= old_rank:
            return
        count, like = len(self.parts), self.like
        columns = self.inputs if self.local is None else len(self.local)
        down = like.new_zeros(slots, count, rank, columns)
        ups = [like.new_zeros(slots, rank, part.computed) for part in self.parts]
        if self._down is not None:
            down[:, :, :old_rank] = self._down.unflatten(1, (count, old_rank))
            for up, old in zip(ups, self._ups):
                up[:, :old_rank] = old
        self._down, self._ups = down.flatten(1, 2), ups

    def put(self, slot: int, factors: Sequence[Factors | None]) -> None:
        """Set the adapter in `slot`, for which memory is reserved: the factors of each projection, or None if
        the adapter does not change it."""
        if self._down is None:
            return
        rank = self._down.shape[1] // len(self.parts)
        self._down[slot].zero_()
        bit = 1 << slot
        for index, one in enumerate(factors):
            self._ups[index][slot].zero_()
            self._used[index] &= ~bit
            if one is not None:
                at = index * rank
                self._down[slot, at : at + one.rank] = one.down
                self._ups[index][slot, : one.rank] = one.up.t()
                self._used[index] |= bit
        self._bits &= ~bit
        if any(one is not None for one in factors):
            self._bits |= bit


class Adapted(LinearMethod):
    """`method` with adapters on all matrices except those named in `without`: the head, which computes only
    some tokens' outputs. `active`: to be set before each pass. `linears`: what was loaded."""

    def __init__(self, method: LinearMethod, without: Collection[str] = ()) -> None:
        self._method, self._without = method, frozenset(without)
        self.active = ActiveAdapters()
        self.linears: list[AdaptedLinear] = []

    def load(
        self, weights: Weights, parts: Parts, inputs: int, *, bias: bool, local: range | None = None
    ) -> Linear:
        linear = self._method.load(weights, parts, inputs, bias=bias, local=local)
        if any(part.name in self._without for part in parts):
            return linear
        like = torch.empty(0, dtype=weights.dtype, device=weights.device)
        self.linears.append(AdaptedLinear(linear, parts, inputs, local, self.active, like))
        return self.linears[-1]

    def of_some_tokens(self) -> LinearMethod:
        """Without adapters: the active adapters are known only for all tokens of a pass in order."""
        return self._method

    def shared(self, table: Tensor) -> Linear:
        return self._method.shared(table)

    def tune(self) -> None:
        self._method.tune()
