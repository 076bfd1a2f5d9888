"""The device and the dtypes that a model runs with, from the options. Knows no models."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from runtime.protocol.errors import ModelLoadError


def pick_device(name: str, rank: int = 0, ranks: int = 1) -> torch.device:
    """`auto`: CUDA if available. With several ranks each has a GPU of its own. Raises ModelLoadError if it
    cannot be used."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if ranks > 1 and name == "cuda":
        count = torch.cuda.device_count()
        if 0 < count < ranks:
            raise ModelLoadError(
                f"{ranks} ranks need a GPU each, there are {count}",
                where="tp_size",
                hint="device='cpu' computes without",
            )
        name = f"cuda:{rank}"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # torch asserts if it was built without the backend
        raise ModelLoadError(f"device {name!r} cannot be used: {error}", where="device") from error
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto`: float32 on CPUs, in which the rest of a batch changes only the last bits of a result."""
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def kv_dtype(name: str, computed: torch.dtype) -> torch.dtype:
    """The dtype of the KV pool for a model computed in `computed`."""
    kept = {
        "auto": computed,
        "bfloat16": torch.bfloat16,
        "fp8_e4m3": torch.float8_e4m3fn,
        "fp8_e5m2": torch.float8_e5m2,
    }
    return kept[name]


def current(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the thread's current device, on which Triton launches kernels wherever their tensors
    are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
