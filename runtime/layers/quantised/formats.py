"""Formats: how checkpoints store quantised matrices. Each returns the Codes of a matrix by its name.

Sources: the `compressed-tensors` package's documentation; DeepSeek-V3's README (weights in fp8 with scales of
128 x 128 blocks); AWQ (arXiv 2306.00978) and GPTQ (arXiv 2210.17323) as AutoAWQ and AutoGPTQ write them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.attention.float8 import E4M3
from runtime.config.parts.quantization import Quantization
from runtime.layers.quantised.codes import Codes, nibbles
from runtime.layers.weights import LOADABLE, Weights
from runtime.protocol.errors import ModelLoadError

WORD = 32
"""Bits of the integers that codes are packed into."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The index among eight neighbours of each four bits of an AWQ word, from the lowest bits up."""
_INDICES = (torch.int32, torch.int64)
_ACTIVATIONS = ("input_scale", "input_zero_point", "input_scale_ub", "activation_scale", "output_scale")
"""Tensors about activations, which are not quantised here."""


class Format(ABC):
    """marks: ends of names; a matrix with one of these tensors is quantised."""

    marks: tuple[str, ...] = ("qweight",)

    def __init__(self, kept: Quantization) -> None:
        self._kept = kept

    def holds(self, weights: Weights, name: str) -> bool:
        """Whether the matrix `name` is quantised."""
        return any(f"{name}.{mark}" in weights for mark in self.marks)

    @abstractmethod
    def read(self, weights: Weights, name: str, outputs: int, inputs: int) -> Codes:
        """The matrix, on the CPU. Raises ModelLoadError."""


class CompressedTensors(Format):
    """`weight` as codes, or `weight_packed` into words along the inputs; `weight_scale`, `weight_zero_point`
    and `weight_g_idx`. Packed codes and zero points are stored with half their range added."""

    marks = ("weight_scale",)

    def read(self, weights: Weights, name: str, outputs: int, inputs: int) -> Codes:
        kept = self._kept
        weights.skip(*(f"{name}.{one}" for one in (*_ACTIVATIONS, "weight_shape")))
        scale, group = _scales(weights, f"{name}.weight_scale", kept, outputs, inputs)
        if not kept.packed:
            types = (E4M3, torch.int8)
            data = _checked(weights, f"{name}.weight", (outputs, inputs), types)
            offset = self._zeros(weights, f"{name}.weight_zero_point", scale, outputs, inputs)
            return Codes(data, scale, group, offset)
        half = 1 << (kept.bits - 1)
        packed = _packed(weights, f"{name}.weight_packed", outputs, _ceil(inputs * kept.bits, WORD))
        codes = unpacked(packed, kept.bits)[:, :inputs]
        zeros: Tensor | int = half
        zero_name = f"{name}.weight_zero_point"
        if not kept.symmetric:
            packed = _packed(weights, zero_name, _ceil(outputs * kept.bits, WORD), scale.shape[1])
            zeros = unpacked(packed.t(), kept.bits)[:, :outputs].t()
        weights.skip(zero_name)
        index_name, path = f"{name}.weight_g_idx", weights.path_of(f"{name}.weight_packed")
        index = weights.take(index_name, (inputs,), types=_INDICES) if kept.ordered else None
        weights.skip(index_name)
        return _integers(codes, scale, zeros, group, kept.bits, index, path)

    def _zeros(self, weights: Weights, name: str, scale: Tensor, outputs: int, inputs: int) -> Tensor | None:
        if self._kept.symmetric:
            weights.skip(name)
            return None
        stored_zeros = weights.take(name, weights.shape_of(name), types=(torch.int8, *LOADABLE)).float()
        zeros, _ = _spread(stored_zeros, self._kept, outputs, inputs)
        return zeros * scale.float()


class Float8(Format):
    """`weight` in float8_e4m3fn, multiplied by `weight_scale_inv` or `weight_scale`."""

    marks = ("weight_scale_inv", "weight_scale")

    def read(self, weights: Weights, name: str, outputs: int, inputs: int) -> Codes:
        weights.skip(*(f"{name}.{one}" for one in _ACTIVATIONS))
        scale_name = next(mark for mark in self.marks if f"{name}.{mark}" in weights)
        scale, group = _scales(weights, f"{name}.{scale_name}", self._kept, outputs, inputs)
        return Codes(_checked(weights, f"{name}.weight", (outputs, inputs), (E4M3,)), scale, group)


class AWQ(Format):
    """`qweight` [inputs, outputs / 8] and `qzeros` [groups, outputs / 8] in words along the outputs, in AWQ's
    own order; `scales` [groups, outputs]."""

    def read(self, weights: Weights, name: str, outputs: int, inputs: int) -> Codes:
        bits = self._kept.bits
        group = self._kept.group or inputs
        groups, width = _ceil(inputs, group), _ceil(outputs * bits, WORD)
        codes, zeros = (
            self._sorted(_packed(weights, f"{name}.{part}", rows, width))[:, :outputs]
            for part, rows in (("qweight", inputs), ("qzeros", groups))
        )
        scale = weights.take(f"{name}.scales", (groups, outputs)).t().contiguous()
        path = weights.path_of(f"{name}.qweight")
        return _integers(codes.t(), scale, zeros.t(), group, bits, None, path)

    def _sorted(self, packed: Tensor) -> Tensor:
        codes = unpacked(packed, self._kept.bits).unflatten(1, (-1, len(AWQ_ORDER)))
        return codes[..., torch.tensor(AWQ_ORDER).argsort()].flatten(1)


