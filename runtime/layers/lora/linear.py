"""Adapted: a LinearMethod that adds low-rank adapters to what another one computes.

The adapters of a pass lie in few places, the same for all matrices: `down` [places, parts * rank, inputs]
and, for each projection, `up` [places, rank, outputs], zero where an adapter is smaller. All of them are
applied to all tokens in two products, and a mask [tokens, places] between the two leaves each token its own
adapter. So there is no gather and no loop over requests; a few ranks too many cost little beside W.

Of matrices that ranks share each holds its own part of A or of B; what adds up the ranks' results adds up
these as well.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.layers.dense import size_of
from runtime.layers.linear import Linear, LinearMethod, Projection
from runtime.layers.weights import Weights
from runtime.protocol.errors import InternalFault


class ActiveAdapters:
    """What the pass under way uses. One object for all matrices of a model, changed between passes.

    tokens       how many the pass has; 0: it uses no adapter
    first, last  the places in use are in range(first, last)
    places       a bit for each place in use
    mask         [tokens, last - first], 1 where a token uses a place, else 0; None: all use the only one
    """

    __slots__ = ("first", "last", "mask", "places", "tokens")

    def __init__(self) -> None:
        self.tokens = self.first = self.last = self.places = 0
        self.mask: Tensor | None = None

    def none(self) -> None:
        """The pass uses no adapter."""
        self.tokens = self.places = 0
        self.mask = None

    def some(self, lengths: Sequence[int], chosen: Sequence[int], like: Tensor) -> None:
        """Of each row its number of tokens, and its adapter's place or -1 for none; one row has one. `like`:
        a tensor of the type and on the device of the pass."""
        used = sorted({place for place in chosen if place >= 0})
        self.tokens, self.first, self.last = sum(lengths), used[0], used[-1] + 1
        self.places = sum(1 << place for place in used)
        self.mask = None
        if len(set(chosen)) > 1:
            of_token = torch.tensor(chosen).repeat_interleave(torch.tensor(lengths))
            places = torch.arange(self.first, self.last)
            self.mask = (of_token[:, None] == places).to(like.device, like.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """Of one projection, in the model's type: down [rank, inputs], up [outputs, rank] with the scale in it;
    of a matrix that ranks share this rank's own inputs and outputs."""

    down: Tensor
    up: Tensor

    @property
    def rank(self) -> int:
        return self.down.shape[0]


class AdaptedLinear(Linear):
    """`base`, and the adapters of its projections.

    inputs  of the whole matrix
    own     which of them it gets; None: all
    like    a tensor of the type and on the device of its products
    """

    __slots__ = ("_active", "_base", "_down", "_places", "_ups", "_used", "inputs", "like", "own", "parts")

    def __init__(
        self,
        base: Linear,
        parts: Sequence[Projection],
        inputs: int,
        own: range | None,
        active: ActiveAdapters,
        like: Tensor,
    ) -> None:
        self.parts, self.own = tuple(parts), own
        self._base, self._active, self.like = base, active, like
        self.inputs = inputs
        self._down: Tensor | None = None  # made for the first adapter
        self._ups: list[Tensor] = []
        self._places = 0  # a bit for each place that holds anything
        self._used = [0] * len(self.parts)  # the same for each projection

    def __call__(self, x: Tensor) -> Tensor:
        y = self._base(x)
        active = self._active
        if not active.places & self._places:
            return y
        if len(x) != active.tokens:
            raise InternalFault(
                f"{self.parts[0].name} got {len(x)} rows of a pass of {active.tokens} tokens",
                where="adapters",
            )
        return self._adapted(x, y, active)

    def some(self, x: Tensor, outputs: Tensor) -> Tensor:
        if self._places:
            raise InternalFault("some outputs alone have no adapters", where=self.parts[0].name)
        return self._base.some(x, outputs)

    def _adapted(self, x: Tensor, y: Tensor, active: ActiveAdapters) -> Tensor:
        assert self._down is not None
        rows, first, last = len(x), active.first, active.last
        if x.device.type == "cpu" and x.dtype != torch.float32:
            # Products come in few sizes there: see runtime/layers/dense.py.
            x = F.pad(x, (0, 0, 0, size_of(rows) - rows))
        rank = self._down.shape[1] // len(self.parts)
        low = (x @ self._down[first:last].flatten(0, 1).t()).unflatten(-1, (last - first, -1))
        if active.mask is not None:
            low[:rows] *= active.mask[:, :, None]
        start = 0
        for index, (part, up) in enumerate(zip(self.parts, self._ups)):
            end = start + part.computed
            if self._used[index] & active.places:
                mine = low[:, :, index * rank : (index + 1) * rank].flatten(1)
                y[:, start:end] += (mine @ up[first:last].flatten(0, 1))[:rows]
            start = end
        return y

    def reserve(self, places: int, rank: int) -> None:
        """Room for adapters of up to `rank` in so many places; what is there stays. Raises RuntimeError when
        there is no memory for it."""
        had = 0 if self._down is None else self._down.shape[1] // len(self.parts)
        if rank <= had:
            return
        count, like = len(self.parts), self.like
        columns = self.inputs if self.own is None else len(self.own)
        down = like.new_zeros(places, count, rank, columns)
        ups = [like.new_zeros(places, rank, part.computed) for part in self.parts]
        if self._down is not None:
            down[:, :, :had] = self._down.unflatten(1, (count, had))
            for up, old in zip(ups, self._ups):
                up[:, :had] = old
        self._down, self._ups = down.flatten(1, 2), ups

    def put(self, place: int, factors: Sequence[Factors | None]) -> None:
        """The adapter at `place`, for which there is room, is this one from now on: for each projection its
        factors; None: it leaves it as it is."""
        if self._down is None:
            return
        rank = self._down.shape[1] // len(self.parts)
        self._down[place].zero_()
        bit = 1 << place
        for index, one in enumerate(factors):
            self._ups[index][place].zero_()
            self._used[index] &= ~bit
            if one is not None:
                at = index * rank
                self._down[place, at : at + one.rank] = one.down
                self._ups[index][place, : one.rank] = one.up.t()
                self._used[index] |= bit
        self._places &= ~bit
        if any(one is not None for one in factors):
            self._places |= bit


class Adapted(LinearMethod):
    """`method` with adapters on all matrices but those named `without`, of which not all tokens' outputs are
    computed: the head. `active`: what to set before each pass. `linears`: what was loaded."""

    def __init__(self, method: LinearMethod, without: Collection[str] = ()) -> None:
        self._method, self._without = method, frozenset(without)
        self.active = ActiveAdapters()
        self.linears: list[AdaptedLinear] = []

    def load(
        self,
        weights: Weights,
        parts: Sequence[Projection],
        inputs: int,
        *,
        bias: bool,
        own: range | None = None,
    ) -> Linear:
        made = self._method.load(weights, parts, inputs, bias=bias, own=own)
        if any(part.name in self._without for part in parts):
            return made
        like = torch.empty(0, dtype=weights.dtype, device=weights.device)
        self.linears.append(AdaptedLinear(made, parts, inputs, own, self.active, like))
        return self.linears[-1]

    def of_some_tokens(self) -> LinearMethod:
        """Without adapters: which token has which is known for all of a pass's tokens in their order."""
        return self._method

    def shared(self, table: Tensor) -> Linear:
        return self._method.shared(table)

    def tune(self) -> None:
        self._method.tune()
