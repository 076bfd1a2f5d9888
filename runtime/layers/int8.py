"""Int8 linear layers on the CPU (w8a8). A matrix is rounded once, to 255 levels of the largest weight of each
output; an input when it is multiplied, to levels of the largest number of its row, so no row's result depends
on the rest of the batch. Integer products and sums are exact.

The library in C computes the products; on processors with AVX-512 VNNI but no AMX, and without a library,
FBGEMM does. Either keeps weights in a layout of its own, one byte each.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.kernels.native.library import TYPES
from runtime.kernels.native.products import FEW_ROWS, product_of
from runtime.layers.dense import read
from runtime.layers.linear import Linear, LinearMethod, Parts
from runtime.layers.weights import Weights
from runtime.protocol.errors import ModelLoadError

WEIGHT_LEVELS = 127
_TINY = 1e-30  # stands for the largest number of a row of zeros


class Int8Linear(Linear):
    """Built from `weight` [outputs, inputs] of any floating-point dtype, which is not kept, and `bias`
    [outputs] or None, which is not rounded. Inputs may have any floating-point dtype; the result has the
    same."""

    __slots__ = ("_packed", "_rows", "bias", "inputs", "levels", "product", "scale")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, levels: int | None = None) -> None:
        """levels: FBGEMM rounds inputs to this many levels on either side of zero. None: the library
        multiplies, or FBGEMM with as many levels as this processor computes without overflow."""
        self.bias = None if bias is None else bias.float()
        wide = weight.float()
        self.inputs = weight.shape[1]
        self.scale = wide.abs().amax(1).clamp_(min=_TINY) / WEIGHT_LEVELS
        self._rows: Tensor | None = None
        self.product = None
        if levels is None:  # None also if FBGEMM's is faster
            rounded = (wide / self.scale[:, None]).round_().clamp_(-WEIGHT_LEVELS, WEIGHT_LEVELS)
            self.product = product_of(rounded.to(torch.int8), self.scale, panels=not _has_vnni())
        self.levels = levels or (input_levels() if self.product is None else WEIGHT_LEVELS)
        self._packed = None if self.product is not None else _pack(wide, self.scale)

    @property
    def few_rows(self) -> int:
        """The largest number of rows for which the library may compute the whole layer; 0: it has no
        kernel."""
        return 0 if self.product is None else FEW_ROWS

    @property
    def weight(self) -> Tensor:
        """int8 [outputs, inputs]. FBGEMM's is unpacked and kept on first use: few matrices need it."""
        if self.product is not None:
            return self.product.weight()
        if self._rows is None:
            self._rows = torch.ops.quantized.linear_unpack(self._packed)[0].int_repr()
        return self._rows

    def __call__(self, x: Tensor) -> Tensor:
        if self.product is not None and x.dtype in TYPES:
            return self.product(x, self.bias)
        wide = x.float()
        if self.product is not None:
            return self.product(wide, self.bias).to(x.dtype)
        most = _largest(wide)
        levels = self.levels
        y = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            wide / most, 1.0 / levels, levels + 1, self._packed
        ).mul_(most)
        if self.bias is not None:
            y += self.bias
        return y.to(x.dtype)

    def some(self, x: Tensor, outputs: Tensor) -> Tensor:
        """The same numbers, up to the rounding of the last digits."""
        wide = x.float()
        most = _largest(wide)
        product = self.product
        weight = self.weight.index_select(0, outputs) if product is None else product.weight(outputs)
        y = F.linear((wide / most).mul_(self.levels).round_(), weight.float())
        y *= most / self.levels * self.scale.index_select(0, outputs)
        if self.bias is not None:
            y += self.bias.index_select(0, outputs)
        return y.to(x.dtype)


class Int8(LinearMethod):
    """Rounds what Dense would load. If ranks share the inputs, each rank rounds its part to levels of its
    own."""

    def __init__(self) -> None:
        """Raises ModelLoadError if this torch or this processor cannot compute it."""
        if not can_multiply():
            raise ModelLoadError(
                "w8a8_int8 needs a processor with AVX2, and a C compiler or a torch with FBGEMM",
                where="quantization",
                hint="leave it out, or use dtype='bfloat16'",
            )

    def load(
        self, weights: Weights, parts: Parts, inputs: int, *, bias: bool, local: range | None = None
    ) -> Int8Linear:
        return self.of(*read(weights, parts, inputs, bias=bias, local=local))

    def of(self, weight: Tensor, bias: Tensor | None) -> Int8Linear:
        """A linear layer of a loaded matrix."""
        _check_device(weight.device)
        return Int8Linear(weight, bias)

    def shared(self, table: Tensor) -> Int8Linear:
        """A linear layer beside the table, which stays unchanged."""
        _check_device(table.device)
        return Int8Linear(table)


def _check_device(device: torch.device) -> None:
    if device.type != "cpu":
        raise ModelLoadError(
            f"w8a8_int8 is computed on the CPU, the model is on {device}",
            where="quantization",
            hint="use quantization='fp8', or device='cpu'",
        )


def _pack(wide: Tensor, scale: Tensor) -> Any:
    zeros = torch.zeros(len(wide), dtype=torch.int64)
    with warnings.catch_warnings():  # deprecated, but there is no other way to FBGEMM's products
        warnings.simplefilter("ignore", UserWarning)
        rounded = torch.quantize_per_channel(wide, scale.double(), zeros, 0, torch.qint8)
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"
    try:
        return torch.ops.quantized.linear_prepack(rounded, None)
    finally:
        torch.backends.quantized.engine = before


def _largest(x: Tensor) -> Tensor:
    """[rows, inputs] -> [rows, 1]: the largest absolute value of each row."""
    return x.abs().amax(-1, keepdim=True).clamp_(min=_TINY)


def input_levels() -> int:
    """The levels that FBGEMM rounds inputs to. Without VNNI it adds two 8-bit products in 16 bits, so inputs
    get 7 bits, or the sum would saturate."""
    return 127 if _has_vnni() else 63


def _has_vnni() -> bool:
    """Whether the processor has VNNI with AVX-512's vectors, as FBGEMM needs it."""
    supported = getattr(torch.cpu, "_is_vnni_supported", None)
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and supported is not None and bool(supported())


def can_multiply() -> bool:
    """Whether the library, or this torch's (private) product, gives the right numbers on this processor."""
    try:
        x, weight = torch.randn(3, 64), torch.randn(40, 64)
        linear = Int8Linear(weight)
        near = torch.allclose(linear(x), F.linear(x, weight), atol=1.0)
        return near and torch.allclose(linear(x), linear.some(x, torch.arange(40)), atol=1e-3)
    except (RuntimeError, AttributeError, TypeError):
        return False
