"""Codes: a matrix in codes of 4 or 8 bits, with a scale for each group of inputs of an output.

All formats are converted to it: integers or 8-bit floating point; scales per matrix, output, group or
rectangle; with zero points or without.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.attention.float8 import widened


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """The number at (output, input) is code * scale - offset, with scale and offset of the output and the
    input's group.

    data     int8 or float8_e4m3fn [outputs, inputs]; or uint8 [outputs, inputs / 2] with two 4-bit codes per
             byte: the first half of the inputs in the lower bits, the second half in the upper ones (this
             unpacks three times as fast as pairs of neighbours)
    scale    [outputs, groups], a floating-point dtype; groups have `group` inputs, the last may be shorter
    offset   [outputs, groups], or None: all zero
    order    the input that each column is for, int64 [inputs]; None: in order
    """

    data: Tensor
    scale: Tensor
    group: int
    offset: Tensor | None = None
    order: Tensor | None = None

    @property
    def outputs(self) -> int:
        return self.data.shape[0]

    @property
    def inputs(self) -> int:
        return self.data.shape[1] * (2 if self.data.dtype == torch.uint8 else 1)

    @property
    def nbytes(self) -> int:
        held = (self.data, self.scale, self.offset, self.order)
        return sum(one.nbytes for one in held if one is not None)

    def numbers(
        self, outputs: slice | Tensor = slice(None), *, scale: bool = True, offset: bool = True
    ) -> Tensor:
        """The numbers of some outputs, float32 [outputs, inputs], with columns as stored (see `order`).
        Without scales or offsets if the caller applies them."""
        code = _floats(self.data[outputs])
        if scale:
            self._each(code, self.scale[outputs], Tensor.mul_)
        if offset and self.offset is not None:
            self._each(code, self.offset[outputs], Tensor.sub_)
        return code

    def _each(self, code: Tensor, of_groups: Tensor, act: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Apply `act` in place to each number with its group's value."""
        rows, inputs = code.shape
        if inputs % self.group:  # the last group is shorter
            act(code, of_groups.float().repeat_interleave(self.group, 1)[:, :inputs])
        else:
            act(code.view(rows, -1, self.group), of_groups.float().unsqueeze(-1))

    def dense(self) -> Tensor:
        """float32 [outputs, inputs], columns in the order of the inputs."""
        numbers = self.numbers()
        if self.order is None:
            return numbers
        return torch.empty_like(numbers).index_copy_(1, self.order, numbers)

    def sums(self, x: Tensor) -> Tensor:
        """The sum of each group's inputs, [rows, groups]; x [rows, inputs] in the order of the columns."""
        if more := -x.shape[1] % self.group:
            x = F.pad(x, (0, more))
        return x.unflatten(1, (-1, self.group)).sum(-1)

    def rows(self, local: range | None) -> Codes:
        """Only the outputs `local` (None: all)."""
        if local is None:
            return self
        part = slice(local.start, local.stop)
        offset = None if self.offset is None else self.offset[part].contiguous()
        data, scale = self.data[part].contiguous(), self.scale[part].contiguous()
        return replace(self, data=data, scale=scale, offset=offset)

    def columns(self, local: range | None) -> Codes:
        """Only the inputs `local` (None: all). Raises ValueError if that would split codes which are stored
        together."""
        if local is None:
            return self
        if self.order is not None:
            raise ValueError("its inputs are not grouped in their order")
        if self.data.dtype == torch.uint8:
            if len(local) % 2:
                raise ValueError("an odd number of codes of 4 bits")
            apart = torch.cat((self.data & 15, self.data >> 4), 1)
            data = nibbles(apart[:, local.start : local.stop])
        else:
            data = self.data[:, local.start : local.stop].contiguous()
        # The largest groups that neither end of `local` splits.
        group = math.gcd(self.group, local.start, local.stop)
        if self.group >= self.inputs:
            group, groups = len(local), torch.zeros(1, dtype=torch.int64)
        else:
            groups = torch.arange(local.start, local.stop, group) // self.group
        groups = groups.to(self.data.device)
        offset = None if self.offset is None else self.offset.index_select(1, groups)
        return Codes(data, self.scale.index_select(1, groups), group, offset)

    def to(self, device: torch.device) -> Codes:
        """A copy. The original may lie in a file's memory, which it would keep mapped."""
        offset, order = (None if one is None else one.to(device) for one in (self.offset, self.order))
        data, scale = self.data.to(device, copy=True), self.scale.to(device, copy=True)
        return Codes(data, scale, self.group, offset, order)


def stacked(parts: Sequence[Codes]) -> list[Codes]:
    """The same matrices in as few as possible: neighbours with the same kind of codes are joined."""
    merged: list[Codes] = []
    for part in parts:
        if merged and _alike(merged[-1], part):
            last = merged.pop()
            offset = None
            if last.offset is not None and part.offset is not None:
                offset = torch.cat((last.offset, part.offset))
            data = torch.cat((last.data.view(torch.uint8), part.data.view(torch.uint8))).view(part.data.dtype)
            part = replace(part, data=data, scale=torch.cat((last.scale, part.scale)), offset=offset)
        merged.append(part)
    return merged


def _alike(one: Codes, other: Codes) -> bool:
    if (one.order is None) != (other.order is None) or (one.offset is None) != (other.offset is None):
        return False
    same = one.data.dtype == other.data.dtype and one.scale.dtype == other.scale.dtype
    same = same and one.group == other.group
    return same and (one.order is None or other.order is None or torch.equal(one.order, other.order))


def nibbles(codes: Tensor) -> Tensor:
    """[rows, inputs] of 0 to 15, any integer dtype -> uint8 [rows, inputs / 2]: see Codes.data."""
    lower, upper = codes.to(torch.uint8).chunk(2, 1)
    return lower | (upper << 4)


def _floats(data: Tensor) -> Tensor:
    """The codes as float32, in a new tensor."""
    if data.dtype == torch.uint8:
        rows, half = data.shape
        numbers = torch.empty(rows, 2 * half, device=data.device)
        numbers[:, :half].copy_(data & 15)
        numbers[:, half:].copy_(data >> 4)
        return numbers
    return widened(data, torch.float32)
