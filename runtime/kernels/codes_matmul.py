"""A product with a matrix in codes of 4 or 8 bits, whose numbers are made where they are multiplied: memory
is read for the codes alone. For few rows; for many, numbers made once and a plain product take less time."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.device import INTERPRETED

_INT8, _HALVES, _FLOAT8 = 0, 1, 2
_KINDS = {torch.int8: _INT8, torch.uint8: _HALVES, torch.float8_e4m3fn: _FLOAT8}


def codes_matmul(x: Tensor, data: Tensor, scale: Tensor, offset: Tensor | None, group: int) -> Tensor:
    """x [rows, inputs], a row's numbers side by side -> [rows, outputs]. The matrix's number at (output,
    input) is code * scale - offset, the two [outputs, groups] (offset float32, or None: zero) of the input's
    group, of `group` inputs; all without gaps. data: codes int8 or float8_e4m3fn [outputs, inputs], or uint8
    [outputs, inputs / 2], the first half of the inputs in the lower four bits."""
    rows, (outputs, width) = x.shape[0], data.shape
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    kind = _KINDS[data.dtype]
    block = 16 if rows <= 16 else 32 if rows <= 32 else 64
    deep = 128 if block < 64 and x.dtype != torch.float32 else 64  # what shared memory holds three times
    columns = 32 if outputs >= 32 else 16
    codes = data.view(torch.uint8) if kind == _FLOAT8 else data
    _codes_matmul[(triton.cdiv(outputs, columns), triton.cdiv(rows, block))](
        x, codes, scale, offset, out, x.stride(0), rows, outputs, width, group, scale.shape[1],
        ROWS=block, COLUMNS=columns, DEPTH=deep if width >= deep else 32, KIND=kind,
        OFFSET=offset is not None, WIDEN=INTERPRETED or x.dtype == torch.float32, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


def plain_codes_matmul(x: Tensor, data: Tensor, scale: Tensor, offset: Tensor | None, group: int) -> Tensor:
    code = torch.cat((data & 15, data >> 4), 1) if data.dtype == torch.uint8 else data
    places = torch.arange(code.shape[1], device=data.device) // group
    numbers = code.float() * scale.float()[:, places]
    if offset is not None:
        numbers -= offset[:, places]
    return (x.float() @ numbers.T).to(x.dtype)


@triton.jit
def _times(
    made, code, x, scale, offset, row, column, depth, inside, x_stride, rows, outputs, group, groups,
    OFFSET: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """made + x [rows, depth] times the numbers of code [depth, columns] float32; depth: which inputs."""
    seen = inside[:, None] & (column < outputs)[None, :]
    place = column[None, :].to(tl.int64) * groups + (depth // group)[:, None]
    number = code * tl.load(scale + place, mask=seen, other=0.0).to(tl.float32)
    if OFFSET:
        number -= tl.load(offset + place, mask=seen, other=0.0)
    left = tl.load(
        x + row[:, None].to(tl.int64) * x_stride + depth[None, :],
        mask=(row < rows)[:, None] & inside[None, :], other=0.0,
    )  # fmt: skip
    if WIDEN:
        return made + tl.dot(left.to(tl.float32), number, input_precision="ieee")
    return made + tl.dot(left, number.to(left.dtype))


@triton.jit
def _codes_matmul(
    x, data, scale, offset, out, x_stride, rows, outputs, width, group, groups,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    made = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, width, DEPTH):
        depth = first + tl.arange(0, DEPTH)
        inside = depth < width
        code = tl.load(
            data + column[None, :].to(tl.int64) * width + depth[:, None],
            mask=inside[:, None] & (column < outputs)[None, :], other=0,
        )  # fmt: skip
        if KIND == 1:  # two codes to a byte: of this input, and of the one half a row on
            made = _times(
                made, (code & 15).to(tl.float32), x, scale, offset, row, column, depth, inside, x_stride,
                rows, outputs, group, groups, OFFSET, WIDEN,
            )  # fmt: skip
            made = _times(
                made, (code >> 4).to(tl.float32), x, scale, offset, row, column, depth + width, inside,
                x_stride, rows, outputs, group, groups, OFFSET, WIDEN,
            )  # fmt: skip
        else:
            if KIND == 2:  # its bits, where float16 has sign, exponent and fraction, are the number over 256
                bits = ((code & 128).to(tl.int16) << 8) | ((code & 127).to(tl.int16) << 7)
                number = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
            else:
                number = code.to(tl.float32)
            made = _times(
                made, number, x, scale, offset, row, column, depth, inside, x_stride, rows, outputs, group,
                groups, OFFSET, WIDEN,
            )  # fmt: skip
    place = out + row[:, None].to(tl.int64) * outputs + column[None, :]
    tl.store(place, made.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < outputs)[None, :])
