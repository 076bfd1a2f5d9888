"""How a model's matrices are stored and multiplied: decided from its checkpoint, the options and the
memory."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from runtime.config.family import ARCHITECTURES
from runtime.config.model import ModelSpec
from runtime.config.runner import RunnerConfig
from runtime.engine import memory
from runtime.layers.dense import Dense
from runtime.layers.linear import LinearMethod
from runtime.layers.lora.linear import Adapted
from runtime.layers.quantised.choose import method_for
from runtime.models.decoder import Decoder
from runtime.parallel import Group
from runtime.protocol.errors import ModelLoadError, RuntimeFault


def linear_method(
    spec: ModelSpec, config: RunnerConfig, dtype: torch.dtype, device: torch.device, where: str
) -> LinearMethod:
    """Called before loading. Raises ModelLoadError if the matrices do not fit; BadRequest if an option is not
    possible."""
    size = memory.weight_bytes(spec, dtype)
    expand = memory.expands(config.expand_weights, size, device)
    bits = memory.code_bits(spec, config.quantization, expand=expand)
    memory.check_weights_fit(spec, dtype, device, where, config.tp_size, bits)
    pack = memory.packs(config.pack_weights, dtype, device)
    dense = Dense(pack=pack, both=config.pack_weights == "auto" and memory.second_copy_fits(size, device))
    method = method_for(spec, config.quantization, dense, expand=expand)
    if config.enable_lora:
        return Adapted(method, (ARCHITECTURES.load(spec.architecture).names.head,))
    return method


def read_again(directory: Path, before: Decoder, config: RunnerConfig, group: Group) -> Decoder:
    """The same model with other weights. All ranks of the group read them; if one cannot, all fail. Raises
    ModelLoadError."""
    fault: RuntimeFault | None = None
    directory = Path(os.path.expanduser(directory))
    decoder, spec, dtype, device = before, before.spec, before.dtype, before.device
    try:
        if unlike := spec.unlike(ModelSpec.from_dir(directory)):
            raise ModelLoadError(
                f"is of another shape than the model that runs: {', '.join(unlike)} differ",
                where=str(directory),
                hint="start a server with it",
            )
        with torch.inference_mode():
            method = linear_method(spec, config, dtype, device, str(directory))
            decoder = Decoder.load(directory, spec, dtype, device, method, group)
            method.tune()
    except RuntimeFault as error:
        fault = error
    read = group.least(0 if fault else 1)
    if fault is not None:
        raise fault
    if not read:
        raise ModelLoadError("another rank could not read its part", where=str(directory))
    return decoder
