"""Gumbel noise from a hash, and the draw with it: the column with the highest score / temperature + noise.

The noise is a pure function of a key and a token id, so a draw needs no cumulative sum. Each operation is
rounded to float32 by itself: numpy and torch here, gumbel.h and the Triton kernel in sampling.py give the
same bits.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from runtime.kernels.native.library import library

ID_FACTOR = 0x9E3779B1  # 2^32 / golden ratio
FACTORS = ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 0x2C1B3C6D), (15, 0x297A2D39))
"""For each pair: x ^= x >> shift, x *= factor. The key's upper half is added after the first two pairs."""
LN2 = 0.693147182464599609375
SERIES = (
    0.09004202485084534, -0.14257794618606567, 0.14806459844112396, -0.16575047373771667, 0.19973105192184448,
    -0.25001609325408936, 0.33333659172058105, -0.4999999403953552,
)  # fmt: skip
"""log(1 + f) = f + f^2 * (the polynomial with these coefficients, highest power first), fitted for f between
sqrt(1/2) - 1 and sqrt(2) - 1. The relative error is at most 1.3e-7."""
SQRT_HALF = 0x3F3504F3  # the bits of sqrt(1/2)
NEAR = 0.25
MOST = 22.25
"""An upper bound of the noise, whose maximum is 32 * LN2."""
_AT_ONCE = 1 << 14
Numbers: TypeAlias = Any
"""A numpy array or a tensor."""
log = logging.getLogger(__name__)


def halves(keys: Sequence[int]) -> npt.NDArray[np.int32]:
    """64-bit keys -> [rows, 2], the lower half first."""
    return np.array(keys, dtype=np.uint64).view(np.int32).reshape(-1, 2)


def gumbel(keys: Numbers, ids: Numbers) -> Numbers:
    """keys [rows, 2] int32, ids [ids] or [rows, ids] int32 -> noise float32 [rows, ids], between -3.2 and
    MOST. Both are arrays, or tensors on one device."""
    return _noise(_random(keys, ids))


def draw(
    scores: Tensor, temperature: float, key: int, best: int, ids: Tensor | None = None,
    weights: Tensor | None = None, least: float = 0.0,
) -> int:  # fmt: skip
    """Draw a column of scores [columns], float32 on the CPU and contiguous.

    best: the first column with the highest score, which must be finite. ids [columns] int64: the token of
    each column, ascending; None: the column's index. weights [columns] float32: only columns of weight
    `least` or more can be drawn; `best` must be one of them. If several columns tie, the first is drawn.
    """
    return (_native() or _plain_draw)(scores, temperature, key, best, ids, weights, least)


Draw: TypeAlias = Callable[[Tensor, float, int, int, Tensor | None, Tensor | None, float], int]


@functools.cache
def _native() -> Draw | None:
    """The compiled library's draw, if it gives the same results as numpy."""
    if (native := library()) is None:
        return None
    call = native.draw

    def native_draw(
        scores: Tensor, temperature: float, key: int, best: int, ids: Tensor | None, weights: Tensor | None,
        least: float,
    ) -> int:  # fmt: skip
        listed = None if ids is None else ids.data_ptr()
        weighed = None if weights is None else weights.data_ptr()
        lower, upper = key & 0xFFFFFFFF, key >> 32
        return int(
            call(scores.data_ptr(), listed, weighed, least, len(scores), best, temperature, lower, upper)
        )

    scores = torch.arange(300) % 7 / 4.0
    for key in (5, 6 << 40, (1 << 64) - 1):
        arguments = (scores, 0.7, key, 6, None, scores, 0.5)
        if native_draw(*arguments) != _plain_draw(*arguments):
            log.warning("%s draws otherwise on this machine, numpy takes its place", native.path)
            return None
    return native_draw


def _plain_draw(
    scores: Tensor, temperature: float, key: int, best: int, ids: Tensor | None, weights: Tensor | None,
    least: float,
) -> int:  # fmt: skip
    keys, chosen, row = halves([key]), best, scores.numpy()
    highest, divisor = row[best], np.float32(temperature)
    tokens = None if ids is None else ids.numpy()
    top = gumbel(keys, np.array([best if tokens is None else tokens[best]], dtype=np.int32))[0, 0]
    for first in range(0, len(row), _AT_ONCE):
        some = slice(first, first + _AT_ONCE)
        relative = (row[some] - highest) / divisor
        if weights is not None:
            relative[weights.numpy()[some] < least] = -math.inf
        if relative.max() + np.float32(MOST) < top:
            continue
        tokens_here = np.arange(first, first + len(relative)) if tokens is None else tokens[some]
        bits = _random(keys, tokens_here.astype(np.int32))[0]
        # An upper bound: an exponential variate is at least its share, whose bits bound its logarithm.
        most = _bits(_share(bits)) * np.float32(-LN2 / (1 << 23)) + np.float32(127 * LN2 + 0.01) + relative
        able = np.flatnonzero(most >= top)
        if len(able):
            values = relative[able] + _noise(bits[able])
            column = first + int(able[values.argmax()])
            if (values.max(), -column) > (top, -chosen):
                top, chosen = values.max(), column
    return chosen


def _signed(number: int) -> int:
    """The int32 with the same bits."""
    return number - (1 << 32) if number >= 1 << 31 else number


def _shifted(x: Numbers, count: int) -> Numbers:
    """A logical shift to the right."""
    return (x >> count) & ((1 << (32 - count)) - 1)


def _floats(x: Numbers) -> Numbers:
    return x.float() if isinstance(x, Tensor) else x.astype(np.float32)


def _bits(x: Numbers) -> Numbers:
    return x.view(torch.int32 if isinstance(x, Tensor) else np.int32)


def _select(condition: Numbers, yes: Numbers, no: Numbers) -> Numbers:
    select: Any = torch.where if isinstance(condition, Tensor) else np.where
    return select(condition, yes, no)


def _random(keys: Numbers, ids: Numbers) -> Numbers:
    """31 random bits for each key and id."""
    x = ids * _signed(ID_FACTOR) + keys[:, :1]
    for turn, (shift, factor) in enumerate(FACTORS):
        if turn == 2:
            x = x + keys[:, 1:]
        x = (x ^ _shifted(x, shift)) * _signed(factor)
    return _shifted(x ^ _shifted(x, 15), 1)


def _share(bits: Numbers) -> Numbers:
    return (_floats(bits) + 0.5) * 2.0**-31


def _noise(bits: Numbers) -> Numbers:
    # An exponential variate is -log(1 - share); near 0 by the series, which keeps the relative precision.
    share = _share(bits)
    fraction, power = _parts(_share(0x7FFFFFFF - bits))
    near = share < NEAR
    exponential = _minus_log(_select(near, -share, fraction), _select(near, 0 * power, power))
    return _minus_log(*_parts(exponential))


def _parts(x: Numbers) -> tuple[Numbers, Numbers]:
    """x = (1 + fraction) * 2^power."""
    bits = _bits(x)
    power = (bits - SQRT_HALF) >> 23
    rest = bits - (power << 23)
    return rest.view(x.dtype) - 1.0, _floats(power)


def _minus_log(fraction: Numbers, power: Numbers) -> Numbers:
    total = fraction * SERIES[0] + SERIES[1]
    for factor in SERIES[2:]:
        total = total * fraction + factor
    return -(power * LN2 + (fraction * fraction * total + fraction))
