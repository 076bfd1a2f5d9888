"""Which device a model runs on and in which numbers, from the options' words. Knows no models."""

from __future__ import annotations

import torch

from runtime.protocol.errors import ModelLoadError


def pick_device(name: str) -> torch.device:
    """`auto`: CUDA where there is one. Raises ModelLoadError for one that cannot be used."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
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
