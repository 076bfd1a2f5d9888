"""Chooses the LinearMethod that loads a model's matrices: as its checkpoint or the user asks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from runtime.config.family import ARCHITECTURES
from runtime.config.model import ModelSpec
from runtime.config.parts.quantization import Quantization, check_requested
from runtime.layers.dense import Dense
from runtime.layers.int8 import Int8
from runtime.layers.linear import LinearMethod
from runtime.layers.quantised.formats import AWQ, GPTQ, CompressedTensors, Float8, Float8OnLoad, Format
from runtime.layers.quantised.gguf.checkpoint import GGUF, GGUFCheckpoint
from runtime.layers.quantised.linear import Quantised
from runtime.layers.weights import Checkpoint, RandomWeights

FORMATS: dict[str, Callable[[Quantization], Format]] = {
    "compressed-tensors": CompressedTensors,
    "fp8": Float8,
    "awq": AWQ,
    "gptq": GPTQ,
    "gguf": GGUF,
}


def open_checkpoint(
    directory: Path, spec: ModelSpec, *, progress: bool, dummy: torch.device | None = None
) -> Checkpoint:
    """The checkpoint's weights, in either kind of file. dummy: use random ones, created on that device.
    Raises ModelLoadError."""
    if dummy is not None:
        return RandomWeights(directory, dummy)
    stored = spec.quantization
    kind = GGUFCheckpoint if stored is not None and stored.method == "gguf" else Checkpoint
    return kind(directory, progress=progress)


def method_for(spec: ModelSpec, wished: str | None, dense: Dense, *, expand: bool) -> LinearMethod:
    """wished: RunnerConfig.quantization. expand: dequantise checkpoints on load; ignored if the user asks for
    quantised weights. Raises BadRequest."""
    check_requested(spec.quantization, wished)
    if spec.quantization is not None:
        format = FORMATS[spec.quantization.method](spec.quantization)
        if wished == "w8a8_int8":
            return Quantised(format, Int8(), expand=True)
        return Quantised(format, dense, expand=expand)
    if wished is None:
        return dense
    if wished == "w8a8_int8":
        return Int8()
    head = ARCHITECTURES.load(spec.architecture).names.head
    return Quantised(Float8OnLoad(), dense, plain=(head,), expand=False)
