"""Which devices can run kernels, the current device, and copies between host and device. Imports no
Triton."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton reads the variable as well, when a kernel is defined. The interpreter's dot product of bfloat16 is
wrong, so operands are widened first (constexpr WIDEN)."""


_INSTALLED = importlib.util.find_spec("triton") is not None


def compiled(device: torch.device) -> bool:
    """Whether kernels run on this device as machine code."""
    return device.type == "cuda" and not INTERPRETED and _INSTALLED


def current(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the thread's current device, on which Triton launches kernels wherever their tensors
    are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a thread block can use; 0 if unknown."""
    if device.type != "cuda":
        return 0
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0))


def stages(most: int, loads: int, operands: int, device: torch.device) -> int:
    """num_stages of a loop: at most `most`, at least 2. The loads (`loads` bytes each) of all stages but one,
    and the operands of a product, must fit into a block's shared memory."""
    if not (shared := shared_memory(device)):
        return most
    return max(2, min(most, 1 + (shared - operands) // loads))


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """A copy on `device`; the host does not wait for queued work."""
    if device.type != "cuda":
        return numbers.to(device)
    return numbers.pin_memory().to(device, non_blocking=True)


def copied(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Arrays of float32 or int32 on the device, in one copy. Each begins at a multiple of 16 bytes: Triton
    compiles another kernel for other alignments."""
    starts = [0, *itertools.accumulate(-(-array.nbytes // 16) * 16 for array in arrays)]
    flat = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    octets = flat.numpy()
    for start, array in zip(starts, arrays):
        octets[start : start + array.nbytes] = array.view(np.uint8)
    there = flat.to(device, non_blocking=True)
    types = {"f": torch.float32, "i": torch.int32}
    return [
        there[start : start + array.nbytes].view(types[array.dtype.char])
        for start, array in zip(starts, arrays)
    ]


def to_host(numbers: Tensor) -> Callable[[], Tensor]:
    """Start a copy to the host. The returned function waits for the copy, but not for work queued after
    it."""
    if numbers.device.type != "cuda":
        return lambda: numbers
    there = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    there.copy_(numbers, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def wait() -> Tensor:
        copied.synchronize()
        return there

    return wait


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number` (which is at least 1)."""
    return 1 << (number - 1).bit_length()


def warps(block: int) -> int:
    """How many warps share a row of `block` elements: about eight elements per thread."""
    return min(16, max(1, block // 256))
