"""The kernels that replace torch's operations on devices that can run them: Triton's on GPUs, and some of the
same names in C on CPUs. Imports no Triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from runtime.kernels.device import compiled
from runtime.kernels.native import layers
from runtime.protocol.registry import Registry

KERNELS: Registry[Any] = Registry(
    "kernel",
    {
        "move_kv": "runtime.kernels.kv_store:move_kv",
        "rms_norm": "runtime.kernels.elementwise:rms_norm",
        "rotate": "runtime.kernels.elementwise:rotate",
        "silu_mul": "runtime.kernels.elementwise:silu_mul",
        "gemv": "runtime.kernels.gemv:gemv",
        "gather_logprobs": "runtime.kernels.logprobs:gather_logprobs",
        "codes_matmul": "runtime.kernels.codes_matmul:codes_matmul",
        "fused_experts": "runtime.kernels.moe:fused_experts",
    },
)


def kernel(name: str, device: torch.device) -> Callable[..., Any] | None:
    """The kernel's function; None if it cannot run here, and the caller computes in torch."""
    if not compiled(device):
        return layers.kernel(name) if device.type == "cpu" else None
    function: Callable[..., Any] = KERNELS.load(name)
    return function
