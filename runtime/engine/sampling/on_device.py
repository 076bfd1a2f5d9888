"""The sampler for a device."""

from __future__ import annotations

import torch

from runtime.engine.sampling.sampler import Sampler
from runtime.kernels.device import compiled


def sampler_on(device: torch.device) -> Sampler:
    if not compiled(device):
        return Sampler()
    from runtime.engine.sampling.fused import FusedSampler  # needs Triton, which not every torch has

    return FusedSampler()
