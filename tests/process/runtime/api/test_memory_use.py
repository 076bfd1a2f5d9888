"""Memory: a KV pool takes what was planned for it, and an engine does not grow with what it has done."""

from __future__ import annotations

import pytest
import torch

from runtime.attention.pool import KVShape
from runtime.attention.table import ATTENTION
from runtime.config.checkpoints import find_checkpoint
from runtime.config.model import ModelSpec
from runtime.config.runner import RunnerConfig
from runtime.engine.runner import TorchRunner


@pytest.mark.parametrize("fraction", [0.01, 0.05])
@pytest.mark.parametrize("attention", ["native", "torch_views", "torch_plain"])
def test_a_pool_takes_what_was_planned(
    monkeypatch: pytest.MonkeyPatch, attention: str, fraction: float
) -> None:
    free = 2 << 30
    monkeypatch.setattr("runtime.engine.memory.available_bytes", lambda device: free)
    path = find_checkpoint("pocket")
    spec = ModelSpec.from_dir(path)
    config = RunnerConfig(attention=attention, memory_fraction=fraction, device="cpu", dtype="float32")
    runner = TorchRunner.load(path, spec, config)
    shape = KVShape(spec.num_layers, spec.num_kv_heads, spec.head_dim, torch.float32, torch.device("cpu"))
    planned = runner.slots * ATTENTION.load(attention).bytes_per_slot(shape)
    held = runner._attention.pool.kv.untyped_storage().nbytes()
    assert 0.98 * planned <= held <= 1.02 * planned
    assert 0.98 * fraction * free <= planned <= fraction * free
    runner.close()
