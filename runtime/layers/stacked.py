"""Experts of a layer that a checkpoint keeps in one tensor, read as if each had its own matrices: as plain
numbers, or as MXFP4 codes that are dequantised on reading."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from runtime.config.parts.experts import StackNames
from runtime.layers.weights import LOADABLE, Part, Shape, Types, Weights
from runtime.protocol.errors import ModelLoadError

Which = Literal["gate", "up", "down"]

MX_BLOCK = 32  # numbers that share a scale
_MX_BIAS = 127
# Four bits: sign, two of exponent, one of mantissa (OCP Microscaling Formats 1.0, section 5.3.3).
_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


class ExpertMatrix(NamedTuple):
    expert: int
    which: Which


class StackedExperts(Weights):
    """matrices: the expert's matrix for each projection's name. count: experts. Other tensors come from
    `weights`."""

    def __init__(
        self, weights: Weights, names: StackNames, matrices: Mapping[str, ExpertMatrix], count: int
    ) -> None:
        self.dtype, self.device = weights.dtype, weights.device
        self._weights, self._names, self._matrices, self._count = weights, names, matrices, count
        self._done: set[str] = set()

    def __contains__(self, name: str) -> bool:
        projection, _, kind = name.rpartition(".")
        matrix = self._matrices.get(projection)
        if matrix is None:
            return name in self._weights
        ends = {"weight": ("", "_blocks"), "bias": ("_bias",)}.get(kind, ())
        return any(f"{self._stack(matrix)}{end}" in self._weights for end in ends)

    def path_of(self, name: str) -> str:
        matrix = self._matrices.get(name.rpartition(".")[0])
        return self._weights.path_of(name if matrix is None else self._stack(matrix))

    def shape_of(self, name: str) -> tuple[int, ...]:
        if name.rpartition(".")[0] in self._matrices:
            raise ModelLoadError(f"{name!r} lies in a stack", where=self.path_of(name))
        return self._weights.shape_of(name)

    def taken(self, name: str) -> bool:
        return name in self._done or self._weights.taken(name)

    def skip(self, *names: str) -> None:
        self._done.update(names)
        self._weights.skip(*names)

    def take(
        self, name: str, shape: Shape, rows: Part = None, columns: Part = None, types: Types = LOADABLE
    ) -> Tensor:
        projection, _, kind = name.rpartition(".")
        matrix = self._matrices.get(projection)
        if matrix is None:
            return self._weights.take(name, shape, rows, columns, types)
        self._done.add(name)
        stack, outputs = self._stack(matrix), shape[0]
        wide = outputs if matrix.which == "down" else 2 * outputs
        stored_rows, step = self._outputs(matrix, outputs, rows or range(outputs))
        if kind == "bias":
            return self._weights.entry(f"{stack}_bias", (self._count, wide), matrix.expert, stored_rows)[
                ::step
            ]
        size = (self._count, shape[1], wide)
        if f"{stack}_blocks" in self._weights:
            numbers = self._from_codes(stack, matrix.expert, wide, shape[1], stored_rows)
            return numbers[::step] if columns is None else numbers[::step, columns.start : columns.stop]
        return self._weights.entry(stack, size, matrix.expert, columns, stored_rows).t()[::step]

    def _stack(self, matrix: ExpertMatrix) -> str:
        return self._names.down if matrix.which == "down" else self._names.gate_up

    def _outputs(self, matrix: ExpertMatrix, outputs: int, rows: range) -> tuple[range, int]:
        """The range of the stack's outputs that holds the outputs `rows` of a projection, and the step within
        it."""
        second = int(matrix.which == "up")
        if matrix.which == "down":
            return rows, 1
        if self._names.alternate:
            return range(2 * rows.start + second, 2 * rows.stop), 2
        return range(rows.start + second * outputs, rows.stop + second * outputs), 1

    def _from_codes(self, stack: str, expert: int, outputs: int, inputs: int, rows: range) -> Tensor:
        """[len(rows), inputs] from MXFP4: each byte holds two codes, the lower half first."""
        blocks = -(-inputs // MX_BLOCK)
        shape = (self._count, outputs, blocks)
        octets = (torch.uint8,)
        codes = self._weights.entry(f"{stack}_blocks", (*shape, MX_BLOCK // 2), expert, rows, types=octets)
        scales = self._weights.entry(f"{stack}_scales", shape, expert, rows, types=octets)
        table = _FP4.to(torch.float32)
        pairs = torch.stack((table[(codes & 15).long()], table[(codes >> 4).long()]), -1)
        numbers = torch.ldexp(pairs.flatten(-2), scales.int()[..., None] - _MX_BIAS)
        return numbers.flatten(-2)[:, :inputs]
