"""Which device a model runs on and in which numbers, from the options' words. Knows no models."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from runtime.protocol.errors import ModelLoadError


def pick_device(name: str, rank: int = 0, ranks: int = 1) -> torch.device:
    """`auto`: CUDA where there is one. Of several ranks each has a GPU of its own. Raises ModelLoadError for
    one that cannot be used."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if ranks > 1 and name == "cuda":
        found = torch.cuda.device_count()
        if 0 < found < ranks:
            raise ModelLoadError(
                f"{ranks} ranks need a GPU each, there are {found}",
                where="tp_size",
                hint="device='cpu' computes without",
            )
        name = f"cuda:{rank}"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # torch asserts where it was built without the backend
        raise ModelLoadError(f"device {name!r} cannot be used: {error}", where="device") from error
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto`: on CPU float32, where what else is in a batch changes no more than a result's last bits."""
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def kv_dtype(name: str, computed: torch.dtype) -> torch.dtype:
    """In what the KV pool of a model that is computed in `computed` keeps its numbers."""
    kept = {
        "auto": computed,
        "bfloat16": torch.bfloat16,
        "fp8_e4m3": torch.float8_e4m3fn,
        "fp8_e5m2": torch.float8_e5m2,
    }
    return kept[name]


def current(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the thread's own: there Triton launches kernels, wherever their tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
