"""Layers give with kernels what they give without. Where there is no GPU, kernels are interpreted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from runtime.config.model import RopeSpec
from runtime.layers.dense import DenseLinear
from runtime.layers.mlp import GatedMLP
from runtime.layers.norm import RMSNorm
from runtime.layers.rope import Rotary

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(2)


def with_kernels(monkeypatch: pytest.MonkeyPatch, use: bool) -> None:
    monkeypatch.setattr("runtime.kernels.table.compiled", lambda device: use)


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE)


def test_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x, more = noise(12), noise(3, 12), noise(3, 12)
    heads, qkv = noise(4, 6), noise(3, 7, 6)
    found = []
    for use in (True, False):
        with_kernels(monkeypatch, use)
        norm, stream = RMSNorm(weight, 1e-5), x.clone()
        by_head, one_weight = RMSNorm(heads, 1e-5), RMSNorm(weight[:6], 1e-5)
        found.append((norm(x), norm.of_sum(stream, more), stream, by_head(qkv[:, :4]), one_weight(qkv)))
        torch.testing.assert_close(norm(x), norm(x.t().contiguous().t()))
    for got, right in zip(*found, strict=True):
        torch.testing.assert_close(got, right)


@pytest.mark.parametrize("pairs", ["halves", "neighbours"])
def test_rotary(monkeypatch: pytest.MonkeyPatch, pairs: str) -> None:
    qkv, positions = noise(3, 5, 12), torch.tensor([0, 7, 300], device=DEVICE)
    found = []
    for use in (True, False):
        with_kernels(monkeypatch, use)
        rotary, turned = Rotary(RopeSpec(theta=100.0, dims=8, pairs=pairs), 12, DEVICE), qkv.clone()
        rotary.turn_(turned[:, :4], *rotary.angles(positions, torch.float32))
        found.append(turned)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_gated_mlp(monkeypatch: pytest.MonkeyPatch, activation: str) -> None:
    mlp = GatedMLP(DenseLinear(noise(20, 6)), DenseLinear(noise(6, 10)), activation)
    x, found = noise(3, 6), []
    for use in (True, False):
        with_kernels(monkeypatch, use)
        found.append(mlp(x))
    torch.testing.assert_close(*found)
