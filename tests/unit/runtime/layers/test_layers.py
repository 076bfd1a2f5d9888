"""Layers against their definitions; every way a product can be computed gives the same numbers."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from runtime.config.model import RopeSpec
from runtime.kernels.native.library import library
from runtime.layers import dense
from runtime.layers.dense import DenseLinear, size_of
from runtime.layers.mlp import GatedMLP, PlainMLP
from runtime.layers.norm import AllHeadsNorm, RMSNorm
from runtime.layers.rope import Rotary, inverse_frequencies
from runtime.parallel import ALONE, Group


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 8, 33, 64, 65, 200])
@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_linear(rows: int, pack: bool, biased: bool) -> None:
    torch.manual_seed(rows)
    weight, x = torch.randn(40, 24), torch.randn(rows, 24)
    bias = torch.randn(40) if biased else None
    made = DenseLinear(weight, bias, pack=pack)
    assert made.packed == pack
    right = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(made(x), right.float())


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 7, 8, 9, 63, 64, 65, 200, 2049])
@pytest.mark.parametrize("pack", [True, False])
def test_linear_in_bfloat16(rows: int, pack: bool) -> None:
    if pack and not dense.can_pack(torch.bfloat16):
        pytest.skip("this processor does not multiply bfloat16")
    torch.manual_seed(rows)
    weight, x = torch.randn(48, 32).bfloat16(), torch.randn(rows, 32).bfloat16()
    layer = DenseLinear(weight, pack=pack)
    assert layer.packed == pack
    made = layer(x)
    assert made.shape == (rows, 48)
    assert made.dtype == torch.bfloat16
    torch.testing.assert_close(made.float(), x.float() @ weight.float().T, atol=0.1, rtol=0.02)


def test_products_come_in_few_sizes() -> None:
    """A library keeps a program for each."""
    sizes = [size_of(rows) for rows in range(1, 4097)]
    assert sizes[:12] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 10, 12, 12]
    assert all(rows <= size < 1.25 * rows for rows, size in enumerate(sizes, 1))
    assert len(set(sizes)) == 8 + 4 * 9


@pytest.fixture
def two_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor with instructions for bfloat16: oneDNN's product competes with the library's."""
    if library() is None:
        pytest.skip("there is no C compiler")
    monkeypatch.setattr(dense, "_is_packable", lambda dtype: dtype in dense.PACKABLE)
    monkeypatch.setattr(dense, "_pack", lambda weight: weight)
    monkeypatch.setattr(
        DenseLinear,
        "_sized_product",
        lambda self, x, packed: F.linear(x, self.weight if packed is None else packed),
    )


@pytest.mark.usefixtures("two_layouts")
@pytest.mark.parametrize(("faster_up_to", "kept"), [(0, True), (4, True), (1 << 30, False)])
def test_few_rows_take_the_weights_that_are_faster_here(
    monkeypatch: pytest.MonkeyPatch, faster_up_to: int, kept: bool
) -> None:
    """One that is faster for all rows that are timed is the only one."""
    method = dense.Dense(pack=True, both=True)
    layers = [method.shared(torch.randn(40, 24).bfloat16()) for _ in range(2)]
    assert all(layer.both for layer in layers)
    x = torch.randn(1, 24).bfloat16()
    before = layers[0](x)
    seconds = iter([(0.0 if rows <= faster_up_to else 2.0, 1.0) for rows in dense._TIMED_ROWS])
    monkeypatch.setattr(dense, "_least_s", lambda linears, rows: next(seconds))
    method.tune()
    assert {layer.both for layer in layers} == {kept}
    assert {layer.few_rows for layer in layers} == {min(faster_up_to, dense.FEW_ROWS)}
    torch.testing.assert_close(layers[0](x), before)


@pytest.mark.usefixtures("two_layouts")
def test_the_faster_one_is_found_by_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [DenseLinear(torch.randn(40, 24).bfloat16(), pack=True, both=True) for _ in range(2)]
    packed = DenseLinear._sized_product

    def slowly(*given: Any) -> Any:
        until = time.thread_time() + 0.005
        while time.thread_time() < until:
            pass
        return packed(*given)

    monkeypatch.setattr(DenseLinear, "_sized_product", slowly)
    up_to, (ours_s, packed_s) = dense.time_rows(layers)
    assert up_to == dense._TIMED_ROWS[-1]
    assert ours_s < packed_s


