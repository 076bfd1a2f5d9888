"""Dense: matrices as they are, multiplied with in the fastest way for the number of rows.

On CPUs torch's plain product is slow: in float32 between about 4 and 64 rows, in bfloat16 for any number.
A copy of W in oneDNN's blocked layout is up to three times as fast there, and never slower above. For few
rows, where the memory is the limit, a kernel in C (torch, where there is none) reads W as it is: up to how
many rows that is faster depends on the processor, and `Dense.tune` measures it. In bfloat16 W is kept beside
its copy only where there is memory for both.

oneDNN, which computes packed products and those in bfloat16, makes a program for each number of rows and
keeps it, up to half a MiB for each: a server whose batches have all sizes would grow by hundreds of MiB. Its
products therefore come in few sizes, four from each power of two to the next, filled up with zeros.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.kernels.native.layers import FEW_ROWS, product_of
from runtime.layers.linear import Linear, LinearMethod, Projection
from runtime.layers.weights import Weights

log = logging.getLogger(__name__)

PACKABLE = (torch.float32, torch.bfloat16)
TRANSPOSED_FROM, TRANSPOSED_UP_TO = 8, 64
_ROWS_HINT = 64  # the layout chosen for it serves all row counts equally
_TIMED_BYTES = 1 << 26  # of weights: more than most caches hold, as in a pass
_TIMED_ROWS = tuple(1 << power for power in range(FEW_ROWS.bit_length()))
_TIMED_ROUNDS = 40
_TIMED_S = 0.1
_UNTIMED_ROWS = 16


class DenseLinear(Linear):
    """`weight` [outputs, inputs], `bias` [outputs] or None. `plain_up_to`: up to how many rows a packed one
    uses the plain weights."""

    __slots__ = ("_few", "_packed", "_plain", "_sized", "_transpose", "bias", "plain_up_to")

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, *, pack: bool = False, keep: bool = True
    ) -> None:
        """keep: the plain weights too, where there are packed ones; else they are made of these when they
        are asked for."""
        on_cpu = weight.device.type == "cpu"
        self._packed = _pack(weight) if pack and on_cpu and weight.dtype in PACKABLE else None
        self._plain = weight if keep or self._packed is None else None
        self._few = None if self._plain is None else product_of(self._plain)
        self.bias, self.plain_up_to = bias, 0
        self._transpose = on_cpu and weight.dtype == torch.float32
        self._sized = on_cpu and not self._transpose

    @property
    def weight(self) -> Tensor:
        if self._plain is None:
            assert self._packed is not None
            self._plain = self._packed.to_dense()
        return self._plain

    @property
    def dtype(self) -> torch.dtype:
        held = self._packed if self._plain is None else self._plain
        assert held is not None
        return held.dtype

    @property
    def both(self) -> bool:
        """Whether there are plain weights beside packed ones."""
        return self._packed is not None and self._plain is not None

    @property
    def packed(self) -> bool:
        return self._packed is not None

    @property
    def few_rows(self) -> int:
        """Up to how many rows of its type it is the library's kernel that reads `weight`; 0: it does not."""
        if self._few is None:
            return 0
        return _UNTIMED_ROWS if self._packed is None else self.plain_up_to

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        if self._packed is not None and rows > self.plain_up_to:
            return self._sized_product(x, self._packed)
        if self._few is not None and rows <= self.few_rows and x.dtype == self.dtype:
            return self._few(x, self.bias)
        if self._sized:
            return self._sized_product(x, None)
        if self._transpose and TRANSPOSED_FROM <= rows <= TRANSPOSED_UP_TO:
            y = torch.mm(self.weight, x.t()).t()
            return y if self.bias is None else y + self.bias
        return F.linear(x, self.weight, self.bias)

    def some(self, x: Tensor, outputs: Tensor) -> Tensor:
        weight = self.weight.index_select(0, outputs)
        bias = None if self.bias is None else self.bias.index_select(0, outputs)
        if not self._sized:
            return F.linear(x, weight, bias)
        # Every number of outputs is another size (see above): computed in float32, by no program of oneDNN's.
        made = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
        return made.to(self.weight.dtype)

    def _sized_product(self, x: Tensor, packed: Tensor | None) -> Tensor:
        rows = x.shape[0]
        if more := size_of(rows) - rows:
            x = F.pad(x, (0, 0, 0, more))
        if packed is None:
            return F.linear(x, self.weight, self.bias)[:rows]
        made: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, self.bias, "none", [], "")
        return made[:rows]


