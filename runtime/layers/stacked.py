"""Experts of a layer that a checkpoint keeps in one tensor, read as if each had matrices of its own: as
numbers, or as MXFP4 codes, whose numbers are made while they are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from runtime.config.parts.experts import StackNames
from runtime.layers.weights import LOADABLE, Weights
from runtime.protocol.errors import ModelLoadError

Which = Literal["gate", "up", "down"]

MX_BLOCK = 32  # numbers that share a scale
_MX_BIAS = 127
# Of four bits: sign, two of exponent, one of mantissa (OCP Microscaling Formats 1.0, section 5.3.3).
_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


class Place(NamedTuple):
    expert: int
    which: Which


class StackedExperts(Weights):
    """places: by a projection's name whose it is. count: experts. Other tensors are those of `weights`."""

    def __init__(self, weights: Weights, names: StackNames, places: Mapping[str, Place], count: int) -> None:
        self.dtype, self.device = weights.dtype, weights.device
        self._weights, self._names, self._places, self._count = weights, names, places, count
        self._done: set[str] = set()

    def __contains__(self, name: str) -> bool:
        projection, _, kind = name.rpartition(".")
        place = self._places.get(projection)
        if place is None:
            return name in self._weights
        ends = {"weight": ("", "_blocks"), "bias": ("_bias",)}.get(kind, ())
        return any(f"{self._stack(place)}{end}" in self._weights for end in ends)

    def path_of(self, name: str) -> str:
        place = self._places.get(name.rpartition(".")[0])
        return self._weights.path_of(name if place is None else self._stack(place))

    def shape_of(self, name: str) -> tuple[int, ...]:
        if name.rpartition(".")[0] in self._places:
            raise ModelLoadError(f"{name!r} lies in a stack", where=self.path_of(name))
        return self._weights.shape_of(name)

    def taken(self, name: str) -> bool:
        return name in self._done or self._weights.taken(name)

    def skip(self, *names: str) -> None:
        self._done.update(names)
        self._weights.skip(*names)

    def take(
        self,
        name: str,
        shape: Sequence[int],
        rows: range | None = None,
        columns: range | None = None,
        types: Sequence[torch.dtype] = LOADABLE,
    ) -> Tensor:
        projection, _, kind = name.rpartition(".")
        place = self._places.get(projection)
        if place is None:
            return self._weights.take(name, shape, rows, columns, types)
        self._done.add(name)
        stack, outputs = self._stack(place), shape[0]
        wide = outputs if place.which == "down" else 2 * outputs
        wanted, step = self._outputs(place, outputs, rows or range(outputs))
        if kind == "bias":
            return self._weights.entry(f"{stack}_bias", (self._count, wide), place.expert, wanted)[::step]
        size = (self._count, shape[1], wide)
        if f"{stack}_blocks" in self._weights:
            matrix = self._from_codes(stack, place.expert, wide, shape[1], wanted)
            return matrix[::step] if columns is None else matrix[::step, columns.start : columns.stop]
        return self._weights.entry(stack, size, place.expert, columns, wanted).t()[::step]

    def _stack(self, place: Place) -> str:
        return self._names.down if place.which == "down" else self._names.gate_up

    def _outputs(self, place: Place, outputs: int, rows: range) -> tuple[range, int]:
        """Where the outputs `rows` of a projection lie among its stack's, and every how many of these is
        one, from the first on."""
        second = int(place.which == "up")
        if place.which == "down":
            return rows, 1
        if self._names.alternate:
            return range(2 * rows.start + second, 2 * rows.stop), 2
        return range(rows.start + second * outputs, rows.stop + second * outputs), 1

    def _from_codes(self, stack: str, expert: int, outputs: int, inputs: int, wanted: range) -> Tensor:
        """[len(wanted), inputs] of MXFP4: each byte holds two codes, the lower half first."""
        blocks = -(-inputs // MX_BLOCK)
        shape = (self._count, outputs, blocks)
        octets = (torch.uint8,)
        codes = self._weights.entry(f"{stack}_blocks", (*shape, MX_BLOCK // 2), expert, wanted, types=octets)
        scales = self._weights.entry(f"{stack}_scales", shape, expert, wanted, types=octets)
        table = _FP4.to(torch.float32)
        pairs = torch.stack((table[(codes & 15).long()], table[(codes >> 4).long()]), -1)
        numbers = torch.ldexp(pairs.flatten(-2), scales.int()[..., None] - _MX_BIAS)
        return numbers.flatten(-2)[:, :inputs]
