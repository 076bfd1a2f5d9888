"""Linear: y = x W^T + b, by the fastest way for the number of rows. Knows no model.

On CPUs in float32 the plain product is slow between about 4 and 64 rows; a second copy of W in oneDNN's
blocked layout is up to three times as fast there, and never slower above. One to three rows stay with the
plain product.

oneDNN, which computes packed products and those in bfloat16, makes a program for each number of rows and
keeps it, up to half a MiB for each: a server whose batches have all sizes would grow by hundreds of MiB. Its
products therefore come in few sizes, four from each power of two to the next, filled up with zeros.
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

    __slots__ = ("_packed", "_sized", "_transpose", "bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, pack: bool = False) -> None:
        self.weight, self.bias = weight, bias
        on_cpu = weight.device.type == "cpu" and weight.dtype == torch.float32
        self._packed = _pack(weight) if pack and on_cpu else None
        self._transpose = on_cpu
        self._sized = weight.device.type == "cpu" and not on_cpu

    @property
    def packed(self) -> bool:
        return self._packed is not None

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        if rows > PLAIN_UP_TO:
            if self._packed is not None or self._sized:
                return self._sized_product(x)
            if self._transpose and TRANSPOSED_FROM <= rows <= TRANSPOSED_UP_TO:
                y = torch.mm(self.weight, x.t()).t()
                return y if self.bias is None else y + self.bias
        return F.linear(x, self.weight, self.bias)

    def some(self, x: Tensor, outputs: Tensor) -> Tensor:
        """[rows, in] -> [rows, len(outputs)]: those outputs alone, in their order (int64)."""
        weight = self.weight.index_select(0, outputs)
        bias = None if self.bias is None else self.bias.index_select(0, outputs)
        if not self._sized:
            return F.linear(x, weight, bias)
        # Every number of outputs is another size (see above): computed in float32, by no program of oneDNN's.
        made = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
        return made.to(self.weight.dtype)

    def _sized_product(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        if more := size_of(rows) - rows:
            x = F.pad(x, (0, 0, 0, more))
        if self._packed is None:
            return F.linear(x, self.weight, self.bias)[:rows]
        made: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return made[:rows]


def size_of(rows: int) -> int:
    """How many rows a product of `rows` rows is computed with: as many, or less than a quarter more."""
    step = max(1, (1 << max(0, (rows - 1).bit_length() - 1)) // 4)
    return -(-rows // step) * step


def can_pack() -> bool:
    """Whether this torch has the (private) packed product, and it gives the right numbers."""
    try:
        weight, x = torch.randn(32, 16), torch.randn(PLAIN_UP_TO + 2, 16)
        return bool(torch.allclose(Linear(weight, pack=True)(x), F.linear(x, weight), atol=1e-4))
    except (RuntimeError, AttributeError, TypeError):
        return False


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