class Dense(LinearMethod):
    """Projections of one input are one matrix, one above the other. `pack`: keep a packed copy on the CPU;
    `timed`: let tune() choose the weights for passes of few rows, else they use the packed ones too. `both`:
    where it is in bfloat16, too, keep the plain ones beside it."""

    def __init__(self, *, pack: bool = False, timed: bool = False, both: bool = False) -> None:
        self._pack, self._timed, self._both = pack, timed, both
        self._packed: list[DenseLinear] = []

    def load(
        self,
        weights: Weights,
        parts: Sequence[Projection],
        inputs: int,
        *,
        bias: bool,
        own: range | None = None,
    ) -> DenseLinear:
        return self.of(*read(weights, parts, inputs, bias=bias, own=own))

    def shared(self, table: Tensor) -> DenseLinear:
        return self._keep(DenseLinear(table, pack=self._pack))

    def of(self, weight: Tensor, bias: Tensor | None) -> DenseLinear:
        """Over a matrix that is there already."""
        keep = self._both or weight.dtype != torch.bfloat16
        return self._keep(DenseLinear(weight, bias, pack=self._pack, keep=keep))

    def _keep(self, linear: DenseLinear) -> DenseLinear:
        if linear.both:
            self._packed.append(linear)
        return linear

    def tune(self) -> None:
        """Takes some 0.1 to 0.3 s, more for matrices that are larger than 64 MiB."""
        if self._timed and self._packed:
            up_to, (plain, packed) = time_rows(self._packed)
            log.info(
                "passes of up to %d rows use the plain weights, others packed ones (timed with one row: "
                "%.2f ms plain, %.2f packed)",
                up_to,
                1e3 * plain,
                1e3 * packed,
            )


def read(
    weights: Weights, parts: Sequence[Projection], inputs: int, *, bias: bool, own: range | None = None
) -> tuple[Tensor, Tensor | None]:
    """What LinearMethod.load() is asked for as one matrix [outputs, inputs] and its bias [outputs]. Raises
    ModelLoadError."""
    outputs = [part.computed for part in parts]
    columns = inputs if own is None else len(own)
    weight = torch.empty(sum(outputs), columns, dtype=weights.dtype, device=weights.device)
    for part, target in zip(parts, weight.split(outputs)):
        target.copy_(weights.take(f"{part.name}.weight", (part.outputs, inputs), part.own, own))
    biases = [weights.tensor(f"{part.name}.bias", (part.outputs,), part.own) for part in parts if bias]
    return weight, torch.cat(biases) if bias else None


def time_rows(linears: Sequence[DenseLinear]) -> tuple[int, tuple[float, float]]:
    """Measure whether few rows are faster with plain or with packed weights, on some of `linears` (in the
    order in which a pass uses them; all packed, of one type), and set it for all of them. Up to how many rows
    the plain ones are; the seconds of one row's products with plain and with packed weights."""
    some, size = [], 0
    for linear in linears:
        some.append(linear)
        size += linear.weight.nbytes
        if size >= _TIMED_BYTES:
            break
    up_to, one_row = 0, (0.0, 0.0)
    for rows in _TIMED_ROWS:
        plain, packed = _least_s(some, rows)
        if rows == 1:
            one_row = plain, packed
        if plain > packed:
            break
        up_to = rows
    for linear in linears:
        linear.plain_up_to = up_to
    return up_to, one_row


def _least_s(linears: Sequence[DenseLinear], rows: int) -> tuple[float, float]:
    """Seconds of `rows` rows' products with plain and with packed weights: the least of a few rounds in turn,
    and the thread's own time, so that other work on the machine counts as little as can be."""
    given = [linear.weight.new_ones(rows, linear.weight.shape[1]) for linear in linears]
    least = {rows: float("inf"), 0: float("inf")}
    begin = time.thread_time()
    for number in range(_TIMED_ROUNDS):
        for up_to in least:
            for linear in linears:
                linear.plain_up_to = up_to
            start = time.thread_time()
            for linear, x in zip(linears, given, strict=True):
                linear(x)
            least[up_to] = min(least[up_to], time.thread_time() - start)
        if number and time.thread_time() - begin > _TIMED_S / len(_TIMED_ROWS):
            break
    return least[rows], least[0]


def size_of(rows: int) -> int:
    """How many rows a product of `rows` rows is computed with: as many, or less than a quarter more."""
    step = max(1, (1 << max(0, (rows - 1).bit_length() - 1)) // 4)
    return -(-rows // step) * step


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch has the (private) packed product for it on this processor, and it gives the right
    numbers."""
    if dtype not in PACKABLE:
        return False
    try:
        if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        weight, x = torch.randn(32, 16), torch.randn(FEW_ROWS + 2, 16)
        made = DenseLinear(weight.to(dtype), pack=True)(x.to(dtype)).float()
        return bool(torch.allclose(made, F.linear(x, weight), atol=1e-4 if dtype == torch.float32 else 0.2))
    except (RuntimeError, AttributeError, TypeError):
        return False


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
