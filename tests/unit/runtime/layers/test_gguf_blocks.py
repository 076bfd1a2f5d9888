"""ggml's quantised types give the numbers that the package `gguf` gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from runtime.layers.quantised.codes import Codes
from runtime.layers.quantised.gguf.blocks import TYPES, codes_of

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
ROWS, BLOCKS = 5, 3


def rows_of(kind: str) -> np.ndarray:
    """Rows of blocks with any codes and sensible scales."""
    size = TYPES[kind][0]
    random = np.random.default_rng(len(kind) + size)
    data = random.integers(0, 256, (ROWS, BLOCKS, size), dtype=np.uint8)
    halves = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
    for at in halves.get(kind, (0,)):
        scale = random.normal(scale=0.1, size=(ROWS, BLOCKS, 1)).astype(np.float16)
        data[..., at : at + 2] = scale.view(np.uint8)
    return data.reshape(ROWS, -1)


@pytest.mark.parametrize("kind", TYPES)
def test_numbers_are_those_of_the_package(kind: str) -> None:
    data = rows_of(kind)
    right = torch.from_numpy(gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind]))
    codes = codes_of(kind, torch.from_numpy(data))
    assert isinstance(codes, Codes)
    assert (codes.outputs, codes.inputs) == right.shape
    torch.testing.assert_close(codes.dense(), right, atol=1e-5, rtol=1e-6)
    assert right.std() > 0.1


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_what_the_package_quantises_is_near(kind: str) -> None:
    plain = np.random.default_rng(1).normal(size=(8, 64)).astype(np.float32)
    data = gguf.quants.quantize(plain, gguf.GGMLQuantizationType[kind])
    found = codes_of(kind, torch.from_numpy(data)).dense()
    assert (found - torch.from_numpy(plain)).abs().max() < (0.02 if kind == "Q8_0" else 0.4)
