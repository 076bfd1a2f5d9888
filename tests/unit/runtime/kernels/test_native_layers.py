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
from runtime.kernels.native.tuning import STEPS, settings, tune
from runtime.layers.dense import FEW_ROWS, DenseLinear, product_of
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
    for size in (4, 2, 1):
        tune(native, size)  # as what it is
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
    ("rows", "outputs", "inputs"),
    [
        (0, 5, 96), (1, 37, 96), (2, 37, 97), (3, 8, 1), (4, 37, 96), (5, 70, 40), (6, 3, 33), (7, 64, 96),
        (16, 37, 600), (33, 64, 96), (64, 16, 96), (70, 131, 257), (97, 40, 300),
    ],
)  # fmt: skip
def test_products(rows: int, outputs: int, inputs: int, biased: bool, dtype: torch.dtype) -> None:
    """More inputs than are read at once, rows that are no multiple of those kept in registers, panels that
    are not full."""
    weight, x = torch.randn(outputs, inputs).to(dtype), torch.randn(rows, inputs).to(dtype)
    bias = torch.randn(outputs).to(dtype) if biased else None
    product = product_of(weight)
    assert product is not None
    made = product(x, bias)
    right = F.linear(x.double(), weight.double(), None if bias is None else bias.double()).to(dtype)
    torch.testing.assert_close(
        made, right, **({} if dtype == torch.bfloat16 else {"atol": 1e-4, "rtol": 1e-4})
    )
    for row in range(rows):  # whatever else there is
        assert torch.equal(product(x[row : row + 1], bias)[0], made[row])
    assert torch.equal(product(x.t().contiguous().t(), bias), made)
    some = torch.randperm(outputs)[:3]
    assert torch.equal(product.weight(), weight)
    assert torch.equal(product.weight(some), weight[some])


def test_matrices_it_is_not_for() -> None:
    assert product_of(torch.randn(8, 64).half()) is None
    assert product_of(torch.empty(8, 64, device="meta")) is None
    assert product_of(torch.empty(0, 64)) is None
    assert product_of(torch.zeros(32, 40, dtype=torch.int8), torch.ones(32)) is None


def test_rows_that_are_not_numbers_spoil_no_other() -> None:
    weight, x = torch.randn(40, 64), torch.randn(5, 64)
    product = product_of(weight)
    assert product is not None
    right = product(x, None)
    x[1, 3], x[3, 0] = float("nan"), float("inf")
    made = product(x, None)
    assert made[1].isnan().all()
    assert not made[3].isfinite().any()
    assert torch.equal(made[[0, 2, 4]], right[[0, 2, 4]])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"),
    [(1, 16, 192), (3, 40, 16), (4, 5, 48), (16, 37, 192), (33, 64, 528), (70, 131, 192), (100, 32, 64)],
)
def test_products_of_integers(rows: int, outputs: int, inputs: int, biased: bool) -> None:
    weight, x = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8), torch.randn(rows, inputs)
    scale, bias = torch.rand(outputs), torch.randn(outputs) if biased else None
    product = product_of(weight, scale)
    assert product is not None
    x *= torch.logspace(-9, 9, rows)[:, None]
    largest = x.abs().amax(1, keepdim=True)
    right = (x / largest * 127).round() @ weight.float().t() * (largest / 127 * scale)
    right = right if bias is None else right + bias
    made = product(x, bias)
    torch.testing.assert_close(made, right, atol=1e-5, rtol=1e-5)
    for row in range(rows):  # whatever else there is
        assert torch.equal(product(x[row : row + 1], bias)[0], made[row])
    assert torch.equal(product(x.t().contiguous().t(), bias), made)
    assert torch.equal(product.weight(), weight)
    short = product(x.bfloat16(), bias)
    assert torch.equal(short, product(x.bfloat16().float(), bias).bfloat16())
    x[0], x[-1, 7] = 0.0, float("nan") if rows > 2 else float("inf")
    assert product(x, bias)[-1].isfinite().sum() == 0
    assert rows == 1 or torch.equal(product(x, bias)[0], torch.zeros(outputs) if bias is None else bias)


SETTINGS = [
    (streams, visit, rows)
    for streams, visit in ((1, 1), (2, 256), (2, 1024), (3, 2048), (4, 1024), (96, 1 << 20))
    for rows in (1, 3, 6, 8)
]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(("outputs", "inputs"), [(40, 16), (300, 336)])
def test_no_setting_changes_a_bit(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    """Those that may be measured, and any other."""
    native, whole = library(), dtype == torch.int8
    assert native is not None
    weight = torch.randint(-127, 128, (outputs, inputs)).to(dtype) if whole else torch.randn(outputs, inputs)
    product = product_of(weight.to(dtype), torch.rand(outputs) if whole else None)
    assert product is not None
    measured = {setting for step in STEPS for setting in settings(native.lanes, step)}
    assert {setting.streams for setting in measured} > {1}
    size = dtype.itemsize
    for rows in (1, 2, 3, 5, 7, 8, 9, 12, 16, 17, 24, 97):
        x = torch.randn(rows, inputs).to(torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
        native.set_product(size, 0, 17, 0, 0, 0)  # as it comes
        right = product(x, None)
        for setting in [*measured, *SETTINGS]:
            native.set_product(size, 0, 17, *setting)
            assert torch.equal(product(x, None), right), (rows, setting)
    native.set_product(size, 0, 17, 0, 0, 0)


def test_all_packed_products_are_computed_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = DenseLinear(torch.randn(8, 64), pack=True)
    monkeypatch.setattr("runtime.layers.dense.F.linear", None)
    assert linear.few_rows == FEW_ROWS
    for rows in (1, FEW_ROWS, 4 * FEW_ROWS):
        assert linear(torch.randn(rows, 64)).shape == (rows, 8)


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