class GPTQ(Format):
    """`qweight` [inputs / 8, outputs] in words along the inputs; `qzeros` [groups, outputs / 8] along the
    outputs; `scales` [groups, outputs]; `g_idx` [inputs], the group of each input."""

    def read(self, weights: Weights, name: str, outputs: int, inputs: int) -> Codes:
        kept = self._kept
        group = kept.group or inputs
        groups = _ceil(inputs, group)
        packed = _packed(weights, f"{name}.qweight", _ceil(inputs * kept.bits, WORD), outputs)
        codes = unpacked(packed.t(), kept.bits)[:, :inputs]
        packed = _packed(weights, f"{name}.qzeros", groups, _ceil(outputs * kept.bits, WORD))
        zeros = unpacked(packed, kept.bits)[:, :outputs].t()
        if kept.zeros_less_one:  # stored with wrap-around, so that 0 became the highest value
            zeros = (zeros.int() + 1) & ((1 << kept.bits) - 1)
        scale = weights.take(f"{name}.scales", (groups, outputs)).t().contiguous()
        index = None
        if f"{name}.g_idx" in weights:
            index = weights.take(f"{name}.g_idx", (inputs,), types=_INDICES)
        path = weights.path_of(f"{name}.qweight")
        return _integers(codes, scale, zeros, group, kept.bits, index, path)


class Float8OnLoad(Format):
    """Plain weights, rounded on load to float8_e4m3fn with a scale per output."""

    def __init__(self) -> None:
        """There is no configuration to keep."""

    def holds(self, weights: Weights, name: str) -> bool:
        return True

    def read(self, weights: Weights, name: str, outputs: int, inputs: int) -> Codes:
        plain = weights.take(f"{name}.weight", (outputs, inputs)).float()
        most = torch.finfo(E4M3).max
        scale = plain.abs().amax(1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny * most) / most
        return Codes((plain / scale).to(E4M3), scale, inputs)


def _packed(weights: Weights, name: str, *shape: int) -> Tensor:
    return weights.take(name, shape, types=(torch.int32,))


def unpacked(packed: Tensor, bits: int) -> Tensor:
    """int32 [rows, words] -> uint8 [rows, words * 32 / bits], the lowest bits of a word first."""
    each = WORD // bits
    codes = torch.empty(*packed.shape, each, dtype=torch.uint8)
    for index in range(each):
        codes[..., index] = (packed >> (bits * index)) & ((1 << bits) - 1)
    return codes.flatten(1)


def _integers(
    codes: Tensor, scale: Tensor, zeros: Tensor | int, group: int, bits: int, index: Tensor | None, path: str
) -> Codes:
    """codes uint8 [outputs, inputs]; zeros: the code of zero, a number or [outputs, groups]; index [inputs]:
    the group of each input."""
    order = None if index is None else _order(index.long(), group, path)
    if order is not None:
        codes = codes[:, order]
    lowest = 0
    if bits == 8:
        lowest = 128
        data = (codes.to(torch.int16) - lowest).to(torch.int8)
    elif codes.shape[1] % 2:
        raise ModelLoadError("an odd number of inputs in codes of 4 bits is not supported", where=path)
    else:
        data = nibbles(codes)
    middle = zeros.float() - lowest if isinstance(zeros, Tensor) else zeros - lowest
    offset = scale.float() * middle
    return Codes(data.contiguous(), scale, group, offset.contiguous() if bool(offset.any()) else None, order)


def _order(index: Tensor, group: int, path: str) -> Tensor | None:
    """The inputs sorted by group; None if they are already."""
    straight = torch.arange(len(index)) // group
    if torch.equal(index, straight):
        return None
    order = index.argsort(stable=True)
    if not torch.equal(index[order], straight):
        raise ModelLoadError(
            f"its groups of inputs do not all have the size of the configuration, {group}", where=path
        )
    return order


def _scales(weights: Weights, name: str, kept: Quantization, outputs: int, inputs: int) -> tuple[Tensor, int]:
    """The scales [outputs, groups], and the inputs per group."""
    shape = weights.shape_of(name)
    stored = weights.take(name, shape)
    try:
        return _spread(stored, kept, outputs, inputs)
    except ValueError as error:
        raise ModelLoadError(f"{name!r} {error}", where=weights.path_of(name)) from error


def _spread(values: Tensor, kept: Quantization, outputs: int, inputs: int) -> tuple[Tensor, int]:
    """Spread values per matrix, output, group or rectangle to [outputs, groups]; returns them and the inputs
    per group. Raises ValueError."""
    if kept.block is not None and values.ndim == 2:
        tall, wide = kept.block
        if values.shape == (_ceil(outputs, tall), _ceil(inputs, wide)):
            return values.repeat_interleave(tall, 0)[:outputs].contiguous(), wide
    elif values.numel() == 1:
        return values.reshape(1, 1).repeat(outputs, 1), inputs
    elif kept.group and values.shape == (outputs, _ceil(inputs, kept.group)):
        return values.contiguous(), kept.group
    elif values.numel() == outputs:
        return values.reshape(outputs, 1), inputs
    raise ValueError(f"has shape {list(values.shape)}, which does not fit [{outputs}, {inputs}]")


def _checked(weights: Weights, name: str, shape: Sequence[int], types: Sequence[torch.dtype]) -> Tensor:
    data = weights.take(name, shape, types=types)
    if data.dtype == E4M3 and bool(((data.view(torch.uint8) & 127) == 127).any()):
        raise ModelLoadError(f"{name!r} holds what is no number", where=weights.path_of(name))
    return data


def _ceil(size: int, part: int) -> int:
    return -(-size // part)
