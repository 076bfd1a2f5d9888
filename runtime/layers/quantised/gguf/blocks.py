"""ggml's quantised types as Codes. A row of a matrix is a sequence of blocks, each with its scales and codes.

Source: the types' definitions in ggml (github.com/ggml-org/ggml, src/ggml-common.h). d and m below are a
block's scale and minimum, in float16; q4 to q6 are codes of 4 to 6 bits.

| type | numbers | a block                                              | number                   |
|------|---------|------------------------------------------------------|--------------------------|
| Q8_0 | 32      | d, q8[32]                                            | d q                      |
| Q4_0 | 32      | d, q4[32]                                            | d (q - 8)                |
| Q4_1 | 32      | d, m, q4[32]                                         | d q + m                  |
| Q5_0 | 32      | d, fifth bits (uint32), q4[32]                       | d (q - 16)               |
| Q5_1 | 32      | d, m, fifth bits (uint32), q4[32]                    | d q + m                  |
| Q4_K | 256     | d, m, (scale, least) of 6 bits [8], q4[256]          | d scale q - m least      |
| Q5_K | 256     | d, m, (scale, least) of 6 bits [8], fifth bits, q4   | d scale q - m least      |
| Q6_K | 256     | q4[256], two upper bits [256], scale int8[16], d     | d scale (q - 32)         |

Four-bit codes are stored in halves: the lower half of a byte belongs to the first half of a stretch (the
block, or 64 numbers of a K block, or 128 of Q6_K by quarters), the upper half to the second.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from runtime.layers.quantised.codes import Codes, nibbles


def codes_of(kind: str, rows: Tensor) -> Codes:
    """rows: uint8 [outputs, bytes per row], of a quantised type (see TYPES)."""
    size, read = TYPES[kind]
    return read(rows.unflatten(1, (-1, size)))


def _halves(data: Tensor) -> tuple[Tensor, Tensor]:
    """Split the last dimension: the first two bytes, and the rest."""
    return data[..., :2], data[..., 2:]


def _half(data: Tensor) -> Tensor:
    """[..., 2] bytes -> [...] float16."""
    return data.contiguous().view(torch.float16).squeeze(-1)


def _split(data: Tensor) -> Tensor:
    """[..., n] bytes -> [..., 2 n]: all lower halves, then all upper halves."""
    return torch.cat((data & 15, data >> 4), -1)


def _q8_0(blocks: Tensor) -> Codes:
    scale, codes = _halves(blocks)
    return Codes(codes.contiguous().view(torch.int8).flatten(1), _half(scale), 32)


def _q4_0(blocks: Tensor) -> Codes:
    scale, codes = _halves(blocks)
    d = _half(scale)
    return Codes(nibbles(_split(codes).flatten(1)), d, 32, d.float() * 8)


def _q4_1(blocks: Tensor) -> Codes:
    d, m, codes = _half(blocks[..., :2]), _half(blocks[..., 2:4]), blocks[..., 4:]
    return Codes(nibbles(_split(codes).flatten(1)), d, 32, -m.float())


def _q5_0(blocks: Tensor) -> Codes:
    codes = _split(blocks[..., 6:]) | (_bits(blocks[..., 2:6]) << 4)
    return Codes((codes.to(torch.int8) - 16).flatten(1), _half(blocks[..., :2]), 32)


def _q5_1(blocks: Tensor) -> Codes:
    codes = _split(blocks[..., 8:]) | (_bits(blocks[..., 4:8]) << 4)
    m = _half(blocks[..., 2:4])
    return Codes(codes.to(torch.int8).flatten(1), _half(blocks[..., :2]), 32, -m.float())


def _bits(data: Tensor) -> Tensor:
    """[..., 4] bytes -> [..., 32] bits, the lowest of the first byte first."""
    return ((data.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(-2)


def _scales_of_six_bits(data: Tensor) -> tuple[Tensor, Tensor]:
    """[..., 12] bytes -> scale and minimum [..., 8] float32, of six bits each. The first eight bytes hold the
    first four scales and minima in their lower six bits. For the other four, the last four bytes hold the
    lower four bits, and the upper two bits of the first eight bytes the rest."""
    first, second, third = data[..., :4], data[..., 4:8], data[..., 8:]
    scale = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), -1)
    least = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), -1)
    return scale.float(), least.float()


def _k(blocks: Tensor, codes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scale and offset [outputs, groups of 32], and 4-bit codes [outputs, blocks, 4, 2, 32] in stretches of
    64 numbers."""
    scale, least = _scales_of_six_bits(blocks[..., 4:16])
    d, m = (_half(blocks[..., at : at + 2]).float().unsqueeze(-1) for at in (0, 2))
    lying = codes.unflatten(-1, (4, 32))
    return (d * scale).flatten(1), (m * least).flatten(1), torch.stack((lying & 15, lying >> 4), -2)


def _q4_k(blocks: Tensor) -> Codes:
    scale, offset, codes = _k(blocks, blocks[..., 16:])
    return Codes(nibbles(codes.flatten(1)), scale, 32, offset)


def _q5_k(blocks: Tensor) -> Codes:
    scale, offset, codes = _k(blocks, blocks[..., 48:])
    # A number's fifth bit: the byte is its index within 32 numbers, the bit is the index of these 32.
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]
    fifth = ((blocks[..., None, 16:48] >> shifts) & 1).unflatten(-2, (4, 2))
    return Codes((codes | (fifth << 4)).to(torch.int8).flatten(1), scale, 32, offset)


def _q6_k(blocks: Tensor) -> Codes:
    # Two stretches of 128 numbers, each in four quarters of 32. The first and third quarter share bytes for
    # their lower bits, as do the second and fourth; all four share bytes for their upper bits.
    lower = blocks[..., :128].unflatten(-1, (2, 64))
    fours = torch.cat((lower & 15, lower >> 4), -1).unflatten(-1, (4, 32))
    upper = blocks[..., 128:192].unflatten(-1, (2, 1, 32))
    twos = (upper >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]) & 3
    codes = (fours | (twos << 4)).to(torch.int8) - 32
    scale = blocks[..., 192:208].contiguous().view(torch.int8).float()
    d = _half(blocks[..., 208:210]).float().unsqueeze(-1)
    return Codes(codes.flatten(1), (d * scale).flatten(1), 16)


TYPES: dict[str, tuple[int, Callable[[Tensor], Codes]]] = {
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q8_0": (34, _q8_0),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
}
"""Name -> bytes per block, and the function that decodes blocks [outputs, blocks, bytes]."""
