"""Experts in one tensor: each is read as if it had matrices of its own, whole or in part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from runtime.config.parts.experts import StackNames
from runtime.layers.stacked import ExpertMatrix, StackedExperts, Which
from runtime.layers.weights import Checkpoint, Weights
from runtime.protocol.errors import ModelLoadError

COUNT, HIDDEN, WIDTH = 3, 64, 96
WHOSE: tuple[Which, ...] = ("gate", "up", "down")
MATRICES = {
    f"layer.{expert}.{which}": ExpertMatrix(expert, which) for expert in range(COUNT) for which in WHOSE
}
Open = Callable[..., StackedExperts]


@pytest.fixture
def stacked(tmp_path: Path) -> Iterator[Open]:
    opened: list[Checkpoint] = []

    def make(data: dict[str, Tensor], alternate: bool = False) -> StackedExperts:
        save_file(data, tmp_path / "model.safetensors")
        opened.append(Checkpoint(tmp_path))
        weights = Weights(opened[-1], torch.float32, torch.device("cpu"))
        return StackedExperts(weights, StackNames("gate_up", "down", alternate), MATRICES, COUNT)

    yield make
    for checkpoint in opened:
        checkpoint.__exit__(None, None, None)


def parts(gate_up: Tensor, down: Tensor, alternate: bool) -> dict[str, Tensor]:
    """By name, from [experts, inputs, outputs]."""
    found = {}
    for expert in range(COUNT):
        both = gate_up[expert].T
        halves = (both[::2], both[1::2]) if alternate else both.chunk(2)
        for which, matrix in zip(WHOSE, (*halves, down[expert].T)):
            found[f"layer.{expert}.{which}"] = matrix
    return found


def check(made: StackedExperts, right: dict[str, Tensor]) -> None:
    for name, matrix in right.items():
        shape = (HIDDEN, WIDTH) if name.endswith("down") else (WIDTH, HIDDEN)
        assert f"{name}.weight" in made
        assert torch.equal(made.take(f"{name}.weight", shape).float(), matrix)
        rows, columns = range(33, 48), range(31, 60)
        assert torch.equal(made.take(f"{name}.weight", shape, rows).float(), matrix[33:48])
        assert torch.equal(made.take(f"{name}.weight", shape, None, columns).float(), matrix[:, 31:60])
        assert torch.equal(made.take(f"{name}.weight", shape, rows, columns).float(), matrix[33:48, 31:60])


@pytest.mark.parametrize("alternate", [False, True])
def test_numbers(stacked: Open, alternate: bool) -> None:
    gate_up, down = torch.randn(COUNT, HIDDEN, 2 * WIDTH), torch.randn(COUNT, WIDTH, HIDDEN)
    biases = torch.randn(COUNT, 2 * WIDTH), torch.randn(COUNT, HIDDEN)
    data = {"gate_up": gate_up, "down": down, "gate_up_bias": biases[0], "down_bias": biases[1]}
    made = stacked({**data, "other": torch.ones(2, 3)}, alternate)
    check(made, parts(gate_up, down, alternate))
    for name, right in parts(biases[0][:, None], biases[1][:, None], alternate).items():
        size = len(right)
        assert torch.equal(made.take(f"{name}.bias", (size,)), right[:, 0])
        assert torch.equal(made.tensor(f"{name}.bias", (size,), range(5, 20)), right[5:20, 0])
    assert torch.equal(made.tensor("other", (2, 3)), torch.ones(2, 3))
    there = {"other": True, "more": False, "layer.1.up.bias": True, "layer.1.up.weight_scale": False}
    assert {name: name in made for name in there} == there
    assert made.path_of("layer.1.down.weight").endswith("model.safetensors")


@pytest.mark.parametrize("alternate", [False, True])
def test_codes_stand_for_the_numbers_of_the_format(stacked: Open, alternate: bool) -> None:
    """All codes and all scales of which a float32 holds the product."""
    generator = torch.Generator().manual_seed(2)

    def octets(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)

    data = {
        "gate_up_blocks": octets(0, 256, COUNT, 2 * WIDTH, HIDDEN // 32, 16),
        "gate_up_scales": octets(1, 250, COUNT, 2 * WIDTH, HIDDEN // 32),
        "down_blocks": octets(0, 256, COUNT, HIDDEN, WIDTH // 32, 16),
        "down_scales": octets(1, 250, COUNT, HIDDEN, WIDTH // 32),
    }
    right = {
        name: convert_moe_packed_tensors(data[f"{name}_blocks"], data[f"{name}_scales"], dtype=torch.float32)
        for name in ("gate_up", "down")
    }
    assert right["gate_up"].shape == (COUNT, HIDDEN, 2 * WIDTH)
    check(stacked(data, alternate), parts(right["gate_up"], right["down"], alternate))


def test_what_is_wrong_is_named(stacked: Open) -> None:
    made = stacked(
        {"gate_up": torch.ones(COUNT, HIDDEN, 2 * WIDTH - 2), "down": torch.ones(1).to(torch.int8)}
    )
    with pytest.raises(ModelLoadError, match=r"'gate_up' has shape \[3, 64, 190\].*implies \[3, 64, 192\]"):
        made.take("layer.0.gate.weight", (WIDTH, HIDDEN))
    with pytest.raises(ModelLoadError, match=r"'down' has shape \[1\].*implies \[3, 96, 64\]"):
        made.take("layer.2.down.weight", (HIDDEN, WIDTH))
    assert "layer.0.gate.bias" not in made
    with pytest.raises(ModelLoadError, match="'gate_up_bias' is missing"):
        made.take("layer.0.gate.bias", (WIDTH,))
    made = stacked({"down": torch.ones(COUNT, WIDTH, HIDDEN, dtype=torch.int8)})
    with pytest.raises(ModelLoadError, match=r"'down' has type torch.int8, which is not supported"):
        made.take("layer.2.down.weight", (HIDDEN, WIDTH))
