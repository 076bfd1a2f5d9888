"""The layers' kernels in C give what torch gives: on every kind of processor, in both types, with threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.config.model import RopeSpec
from runtime.kernels.native import layers
from runtime.kernels.native.library import library
from runtime.layers.dense import DenseLinear
from runtime.layers.mlp import GatedMLP
from runtime.layers.norm import RMSNorm
from runtime.layers.rope import Rotary

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler")
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
CPU = torch.device("cpu")


@pytest.fixture(autouse=True, params=[4, 8, 16, "tiles"])
def lanes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every kind of processor that this one can be."""
    native = library()
    assert native is not None
    tiles = request.param == "tiles"
    most = 16 if tiles else request.param
    if native.use_lanes(most, tiles) < most or native.tiles != tiles:
        native.use_lanes(16)
        pytest.skip(f"this processor has no vectors of {most} floats, or no tiles")
    torch.manual_seed(3)
    yield
    native.use_lanes(16)


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(layers, "SHARED", 1)  # whatever the size
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def close(found: Tensor, right: Tensor) -> None:
    """To the last digits of the type."""
    digits = 1e-5 if found.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found, right, atol=digits, rtol=digits)


def without(monkeypatch: pytest.MonkeyPatch, compute: Callable[[], Tensor]) -> Tensor:
    """By torch."""
    with monkeypatch.context() as patch:
        patch.setattr("runtime.kernels.native.layers.library", lambda: None)
        return compute()


@TYPES
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(
    ("rows", "outputs"), [(1, 37), (2, 37), (3, 8), (4, 37), (5, 70), (16, 37), (33, 64), (64, 16), (70, 131)]
)
def test_products(rows: int, outputs: int, biased: bool, dtype: torch.dtype) -> None:
    weight, x = torch.randn(outputs, 96).to(dtype), torch.randn(rows, 96).to(dtype)
    bias = torch.randn(outputs).to(dtype) if biased else None
    product = layers.product_of(weight)
    assert product is not None
    made = product(x, bias)
    close(made, F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(dtype))
    for row in range(rows):  # whatever else there is
        assert torch.equal(product(x[row : row + 1], bias)[0], made[row])
    assert torch.equal(product(x.t().contiguous().t(), bias), made)


def test_matrices_it_is_not_for() -> None:
    assert layers.product_of(torch.randn(8, 40)) is None
    assert layers.product_of(torch.randn(8, 64).half()) is None
    assert layers.product_of(torch.randn(64, 8).t()) is None
    assert layers.product_of(torch.empty(8, 64, device="meta")) is None


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("rows", "outputs"), [(1, 16), (3, 40), (16, 37), (33, 64), (70, 131)])
def test_products_of_integers(rows: int, outputs: int, biased: bool) -> None:
    weight, x = torch.randint(-127, 128, (outputs, 192), dtype=torch.int8), torch.randn(rows, 192)
    scale, bias = torch.rand(outputs), torch.randn(outputs) if biased else None
    product, native = layers.int8_product_of(weight, scale, bias), library()
    assert native is not None
    if not native.tiles:
        assert product is None
        return
    assert product is not None
    x *= torch.logspace(-9, 9, rows)[:, None]
    largest = x.abs().amax(1, keepdim=True)
    right = (x / largest * 127).round() @ weight.float().t() * (largest / 127 * scale)
    right = right if bias is None else right + bias
    made = product(x)
    torch.testing.assert_close(made, right, atol=1e-5, rtol=1e-5)
    for row in range(rows):  # whatever else there is
        assert torch.equal(product(x[row : row + 1])[0], made[row])
    assert torch.equal(product(x.t().contiguous().t()), made)
    short = product(x.bfloat16())
    assert torch.equal(short, product(x.bfloat16().float()).bfloat16())
    x[0], x[-1, 7] = 0.0, float("nan") if rows > 2 else float("inf")
    assert product(x)[-1].isfinite().sum() == 0
    assert rows == 1 or torch.equal(product(x)[0], torch.zeros(outputs) if bias is None else bias)


def test_matrices_of_integers_it_is_not_for() -> None:
    def made(outputs: int, inputs: int) -> object:
        return layers.int8_product_of(
            torch.zeros(outputs, inputs, dtype=torch.int8), torch.ones(outputs), None
        )

    assert made(15, 64) is None
    assert made(16, 96) is None


def test_few_rows_are_computed_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = DenseLinear(torch.randn(8, 64))
    monkeypatch.setattr("runtime.layers.dense.F.linear", None)
    monkeypatch.setattr("runtime.layers.dense.torch.mm", None)
    assert linear(torch.randn(linear.few_rows, 64)).shape == (linear.few_rows, 8)
    with pytest.raises(TypeError):
        linear(torch.randn(linear.few_rows + 1, 64))


@TYPES
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("wide", [True, False])
def test_norms(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, wide: bool) -> None:
    weight = torch.randn(96) if wide else torch.randn(96).to(dtype)
    x, more = torch.randn(9, 96).to(dtype), torch.randn(9, 96).to(dtype)
    heads, qkv = (
        weight[:32].expand(4, -1).contiguous() * torch.tensor([[1], [2], [3], [4]]),
        more.view(9, 6, 16),
    )
    streams = x.clone(), x.clone()
    norm, plain = RMSNorm(weight, 1e-5), without(monkeypatch, lambda: RMSNorm(weight, 1e-5))  # type: ignore[arg-type, return-value]
    assert norm._kernel is not None
    assert plain._kernel is None  # type: ignore[attr-defined]
    close(norm(x), plain(x))
    close(norm.of_sum(streams[0], more), plain.of_sum(streams[1], more))  # type: ignore[attr-defined]
    assert torch.equal(*streams)
    by_head = RMSNorm(heads.to(weight.dtype)[:, :16].contiguous(), 1e-5)
    right = (
        F.rms_norm(qkv[:, :4].float(), (16,), eps=1e-5).to(dtype if not wide else torch.float32)
        * by_head.weight
    )
    close(by_head(qkv[:, :4]), right.to(dtype))


@TYPES
@pytest.mark.usefixtures("threads")
def test_rotary_embedding(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    spec = RopeSpec(theta=100.0, dims=32)
    rotary, plain = Rotary(spec, 48, CPU), without(monkeypatch, lambda: Rotary(spec, 48, CPU))  # type: ignore[arg-type, return-value]
    qkv, positions = torch.randn(5, 7, 48).to(dtype), torch.tensor([0, 1, 7, 300, 2])
    angles = rotary.angles(positions, dtype)
    found, right = qkv.clone(), qkv.clone()
    rotary.turn_(found[:, :5], *angles)
    plain.turn_(right[:, :5], *angles)  # type: ignore[attr-defined]
    close(found, right)
    assert torch.equal(found[:, 5:], qkv[:, 5:])


@TYPES
@pytest.mark.usefixtures("threads")
def test_gates(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    mlp = GatedMLP(DenseLinear(torch.randn(64, 32)), DenseLinear(torch.randn(32, 32)))
    both = (torch.randn(6, 64) * 30).to(dtype)
    both[0, 0], both[0, 1], both[1, 0] = -200.0, 200.0, float("nan")
    found, right = mlp.activate(both), without(monkeypatch, lambda: mlp.activate(both))
    torch.testing.assert_close(
        found, right, atol=1e-5, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, equal_nan=True
    )
