"""Dense matrices, multiplied in the fastest way for the number of rows.

On CPUs torch's plain product is slow: in float32 between about 4 and 64 rows, in bfloat16 for any number. The
library's product (runtime/kernels/native) keeps a layout of its own instead of W; without the library,
oneDNN's blocked layout is kept. In bfloat16 some processors have instructions that oneDNN uses: there both
are kept, if there is memory, and `Dense.tune` measures up to how many rows each one is faster.

oneDNN compiles a program for each number of rows and keeps it, up to half a MiB each. So its products come in
few sizes, four from each power of two to the next, padded with zeros.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.kernels.native.products import FEW_ROWS, product_of
from runtime.kernels.table import kernel
from runtime.layers.linear import Linear, LinearMethod, Parts
from runtime.layers.weights import Weights

log = logging.getLogger(__name__)

PACKABLE = (torch.float32, torch.bfloat16)
TRANSPOSED_FROM, TRANSPOSED_UP_TO = 8, 64
_ROWS_HINT = 64  # the layout chosen for it suits all row counts equally
_TIMED_BYTES = 1 << 26  # of weights: larger than most caches, as in a pass
_TIMED_ROWS = (*(1 << power for power in range(FEW_ROWS.bit_length())), 4 * FEW_ROWS)
_TIMED_ROUNDS = 40
_TIMED_S = 0.1


class DenseLinear(Linear):
    """`weight` [outputs, inputs], `bias` [outputs] or None. product: the library's, or None. product_up_to:
    the largest number of rows that uses it if there are also weights packed by oneDNN."""

    __slots__ = (
        "_gemv", "_packed", "_plain", "_sized", "_transpose", "bias", "dtype", "inputs", "product",
        "product_up_to",
    )  # fmt: skip

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, *, pack: bool = False, both: bool = False
    ) -> None:
        """pack: into a layout for this CPU, kept instead of `weight`. both: in bfloat16, if there are two
        such layouts, into both."""
        on_cpu = weight.device.type == "cpu"
        self.bias, self.dtype, self.inputs = bias, weight.dtype, weight.shape[1]
        self.product = product_of(weight) if pack and on_cpu else None
        packs = pack and on_cpu and _is_packable(weight.dtype)
        if packs and self.product is not None:
            packs = weight.dtype == torch.bfloat16 and (both or not self.product.in_panels)
            if packs and not both:  # AMX's product is for few rows alone
                self.product = None
        self._packed = _pack(weight) if packs else None
        self._plain = weight if self.product is None and self._packed is None else None
        self.product_up_to = 0
        self._transpose = on_cpu and weight.dtype == torch.float32
        self._sized = on_cpu and not self._transpose
        self._gemv = None if on_cpu or weight.stride(1) != 1 else kernel("gemv", weight.device)

    @property
    def weight(self) -> Tensor:
        """The matrix; unpacked anew at each call if it is packed."""
        if self._plain is not None:
            return self._plain
        if self.product is not None:
            return self.product.weight()
        assert self._packed is not None
        plain: Tensor = self._packed.to_dense()
        return plain

    @property
    def both(self) -> bool:
        """Whether it keeps both the library's weights and oneDNN's."""
        return self._packed is not None and self.product is not None

    @property
    def packed(self) -> bool:
        return self._plain is None

    @property
    def few_rows(self) -> int:
        """The largest number of rows, at most FEW_ROWS, that the library computes; 0 if none."""
        if self.product is None:
            return 0
        return FEW_ROWS if self._packed is None else min(FEW_ROWS, self.product_up_to)

    def use_product(self, rows: int) -> None:
        """If there are both layouts: use the library's for up to `rows` rows. If that is the largest number
        timed, use it for all and drop oneDNN's copy."""
        self.product_up_to = rows
        if rows == _TIMED_ROWS[-1] and self.product is not None and self.product.in_panels:
            self._packed = None

    def __call__(self, x: Tensor) -> Tensor:
        rows, product, packed = x.shape[0], self.product, self._packed
        if product is not None and (packed is None or rows <= self.product_up_to) and x.dtype == self.dtype:
            return product(x, self.bias)
        if packed is not None or self._sized:
            return self._sized_product(x, packed)
        if self._transpose and TRANSPOSED_FROM <= rows <= TRANSPOSED_UP_TO:
            y = torch.mm(self.weight, x.t()).t()
            return y if self.bias is None else y + self.bias
        if self._gemv is not None and x.shape[:-1] == (1,) and x.stride(-1) == 1 and x.dtype == self.dtype:
            out: Tensor = self._gemv(x, self._plain, self.bias)
            return out
        return F.linear(x, self.weight, self.bias)

    def some(self, x: Tensor, outputs: Tensor) -> Tensor:
        product = self.product
        weight = self.weight.index_select(0, outputs) if product is None else product.weight(outputs)
        bias = None if self.bias is None else self.bias.index_select(0, outputs)
        if not self._sized:
            return F.linear(x, weight, bias)
        # Each number of outputs is a new size (see above): float32 needs no program of oneDNN's.
        y = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
        return y.to(self.dtype)

    def _sized_product(self, x: Tensor, packed: Tensor | None) -> Tensor:
        rows = x.shape[0]
        if more := size_of(rows) - rows:
            x = F.pad(x, (0, 0, 0, more))
        if packed is None:
            return F.linear(x, self.weight, self.bias)[:rows]
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, self.bias, "none", [], "")
        return y[:rows]


