"""Products with quantised matrices, and the method that loads them. Weights are dequantised for a range of
outputs at a time, multiplied and dropped; `expand` dequantises when the model is loaded, which is faster
if there is memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.kernels.table import kernel
from runtime.layers.dense import Dense
from runtime.layers.int8 import Int8
from runtime.layers.linear import Linear, LinearMethod, Parts, Projection
from runtime.layers.quantised.codes import Codes, stacked
from runtime.layers.quantised.formats import Format
from runtime.layers.weights import Weights
from runtime.protocol.errors import ModelLoadError

KERNEL_ROWS = 64
"""On GPUs a kernel that dequantises while it multiplies is used for at most this many rows."""
_AT_ONCE = {"cpu": 1 << 19}
"""Numbers dequantised at once; on CPUs about as many as caches hold (the fastest of 2^16 to 2^19)."""
_AT_ONCE_ELSEWHERE = 1 << 26


class QuantisedLinear(Linear):
    """The outputs of `parts`, concatenated; bias [outputs] or None."""

    __slots__ = ("_bias", "_outputs", "_parts")

    def __init__(self, parts: Sequence[Codes], bias: Tensor | None) -> None:
        self._parts, self._bias = stacked(parts), bias
        self._outputs = sum(part.outputs for part in self._parts)

    @property
    def nbytes(self) -> int:
        """Bytes of the codes, scales and offsets."""
        return sum(part.nbytes for part in self._parts)

    def __call__(self, x: Tensor) -> Tensor:
        parts = [
            _product(x if part.order is None else x.index_select(1, part.order), part) for part in self._parts
        ]
        y = (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).to(x.dtype)
        return y if self._bias is None else y.add_(self._bias)

    def some(self, x: Tensor, outputs: Tensor) -> Tensor:
        y = x.new_empty(x.shape[0], len(outputs))
        first = 0
        for part in self._parts:
            of = outputs - first
            [here] = ((of >= 0) & (of < part.outputs)).nonzero(as_tuple=True)
            inputs = _as_computed(x if part.order is None else x.index_select(1, part.order))
            weight = part.numbers(of[here]).to(inputs.dtype)
            y.index_copy_(1, here, F.linear(inputs, weight).to(y.dtype))
            first += part.outputs
        return y if self._bias is None else y.add_(self._bias.index_select(0, outputs))


def _product(x: Tensor, part: Codes) -> Tensor:
    """x [rows, inputs], in the order of the columns -> [rows, outputs], in the dtype of the computation."""
    if x.shape[0] <= KERNEL_ROWS and (fused := kernel("codes_matmul", x.device)) is not None:
        out: Tensor = fused(x.contiguous(), part.data, part.scale, part.offset, part.group)
        return out
    inputs = _as_computed(x)
    y = inputs.new_empty(x.shape[0], part.outputs)
    # In float32 it is cheaper to apply one scale per output to the results, and to subtract the offsets as a
    # product with the groups' sums.
    exact = inputs.dtype == torch.float32
    apart, flat = exact and part.offset is not None, exact and part.scale.shape[1] == 1
    step = max(1, _AT_ONCE.get(x.device.type, _AT_ONCE_ELSEWHERE) // part.inputs)
    for first in range(0, part.outputs, step):
        weight = part.numbers(slice(first, first + step), scale=not flat, offset=not apart)
        y[:, first : first + step] = F.linear(inputs, weight.to(inputs.dtype))
    if flat:
        y *= part.scale.float().t()
    if part.offset is not None and apart:
        y -= F.linear(part.sums(inputs), part.offset)
    return y


def _as_computed(x: Tensor) -> Tensor:
    """In float32 on CPUs, the dtype of dequantised numbers. bfloat16 would cost a conversion, and a oneDNN
    program for each number of rows."""
    return x.float() if x.device.type == "cpu" else x


class Quantised(LinearMethod):
    """Matrices that `format` holds are read as codes, others by `other`. plain: names of matrices that are
    never quantised. expand: keep `other`'s matrices of the dequantised numbers instead of the codes."""

    def __init__(
        self, format: Format, other: Dense | Int8, *, plain: Sequence[str] = (), expand: bool
    ) -> None:
        self._format, self._other, self._plain, self._expand = format, other, plain, expand

    def load(
        self, weights: Weights, parts: Parts, inputs: int, *, bias: bool, local: range | None = None
    ) -> Linear:
        in_codes = [part.name not in self._plain and self._format.holds(weights, part.name) for part in parts]
        if not any(in_codes):
            return self._other.load(weights, parts, inputs, bias=bias, local=local)
        biases = [_bias(weights, part, bias) for part in parts]
        added = torch.cat([one for one in biases if one is not None]) if bias else None
        mixed = not all(in_codes)  # dequantised: one product is worth more than the memory
        if not mixed and not self._expand:
            return QuantisedLinear([self._codes(weights, part, inputs, local) for part in parts], added)
        outputs = [part.computed for part in parts]
        columns = inputs if local is None else len(local)
        weight = torch.empty(sum(outputs), columns, dtype=weights.dtype, device=weights.device)
        for part, target, coded in zip(parts, weight.split(outputs), in_codes):
            if coded:
                target.copy_(self._codes(weights, part, inputs, local).dense())
            else:
                target.copy_(weights.take(f"{part.name}.weight", (part.outputs, inputs), part.local, local))
        return self._other.of(weight, added)

    def shared(self, table: Tensor) -> Linear:
        return self._other.shared(table)

    def tune(self) -> None:
        self._other.tune()

    def _codes(self, weights: Weights, part: Projection, inputs: int, local: range | None) -> Codes:
        whole = self._format.read(weights, part.name, part.outputs, inputs)
        try:
            return whole.rows(part.local).columns(local).to(weights.device)
        except ValueError as error:
            raise ModelLoadError(
                f"{part.name!r} cannot be shared out by its inputs: {error}",
                where=str(weights.path_of(part.name)),
                hint="use tp_size 1 for this checkpoint",
            ) from error


def _bias(weights: Weights, part: Projection, has_bias: bool) -> Tensor | None:
    """The bias, if the model has one. Some quantisers write a bias of zeros for matrices without one."""
    name = f"{part.name}.bias"
    if has_bias:
        return weights.tensor(name, (part.outputs,), part.local)
    # One that was already read is added elsewhere: to the sum of the ranks' products.
    if name in weights and not weights.taken(name) and weights.take(name, (part.outputs,)).any():
        raise ModelLoadError(
            f"{name!r} is a bias that the model has no place for", where=weights.path_of(name)
        )
    return None
