"""Numbers of 8 bits with a floating point: as KV pools and quantised matrices keep them."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TYPES = (E4M3, E5M2)


def rounded(x: Tensor, kept: torch.dtype) -> Tensor:
    """x as `kept`, any type; what is beyond its largest number becomes that."""
    if kept not in TYPES:
        return x.to(kept)
    most = torch.finfo(kept).max
    return x.clamp(-most, most).to(kept)


def widened(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x, of any type and a tensor of its own where it is of 8 bits, as `dtype`. On the CPU an e4m3 number is
    told by its bits, twelve times as fast as by torch's own conversion: put where float16 has sign, exponent
    and fraction, they are the number over 256; for e5m2 they are the number. No code for NaN stays one in
    e4m3."""
    if x.dtype not in TYPES or x.device.type != "cpu":
        return x.to(dtype)
    bits = x.view(torch.int8).to(torch.int16)
    if x.dtype == E5M2:
        return (bits << 8).view(torch.float16).to(dtype)
    return ((bits << 7) & -16385).view(torch.float16).to(torch.float32).mul_(256.0).to(dtype)
