"""Products with matrices in the library: in panels, or unchanged on processors with AMX (see panels.h and
tiles.h in the source). Knows matrices; not who loads them."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.kernels.native import layers
from runtime.kernels.native.library import TYPES, Library, library
from runtime.kernels.native.panels import from_panels, to_panels
from runtime.kernels.native.tuning import tune

FEW_ROWS = 64
"""Passes of at most this many tokens compute all layers in one call of the library. In larger passes the cost
of a call does not matter."""
INTEGER_STEP = 16  # the inputs of a product with integers must be a multiple of this


class Product:
    """x [rows, inputs] -> x W^T + bias, for a matrix W [outputs, inputs] of the library's dtypes, or of int8
    with a `scale` [outputs] per row. With int8 each row of x is rounded to 127 levels on either side of zero.

    A row's result does not depend on the other rows. address: of the data that the library reads. in_panels:
    whether W is stored in panels; otherwise it is W itself.
    """

    __slots__ = (
        "_call", "_held", "_large", "_parallel", "_scale", "address", "in_panels", "inputs", "outputs",
    )  # fmt: skip

    def __init__(self, native: Library, weight: Tensor, scale: Tensor | None) -> None:
        self.outputs, self.inputs = weight.shape
        self.in_panels = not native.reads_rows(self.outputs, self.inputs, weight.dtype.itemsize)
        if self.in_panels:
            tune(native, weight.dtype.itemsize)
        self._held = to_panels(weight) if self.in_panels else weight.contiguous()
        self._scale = None if scale is None else scale.float().contiguous()
        self._call, self._parallel = native.product, native.parallel
        self._large = weight.numel() >= layers.SHARED
        self.address = self._held.data_ptr()

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x, the bias and the result have W's dtype. With int8, x and the result have any dtype of the
        library and the bias is float32."""
        inputs, rows = x.contiguous(), x.shape[0]
        out = inputs.new_empty(rows, self.outputs)
        scale, added = self._scale, None if bias is None else bias.data_ptr()
        if not self._call(
            inputs.data_ptr(), self.address, None if scale is None else scale.data_ptr(), added,
            out.data_ptr(), rows, self.outputs, self.inputs, inputs.dtype == torch.bfloat16, self._parallel,
            torch.get_num_threads() if self._large else 1,
        ):  # fmt: skip
            raise MemoryError(f"a product of {rows} rows of {self.inputs} numbers")
        return out

    def weight(self, outputs: Tensor | None = None) -> Tensor:
        """The given rows of W (int64), or all of W, in its dtype."""
        if self.in_panels:
            return from_panels(self._held, torch.arange(self.outputs) if outputs is None else outputs)
        return self._held if outputs is None else self._held.index_select(0, outputs)


def product_of(weight: Tensor, scale: Tensor | None = None, *, panels: bool = True) -> Product | None:
    """A Product; None if there is no library, or it does not support the matrix, or not without panels."""
    native = library() if weight.device.type == "cpu" else None
    if native is None or not weight.numel():
        return None
    if not panels and not native.reads_rows(*weight.shape, weight.dtype.itemsize):
        return None
    if scale is None:
        return Product(native, weight, None) if weight.dtype in TYPES else None
    return None if weight.shape[1] % INTEGER_STEP else Product(native, weight, scale)