class Dense(LinearMethod):
    """Projections of one input are one matrix, stacked by outputs. `pack`, `both`: see DenseLinear."""

    def __init__(self, *, pack: bool = False, both: bool = False) -> None:
        self._pack, self._both = pack, both
        self._timed: list[DenseLinear] = []

    def load(
        self, weights: Weights, parts: Parts, inputs: int, *, bias: bool, local: range | None = None
    ) -> DenseLinear:
        return self.of(*read(weights, parts, inputs, bias=bias, local=local))

    def shared(self, table: Tensor) -> DenseLinear:
        return self.of(table, None)

    def of(self, weight: Tensor, bias: Tensor | None) -> DenseLinear:
        """A linear layer of a loaded matrix."""
        linear = DenseLinear(weight, bias, pack=self._pack, both=self._both)
        if linear.both:
            self._timed.append(linear)
        return linear

    def tune(self) -> None:
        """Measure which layout is faster, and use it. Takes 0.1 to 0.3 s, more for matrices larger than 64
        MiB; nothing if there is only one layout."""
        if self._timed:
            up_to, (ours, packed) = time_rows(self._timed)
            log.info(
                "passes of up to %d rows use the library's product, others oneDNN's (timed with one row: "
                "%.2f ms, %.2f packed)",
                up_to,
                1e3 * ours,
                1e3 * packed,
            )


def read(
    weights: Weights, parts: Parts, inputs: int, *, bias: bool, local: range | None = None
) -> tuple[Tensor, Tensor | None]:
    """Read the projections of LinearMethod.load() as one matrix [outputs, inputs] and its bias [outputs].
    Raises ModelLoadError."""
    outputs = [part.computed for part in parts]
    columns = inputs if local is None else len(local)
    weight = torch.empty(sum(outputs), columns, dtype=weights.dtype, device=weights.device)
    for part, target in zip(parts, weight.split(outputs)):
        target.copy_(weights.take(f"{part.name}.weight", (part.outputs, inputs), part.local, local))
    biases = [weights.tensor(f"{part.name}.bias", (part.outputs,), part.local) for part in parts if bias]
    return weight, torch.cat(biases) if bias else None


def time_rows(linears: Sequence[DenseLinear]) -> tuple[int, tuple[float, float]]:
    """Measure up to how many rows the library's weights are faster than oneDNN's, and set it for all
    `linears` (in the order in which a pass uses them; all with both layouts, of one dtype). Only some of them
    are timed. Returns that number of rows, and the seconds of one row's products with the library and with
    oneDNN."""
    some, size = [], 0
    for linear in linears:
        some.append(linear)
        assert linear.product is not None
        size += linear.product.outputs * linear.inputs * linear.dtype.itemsize
        if size >= _TIMED_BYTES:
            break
    up_to, one_row = 0, (0.0, 0.0)
    for rows in _TIMED_ROWS:
        ours, packed = _least_s(some, rows)
        if rows == 1:
            one_row = ours, packed
        if ours > packed:
            break
        up_to = rows
    for linear in linears:
        linear.use_product(up_to)
    return up_to, one_row


def _least_s(linears: Sequence[DenseLinear], rows: int) -> tuple[float, float]:
    """Seconds of the products of `rows` rows with the library's and with oneDNN's weights. Uses the thread's
    own CPU time and the minimum over alternating rounds, so that other load on the machine matters little."""
    inputs = [torch.ones(rows, linear.inputs, dtype=linear.dtype) for linear in linears]
    least = {rows: float("inf"), 0: float("inf")}
    begin = time.thread_time()
    for number in range(_TIMED_ROUNDS):
        for up_to in least:
            for linear in linears:
                linear.product_up_to = up_to
            start = time.thread_time()
            for linear, x in zip(linears, inputs, strict=True):
                linear(x)
            least[up_to] = min(least[up_to], time.thread_time() - start)
        if number and time.thread_time() - begin > _TIMED_S / len(_TIMED_ROWS):
            break
    return least[rows], least[0]


def size_of(rows: int) -> int:
    """The padded number of rows for a product of `rows` rows: less than a quarter more."""
    step = max(1, (1 << max(0, (rows - 1).bit_length() - 1)) // 4)
    return -(-rows // step) * step


def can_pack(dtype: torch.dtype) -> bool:
    """Whether matrices of this dtype can be packed here, and products are right."""
    if dtype not in PACKABLE:
        return False
    try:
        weight, x = torch.randn(32, 16), torch.randn(FEW_ROWS + 2, 16)
        linear = DenseLinear(weight.to(dtype), pack=True)
        y = linear(x.to(dtype)).float()
        near = torch.allclose(y, F.linear(x, weight), atol=1e-4 if dtype == torch.float32 else 0.2)
        return linear.packed and near
    except (RuntimeError, AttributeError, TypeError):
        return False


def _is_packable(dtype: torch.dtype) -> bool:
    """Whether oneDNN can pack them, by torch's private operations."""
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype in PACKABLE


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
