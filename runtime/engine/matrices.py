"""How a model's matrices are kept and multiplied with: what its checkpoint, the options and memory say."""

from __future__ import annotations

import torch

from runtime.config.family import ARCHITECTURES
from runtime.config.model import ModelSpec
from runtime.config.runner import RunnerConfig
from runtime.engine import memory
from runtime.layers.dense import Dense
from runtime.layers.linear import LinearMethod
from runtime.layers.lora.linear import Adapted
from runtime.layers.quantised.choose import method_for


def linear_method(
    spec: ModelSpec, config: RunnerConfig, dtype: torch.dtype, device: torch.device, where: str
) -> LinearMethod:
    """Asked before loading. Raises ModelLoadError: they do not fit; BadRequest: a wish that cannot be had."""
    size = memory.weight_bytes(spec, dtype)
    expand = memory.expands(config.expand_weights, size, device)
    bits = memory.code_bits(spec, config.quantization, expand=expand)
    memory.check_weights_fit(spec, dtype, device, where, config.tp_size, bits)
    pack = memory.packs(config.pack_weights, size, dtype, device)
    dense = Dense(pack=pack, timed=config.pack_weights == "auto")
    method = method_for(spec, config.quantization, dense, expand=expand)
    if config.enable_lora:
        return Adapted(method, (ARCHITECTURES.load(spec.architecture).names.head,))
    return method
