"""Linear: y = x W^T + b, by the fastest way for the number of rows. Knows no model.

On CPUs in float32 the plain product is slow between about 4 and 64 rows; a second copy of W in oneDNN's
blocked layout is up to three times as fast there, and never slower above. One to three rows stay with the
plain product.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

PLAIN_UP_TO = 3
TRANSPOSED_FROM, TRANSPOSED_UP_TO = 8, 64
_ROWS_HINT = 64  # the layout chosen for it serves all row counts above PLAIN_UP_TO equally


class Linear:
    """`weight` [out, in], `bias` [out] or None. Calls take [rows, in] and give [rows, out]."""

    __slots__ = ("_packed", "_transpose", "bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, pack: bool = False) -> None:
        self.weight, self.bias = weight, bias
        on_cpu = weight.device.type == "cpu" and weight.dtype == torch.float32
        self._packed = _pack(weight) if pack and on_cpu else None
        self._transpose = on_cpu

    @property
    def packed(self) -> bool:
        return self._packed is not None

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        if rows > PLAIN_UP_TO:
            if self._packed is not None:
                return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
            if self._transpose and TRANSPOSED_FROM <= rows <= TRANSPOSED_UP_TO:
                y = torch.mm(self.weight, x.t()).t()
                return y if self.bias is None else y + self.bias
        return F.linear(x, self.weight, self.bias)


def can_pack() -> bool:
    """Whether this torch has the (private) packed product, and it gives the right numbers."""
    try:
        weight, x = torch.randn(32, 16), torch.randn(PLAIN_UP_TO + 2, 16)
        return bool(torch.allclose(Linear(weight, pack=True)(x), F.linear(x, weight), atol=1e-4))
    except (RuntimeError, AttributeError, TypeError):
        return False


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
