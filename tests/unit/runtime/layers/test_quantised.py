"""Matrices in codes: products are those of the numbers that the codes stand for, whole, in parts and shared
out; what cannot be read is named."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from runtime.attention.float8 import E4M3, E5M2, rounded, widened
from runtime.config.fields import Fields
from runtime.config.parts.quantization import Quantization, read_quantization
from runtime.kernels.device import INTERPRETED
from runtime.kernels.table import KERNELS
from runtime.layers.dense import Dense, DenseLinear
from runtime.layers.linear import Linear, Projection
from runtime.layers.quantised import linear as linear_module
from runtime.layers.quantised.choose import FORMATS
from runtime.layers.quantised.formats import Float8OnLoad
from runtime.layers.quantised.linear import Quantised, QuantisedLinear
from runtime.layers.weights import Checkpoint, Weights
from runtime.protocol.errors import ModelLoadError
from tests.unit.runtime.layers.quantised_tensors import SCHEMES, Made, awq, fp8, gptq, packed

CPU = torch.device("cpu")
OUTPUTS = {"a": 64, "b": 40}
INPUTS = 96


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def kept(config: dict[str, Any]) -> Quantization:
    found = read_quantization(Fields({"quantization_config": config}, "config.json"))
    assert found is not None
    return found


@contextmanager
def written(
    path: Path, made: dict[str, Made], others: dict[str, Tensor] | None = None
) -> Iterator[tuple[Checkpoint, Weights]]:
    tensors = {f"{name}.{part}": one for name, each in made.items() for part, one in each.tensors.items()}
    save_file({**tensors, **(others or {})}, path / "model.safetensors")
    with Checkpoint(path) as checkpoint:
        yield checkpoint, Weights(checkpoint, torch.float32, CPU)


def load(
    path: Path,
    scheme: str,
    *,
    expand: bool = False,
    own: dict[str, range] | None = None,
    own_inputs: range | None = None,
) -> tuple[Linear, Tensor]:
    """A Linear of both matrices, and their numbers."""
    config, write = SCHEMES[scheme]
    made = {name: write(noise(size, INPUTS, seed=size)) for name, size in OUTPUTS.items()}
    parts = [Projection(name, size, (own or {}).get(name)) for name, size in OUTPUTS.items()]
    with written(path, made) as (checkpoint, weights):
        method = Quantised(FORMATS[config["quant_method"]](kept(config)), Dense(), expand=expand)
        linear = method.load(weights, parts, INPUTS, bias=False, local=own_inputs)
        checkpoint.finish(())  # nothing was left
    numbers = [
        made[part.name].numbers[
            slice(None) if part.local is None else slice(part.local.start, part.local.stop)
        ]
        for part in parts
    ]
    whole = torch.cat(numbers)
    return linear, whole if own_inputs is None else whole[:, own_inputs.start : own_inputs.stop]


def close(got: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(got, right, atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_products_are_those_of_the_numbers(tmp_path: Path, scheme: str, expand: bool) -> None:
    linear, numbers = load(tmp_path, scheme, expand=expand)
    assert isinstance(linear, DenseLinear if expand else QuantisedLinear)
    for rows in (1, 7):
        x = noise(rows, INPUTS, seed=rows)
        close(linear(x), F.linear(x, numbers))
        some = torch.tensor([0, 103, 5, 64, 63, 5])
        close(linear.some(x, some), F.linear(x, numbers[some]))
    x = noise(3, INPUTS).bfloat16()
    if not expand:
        assert linear(x).dtype == torch.bfloat16
        torch.testing.assert_close(linear(x), F.linear(x.float(), numbers).bfloat16())


@pytest.mark.skipif(not INTERPRETED, reason="kernels take no tensors of a CPU; tests/gpu has the same")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("scheme", ["int8", "int4, zero points", "fp8, blocks", "gptq, ordered"])
def test_products_of_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    """As on a GPU: here the kernel is interpreted."""
    pytest.importorskip("triton")
    matmul = KERNELS.load("codes_matmul")
    monkeypatch.setattr(linear_module, "kernel", lambda name, device: matmul)
    linear, numbers = load(tmp_path, scheme)
    x = noise(2, INPUTS)
    close(linear(x), F.linear(x, numbers))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_share_of_the_outputs(tmp_path: Path, scheme: str) -> None:
    linear, numbers = load(tmp_path, scheme, own={"a": range(16, 48), "b": range(21, 40)})
    x = noise(5, INPUTS)
    assert numbers.shape == (51, INPUTS)
    close(linear(x), F.linear(x, numbers))


@pytest.mark.parametrize("own", [range(48), range(48, 96), range(8, 96), range(20, 54)])
@pytest.mark.parametrize("scheme", [name for name in SCHEMES if "ordered" not in name])
def test_a_share_of_the_inputs(tmp_path: Path, scheme: str, own: range) -> None:
    """Also where it cuts groups and rectangles."""
    linear, numbers = load(tmp_path, scheme, own_inputs=own)
    x = noise(5, len(own))
    close(linear(x), F.linear(x, numbers))


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if "ordered" in name])
def test_inputs_in_an_order_of_their_own_are_not_shared_out(tmp_path: Path, scheme: str) -> None:
    with pytest.raises(ModelLoadError, match=r"'a' cannot be shared out by its inputs.*\n?.*tp_size 1"):
        load(tmp_path, scheme, own_inputs=range(48))


@pytest.mark.parametrize(("scheme", "share"), [("int8", 0.26), ("fp8, channels", 0.27), ("awq", 0.3)])
def test_codes_are_what_memory_holds(tmp_path: Path, scheme: str, share: float) -> None:
    """Of float32's; groups of 16 weigh more than those of 128 that are usual."""
    linear, numbers = load(tmp_path, scheme)
    assert isinstance(linear, QuantisedLinear)
    assert linear.nbytes < share * numbers.nbytes