@pytest.mark.usefixtures("two_layouts")
def test_there_are_both_where_that_is_asked_for_in_bfloat16() -> None:
    weight = torch.randn(40, 24)
    assert not dense.Dense(pack=True, both=True).of(weight, None).both
    assert not dense.Dense(pack=True).of(weight.bfloat16(), None).both
    assert dense.Dense(pack=True, both=True).of(weight.bfloat16(), None).both
    assert not dense.Dense(both=True).of(weight.bfloat16(), None).packed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_packed_weights_are_the_only_ones(dtype: torch.dtype) -> None:
    if not dense.can_pack(dtype):
        pytest.skip("this processor does not multiply bfloat16")
    method, weight, x = dense.Dense(pack=True), torch.randn(40, 24).to(dtype), torch.randn(2, 24).to(dtype)
    made, some = method.of(weight, None), torch.tensor([3, 39])
    assert made._plain is None
    assert torch.equal(made.some(x, some), DenseLinear(weight).some(x, some))
    assert torch.equal(made.weight, weight)
    method.tune()
    torch.testing.assert_close(made(x).float(), F.linear(x.float(), weight.float()), atol=0.1, rtol=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_a_library_it_is_onednn_that_packs(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(dense, "product_of", lambda weight: None)
    if not dense.can_pack(dtype):
        pytest.skip("this processor does not multiply bfloat16")
    weight, bias = torch.randn(40, 24).to(dtype), torch.randn(40).to(dtype)
    made = DenseLinear(weight, bias, pack=True)
    assert made.packed
    assert not made.few_rows
    assert torch.equal(made.weight, weight)
    for rows in (0, 1, 5, 70):
        x = torch.randn(rows, 24).to(dtype)
        right = F.linear(x.float(), weight.float(), bias.float())
        torch.testing.assert_close(made(x).float(), right, atol=0.1, rtol=0.02)


def test_packing_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dense.can_pack(torch.float32)
    assert not dense.can_pack(torch.float16)
    assert not DenseLinear(torch.randn(4, 4).half(), pack=True).packed

    def broken(weight: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such operation")

    monkeypatch.setattr(dense, "product_of", lambda weight: None)
    assert dense.can_pack(torch.float32)
    monkeypatch.setattr(dense, "_pack", broken)
    assert not dense.can_pack(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 3, 16).to(dtype) * 4, torch.randn(3, 16).to(dtype)
    for scale, eps in ((1.0, 1e-6), (1e-4, 1e-5), (0.0, 1e-6)):
        wide = (x * scale).double()
        right = wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()
        tolerance = 1e-5 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(
            RMSNorm(weight, eps)(x * scale).double(), right, atol=tolerance, rtol=tolerance
        )


def test_gated_and_plain_mlp() -> None:
    torch.manual_seed(0)
    gate, up, down, x = torch.randn(12, 8), torch.randn(12, 8), torch.randn(8, 12), torch.randn(5, 8)
    right = (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
    torch.testing.assert_close(GatedMLP(DenseLinear(torch.cat((gate, up))), DenseLinear(down))(x), right)
    right = F.gelu(x @ up.T) @ down.T
    torch.testing.assert_close(PlainMLP(DenseLinear(up), DenseLinear(down), "gelu")(x), right)


@pytest.mark.parametrize("ranks", [1, 2])
def test_norm_over_all_heads(ranks: int) -> None:
    """With two ranks each has half of the heads, and the other's sum of squares."""
    torch.manual_seed(1)
    x, weight = torch.randn(5, 6, 8), torch.randn(6, 8)
    wide = x.double()

    def normalised(part: torch.Tensor) -> torch.Tensor:
        return part / (part.pow(2).mean((1, 2), keepdim=True) + 1e-5).sqrt()

    right = (torch.cat((normalised(wide[:, :4]), normalised(wide[:, 4:])), 1) * weight).float()
    if ranks == 1:
        torch.testing.assert_close(AllHeadsNorm(weight, 4, 1e-5, ALONE)(x), right)
        return

    class Half(Group):
        def sum_(self, x: torch.Tensor) -> torch.Tensor:
            return whole

    squares = x.square().sum(-1)
    whole = torch.stack((squares[:, :4].sum(-1), squares[:, 4:].sum(-1)), -1)
    own = [0, 1, 4]
    made = AllHeadsNorm(weight[own], 2, 1e-5, Half(0, 2))(x[:, own])
    torch.testing.assert_close(made, right[:, own])


@pytest.mark.parametrize("pairs", ["halves", "neighbours"])
def test_part_of_a_head_is_turned(pairs: str) -> None:
    rotary = Rotary(RopeSpec(10000.0, dims=8, pairs=pairs), 16, torch.device("cpu"))
    x = torch.randn(1, 2, 16)
    turned = rotary.turn_(x.clone(), *rotary.angles(torch.tensor([3]), torch.float32))
    assert torch.equal(turned[..., 8:], x[..., 8:])
    other, angle = (4 if pairs == "halves" else 1), torch.tensor(3.0)  # of the first pair
    first = x[..., 0] * angle.cos() - x[..., other] * angle.sin()
    second = x[..., other] * angle.cos() + x[..., 0] * angle.sin()
    torch.testing.assert_close((turned[..., 0], turned[..., other]), (first, second))


def test_rotary_depends_on_distances_only_and_keeps_lengths() -> None:
    torch.manual_seed(0)
    rotary = Rotary(RopeSpec(10000.0), 16, torch.device("cpu"))
    q, k = torch.randn(1, 2, 16), torch.randn(1, 2, 16)

    def turned(x: torch.Tensor, position: int) -> torch.Tensor:
        return rotary.turn_(x.clone(), *rotary.angles(torch.tensor([position]), torch.float32))

    near, far = turned(q, 5) * turned(k, 2), turned(q, 1005) * turned(k, 1002)
    torch.testing.assert_close(near.sum(-1), far.sum(-1), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(turned(q, 777).norm(dim=-1), q.norm(dim=-1))
    torch.testing.assert_close(turned(q, 0), q)
    pair = turned(q, 3)[0, 0, 0]  # by hand: dimensions 0 and 8 turn by 3 radians
    angle = torch.tensor(3.0)
    torch.testing.assert_close(pair, q[0, 0, 0] * angle.cos() - q[0, 0, 8] * angle.sin())


def test_unknown_rope_kind() -> None:
    with pytest.raises(ValueError, match="spiral"):
        inverse_frequencies(RopeSpec(10000.0, "spiral"), 16)
