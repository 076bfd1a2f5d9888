"""Matrix product with weights in 4-bit or 8-bit codes, dequantised inside the kernel: only the codes are read
from memory. It is for few rows; with many rows it is faster to dequantise once and use a plain product."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.device import INTERPRETED, stages

COLUMNS = 1 << 15  # at once keep a large GPU's memory busy
_INT8, _HALVES, _FLOAT8 = 0, 1, 2
_KINDS = {torch.int8: _INT8, torch.uint8: _HALVES, torch.float8_e4m3fn: _FLOAT8}


def codes_matmul(x: Tensor, data: Tensor, scale: Tensor, offset: Tensor | None, group: int) -> Tensor:
    """x [rows, inputs], rows contiguous -> [rows, outputs].

    The weight at (output, input) is code * scale - offset. scale and offset are [outputs, groups], with one
    entry for every `group` inputs; offset is float32, or None for zero. data holds the codes: int8 or
    float8_e4m3fn [outputs, inputs], or uint8 [outputs, inputs / 2] with the first half of the inputs in the
    lower four bits. All are contiguous.
    """
    rows, (outputs, width) = x.shape[0], data.shape
    kind = _KINDS[data.dtype]
    block, columns, deep, most, alike = _launch(rows, outputs, width, group, kind == _HALVES, x.dtype)
    loads = block * deep * x.element_size() * (2 if kind == _HALVES else 1) + deep * columns
    splits, stretch = _splits(outputs * triton.cdiv(rows, block), width, deep)
    codes = data.view(torch.uint8) if kind == _FLOAT8 else data
    sums = None  # of each tile's inputs
    if alike and offset is not None:
        sums = x.unflatten(1, (-1, deep)).sum(-1, dtype=torch.float32)
    kept = x.dtype if splits == 1 else torch.float32
    partial = torch.empty(splits, rows, outputs, dtype=kept, device=x.device)
    _codes_matmul[(triton.cdiv(outputs, columns), triton.cdiv(rows, block), splits)](
        x, codes, scale, offset, sums, partial, x.stride(0), rows, outputs, width, group, scale.shape[1],
        stretch, 0 if sums is None else sums.shape[1], ROWS=block, COLUMNS=columns, DEPTH=deep, KIND=kind,
        OFFSET=offset is not None, ALIKE=alike, NATIVE=_has_float8(x.device),
        WIDEN=INTERPRETED or x.dtype == torch.float32, num_warps=4,
        num_stages=stages(most, loads, deep * columns * x.element_size(), x.device),
    )  # fmt: skip
    return partial[0] if splits == 1 else partial.sum(0).to(x.dtype)


def _launch(
    rows: int, outputs: int, width: int, group: int, halves: bool, dtype: torch.dtype
) -> tuple[int, int, int, int, bool]:
    """Rows, columns and depth of a tile, the number of load stages, and whether all inputs of a tile are in
    one group, so that the scales can be applied to the product. The fastest settings found on an H100."""
    block = 16 if rows <= 16 else 32 if rows <= 32 else 64
    columns = 16 if outputs < 32 else 32 if outputs < 64 or (halves and rows <= 16) else 64
    shared = math.gcd(group, width)
    deep = min(128, shared & -shared)
    if deep >= 32:
        return block, columns, deep, 4, True
    columns = min(columns, 32)
    deep = 128 if block < 64 and dtype != torch.float32 else 64  # shared memory holds three of these
    return block, columns, deep if width >= deep else 32, 3, False


def _has_float8(device: torch.device) -> bool:
    """Whether the GPU converts float8 in hardware."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _splits(columns: int, width: int, deep: int) -> tuple[int, int]:
    """The number of parts that the inputs of a product with few columns are split into, and the length of
    one."""
    splits = min(8, max(1, COLUMNS // columns), max(1, width // (4 * deep)))
    stretch = triton.cdiv(triton.cdiv(width, splits), deep) * deep
    return triton.cdiv(width, stretch), stretch


def plain_codes_matmul(x: Tensor, data: Tensor, scale: Tensor, offset: Tensor | None, group: int) -> Tensor:
    code = torch.cat((data & 15, data >> 4), 1) if data.dtype == torch.uint8 else data
    groups = torch.arange(code.shape[1], device=data.device) // group
    numbers = code.float() * scale.float()[:, groups]
    if offset is not None:
        numbers -= offset[:, groups]
    return (x.float() @ numbers.T).to(x.dtype)


@triton.jit
def _times(
    acc, code, x, scale, offset, sums, row, column, first, inside, x_stride, rows, outputs, group, groups,
    tiles, FACTOR: tl.constexpr, DEPTH: tl.constexpr, OFFSET: tl.constexpr, ALIKE: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """acc + x [rows, depth] times FACTOR times the dequantised codes [depth, columns] of the inputs from
    `first` on."""
    depth = first + tl.arange(0, DEPTH)
    left = tl.load(
        x + row[:, None].to(tl.int64) * x_stride + depth[None, :],
        mask=(row < rows)[:, None] & inside[None, :], other=0.0,
    )  # fmt: skip
    if ALIKE:
        group_index = column.to(tl.int64) * groups + first // group
        of_group = tl.load(scale + group_index, mask=column < outputs, other=0.0).to(tl.float32) * FACTOR
        if WIDEN:
            product = tl.dot(left.to(tl.float32), code.to(tl.float32), input_precision="ieee")
        else:
            product = tl.dot(left, code.to(left.dtype))  # of 8 bits at most: exact
        acc += product * of_group[None, :]
        if OFFSET:
            offsets = tl.load(offset + group_index, mask=column < outputs, other=0.0)
            of_inputs = tl.load(sums + row * tiles + first // DEPTH, mask=row < rows, other=0.0)
            acc -= of_inputs[:, None] * offsets[None, :]
        return acc
    seen = inside[:, None] & (column < outputs)[None, :]
    group_indices = column[None, :].to(tl.int64) * groups + (depth // group)[:, None]
    number = code.to(tl.float32) * (
        tl.load(scale + group_indices, mask=seen, other=0.0).to(tl.float32) * FACTOR
    )
    if OFFSET:
        number -= tl.load(offset + group_indices, mask=seen, other=0.0)
    if WIDEN:
        return acc + tl.dot(left.to(tl.float32), number, input_precision="ieee")
    return acc + tl.dot(left, number.to(left.dtype))


@triton.jit(do_not_specialize=["rows"])
def _codes_matmul(
    x, data, scale, offset, sums, out, x_stride, rows, outputs, width, group, groups, stretch, tiles,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr,
    ALIKE: tl.constexpr, NATIVE: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    begin = tl.program_id(2) * stretch
    for first in range(begin, tl.minimum(begin + stretch, width), DEPTH):
        depth = first + tl.arange(0, DEPTH)
        inside = depth < width
        code = tl.load(
            data + column[None, :].to(tl.int64) * width + depth[:, None],
            mask=inside[:, None] & (column < outputs)[None, :], other=0,
        )  # fmt: skip
        if KIND == 1:  # two codes per byte: this input, and the one half a row later
            acc = _times(
                acc, code & 15, x, scale, offset, sums, row, column, first, inside, x_stride, rows, outputs,
                group, groups, tiles, 1.0, DEPTH, OFFSET, ALIKE, WIDEN,
            )  # fmt: skip
            acc = _times(
                acc, code >> 4, x, scale, offset, sums, row, column, first + width, inside, x_stride, rows,
                outputs, group, groups, tiles, 1.0, DEPTH, OFFSET, ALIKE, WIDEN,
            )  # fmt: skip
        elif KIND == 2 and NATIVE:
            acc = _times(
                acc, code.to(tl.float8e4nv, bitcast=True).to(tl.float16), x, scale, offset, sums, row,
                column, first, inside, x_stride, rows, outputs, group, groups, tiles, 1.0, DEPTH, OFFSET,
                ALIKE, WIDEN,
            )  # fmt: skip
        elif (
            KIND == 2
        ):  # float8's bits, moved to float16's sign, exponent and fraction, give the number / 256
            bits = ((code & 128).to(tl.int16) << 8) | ((code & 127).to(tl.int16) << 7)
            acc = _times(
                acc, bits.to(tl.float16, bitcast=True), x, scale, offset, sums, row, column, first, inside,
                x_stride, rows, outputs, group, groups, tiles, 256.0, DEPTH, OFFSET, ALIKE, WIDEN,
            )  # fmt: skip
        else:
            acc = _times(
                acc, code, x, scale, offset, sums, row, column, first, inside, x_stride, rows, outputs,
                group, groups, tiles, 1.0, DEPTH, OFFSET, ALIKE, WIDEN,
            )  # fmt: skip
    target = out + (tl.program_id(2).to(tl.int64) * rows + row[:, None]) * outputs + column[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < outputs)[None, :])