@pytest.mark.parametrize("expand", [False, True])
def test_some_of_the_projections_are_plain(tmp_path: Path, expand: bool) -> None:
    made = {"a": awq(noise(64, INPUTS), group=16)}
    plain, biases = noise(40, INPUTS, seed=1), {"a.bias": noise(64, seed=2), "b.bias": noise(40, seed=3)}
    with written(tmp_path, made, {"b.weight": plain, **biases}) as (checkpoint, weights):
        method = Quantised(FORMATS["awq"](kept(SCHEMES["awq"][0])), Dense(), expand=expand)
        linear = method.load(weights, [Projection("a", 64), Projection("b", 40)], INPUTS, bias=True)
        alone = method.load(weights, [Projection("b", 40)], INPUTS, bias=False)
        checkpoint.finish(())
    x, added = noise(4, INPUTS), torch.cat(list(biases.values()))
    close(linear(x), F.linear(x, torch.cat((made["a"].numbers, plain)), added))
    assert isinstance(alone, DenseLinear)


def test_rounding_while_loading(tmp_path: Path) -> None:
    """fp8 has four significant bits: each number is off by a sixteenth of itself at most, and small ones by
    half the smallest step. Outputs of zeros stay zeros."""
    plain = noise(64, INPUTS)
    plain[3] = 0
    save_file({"a.weight": plain, "head.weight": plain.clone()}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        weights = Weights(checkpoint, torch.float32, CPU)
        method = Quantised(Float8OnLoad(), Dense(), plain=("head",), expand=False)
        linear = method.load(weights, [Projection("a", 64)], INPUTS, bias=False)
        half = method.load(weights, [Projection("a", 64)], INPUTS, bias=False, local=range(48, 96))
        head = method.load(weights, [Projection("head", 64)], INPUTS, bias=False)
    assert isinstance(head, DenseLinear)
    numbers = linear(torch.eye(INPUTS)).T
    step = plain.abs().amax(1, keepdim=True) / 448 * 2**-10
    assert bool(((numbers - plain).abs() <= plain.abs() / 16 + step).all())
    assert (numbers - plain).abs().max() > 1e-3
    assert torch.equal(half(torch.eye(48)).T, numbers[:, 48:])  # a rank's share has the same numbers


def test_eight_bits_are_torchs() -> None:
    for kind in (E4M3, E5M2):
        codes = torch.arange(256, dtype=torch.uint8).view(kind)
        right = codes.float()
        finite = right.isfinite()
        for dtype in (torch.float32, torch.bfloat16):
            assert torch.equal(widened(codes, dtype)[finite], right[finite].to(dtype))
        most = torch.finfo(kind).max
        assert rounded(torch.tensor([1e9, -1e9, most]), kind).float().tolist() == [most, -most, most]
        assert torch.equal(rounded(right[finite], kind).view(torch.uint8), codes[finite].view(torch.uint8))


# -- what is refused -----------------------------------------------------------------------------------------


def _without(name: str, part: str) -> Made:
    made = SCHEMES[name][1](noise(64, INPUTS))
    return Made({key: one for key, one in made.tensors.items() if key != part}, made.numbers)


def _changed(name: str, **changes: Tensor) -> Made:
    made = SCHEMES[name][1](noise(64, INPUTS))
    return Made({**made.tensors, **changes}, made.numbers)


BROKEN: dict[str, tuple[str, Made, str]] = {
    "no zero points": ("awq", _without("awq", "qzeros"), "'a.qzeros' is missing"),
    "groups of another size": ("gptq", gptq(noise(64, INPUTS), group=32), r"'a.qzeros' has shape \[3, 8\]"),
    "a scale too many": ("int8", _changed("int8", weight_scale=torch.ones(65)), r"does not fit \[64, 96\]"),
    "rectangles of another size": (
        "fp8, blocks", fp8(noise(64, INPUTS), block=(16, 16)), r"'a.weight_scale' has shape \[4, 6\]"
    ),
    "groups of different sizes": (
        "gptq, ordered",
        _changed("gptq, ordered", g_idx=torch.zeros(INPUTS, dtype=torch.int32)),
        "do not all have the size of the configuration, 16",
    ),
    "a bias": ("gptq", _changed("gptq", bias=torch.ones(64)), "'a.bias' is a bias that the model has no"),
    "floats for codes": ("int8", _changed("int8", weight=noise(64, INPUTS)), "type torch.float32"),
    "no numbers": (
        "fp8, channels",
        _changed("fp8, channels", weight=torch.full((64, INPUTS), torch.nan).to(E4M3)),
        "holds what is no number",
    ),
    "packed for 8 bits": ("int4", packed(noise(64, INPUTS), group=16, bits=8), r"\[64, 24\].*\[64, 12\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_broken_tensors_are_named(tmp_path: Path, case: str) -> None:
    scheme, made, told = BROKEN[case]
    config = SCHEMES[scheme][0]
    with written(tmp_path, {"a": made}) as (_, weights):
        method = Quantised(FORMATS[config["quant_method"]](kept(config)), Dense(), expand=False)
        with pytest.raises(ModelLoadError, match=told):
            method.load(weights, [Projection("a", 64)], INPUTS, bias=False)


def _refused(told: str, base: str, *path: str, **changes: Any) -> tuple[dict[str, Any], str]:
    def copied(config: dict[str, Any], path: Sequence[str]) -> dict[str, Any]:
        return {**config, **({path[0]: copied(config[path[0]], path[1:])} if path else changes)}

    return copied(SCHEMES[base][0], path), told


SCHEME = ("config_groups", "group_0", "weights")


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes' is not supported; known: compressed-tensors, fp8"),
        ({"bits": 4}, "'' is not supported"),
        _refused("must be 4, got 3", "awq", bits=3),
        _refused("'version' 'gemv' is not supported", "awq", version="GEMV"),
        _refused("'zero_point' false", "awq", zero_point=False),
        _refused("'bits' must be 4 or 8, got 2", "gptq", bits=2),
        _refused("'group_size' must be an integer of at least 1, got 0", "gptq", group_size=0),
        _refused("'checkpoint_format' 'marlin'", "gptq", checkpoint_format="marlin"),
        _refused("defines no scheme", "int8", config_groups={}),
        _refused("several schemes", "int4", "config_groups", other={"weights": {"num_bits": 8}}),
        _refused("3 bits of type 'int' in the format 'pack-quantized'", "int4", *SCHEME, num_bits=3),
        _refused("4 bits of type 'float' in the", "int4", *SCHEME, type="float", format="nvfp4"),
        _refused("the strategy 'token'", "int8", *SCHEME, strategy="token"),
        _refused("sparse weights", "int8", sparsity_config={"format": "sparse-24-bitmask"}),
        _refused("'weight_block_size' must be two sizes", "fp8 of transformers", weight_block_size=[128]),
    ],
)  # fmt: skip
def test_configurations_that_are_refused(config: dict[str, Any], told: str) -> None:
    with pytest.raises(ModelLoadError, match=told):
        kept(config)
