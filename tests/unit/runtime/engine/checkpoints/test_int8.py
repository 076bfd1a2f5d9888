"""Matrices and inputs of 8 bits: as a model whose products are rounded so, the same in every batch."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runtime.config.model import ModelSpec
from runtime.config.runner import RunnerConfig
from runtime.engine.runner import TorchRunner
from runtime.kernels.native import products
from runtime.kernels.native.library import library
from runtime.layers import int8
from runtime.layers.dense import Dense
from runtime.layers.int8 import Int8, Int8Linear
from runtime.layers.quantised.choose import method_for
from runtime.protocol.errors import ModelLoadError
from tests.unit.runtime.engine.ranks.ranks_here import RanksHere
from tests.unit.runtime.engine.sampling.test_logits import AllLogits

pytestmark = pytest.mark.skipif(not int8.can_multiply(), reason="this processor has no such products")
SETTINGS: dict[str, Any] = {
    "max_total_tokens": 1024, "dtype": "float32", "device": "cpu", "threads": 1, "quantization": "w8a8_int8",
}  # fmt: skip


def rounded(x: Tensor, levels: int) -> Tensor:
    """Each row to so many levels of its largest number, on either side of zero."""
    step = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / levels
    return (x / step).round() * step


class RoundedLinear(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = rounded(linear.weight.detach(), 127), linear.bias
        self.levels = Int8Linear(self.weight).levels

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(rounded(x, self.levels), self.weight, self.bias)


@pytest.fixture
def case(tiny: Any) -> Any:
    """In transformers, with rounded products."""
    plain = tiny("llama, tied, biased")
    model = copy.deepcopy(plain.model)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, RoundedLinear(module))
    return type(plain)(plain.path, model)


@pytest.mark.parametrize("rows", [1, 2, 7, 100])
@pytest.mark.parametrize("levels", [63, None])
def test_linear(rows: int, levels: int | None) -> None:
    """By FBGEMM, and by what is faster here."""
    torch.manual_seed(rows)
    weight, x, bias = torch.randn(48, 80), torch.randn(rows, 80) * torch.rand(rows, 1) * 9, torch.randn(48)
    weight[5] = 0
    x[-1] = 0
    made = Int8Linear(weight, bias, levels)
    right = rounded(x, made.levels).double() @ rounded(weight, 127).double().T + bias
    torch.testing.assert_close(made(x), right.float(), atol=1e-4, rtol=1e-5)
    some = torch.tensor([47, 0, 5])
    torch.testing.assert_close(made.some(x, some), right.float()[:, some], atol=1e-4, rtol=1e-5)
    assert torch.equal(made(x[:1]), made(x)[:1])  # whatever else is in the batch
    assert made(x.bfloat16()).dtype == made.some(x.bfloat16(), some).dtype == torch.bfloat16


def test_the_largest_sums_are_not_cut_off() -> None:
    """Where a processor adds products of 8 bits in 16 they would be."""
    ones = torch.ones(3, 4096)
    torch.testing.assert_close(Int8Linear(ones)(ones), torch.full((3, 3), 4096.0))
    torch.testing.assert_close(Int8Linear(ones)(-ones), torch.full((3, 3), -4096.0))


def test_what_is_not_finite_stays_so() -> None:
    linear, x = Int8Linear(torch.randn(20, 16)), torch.randn(3, 16)
    x[1, 3], x[2, 0] = float("nan"), float("inf")
    for y in (linear(x), linear.some(x, torch.arange(4))):
        assert y.sum(-1).isfinite().tolist() == [True, False, False]


def test_logits(case: Any, tiny: Any, prompt: Any, drive: Any) -> None:
    ids = prompt(60, seed=8)
    method = method_for(ModelSpec.from_dir(case.path), "w8a8_int8", Dense(), expand=False)
    driver = drive(AllLogits(case.path, method=method))
    driver.step([driver.ask(driver.new(), ids)])
    right, plain = case.logits(ids), tiny("llama, tied, biased").logits(ids)
    off = (driver.runner.seen - right).norm() / right.norm()
    # Another order of a sum changes last digits, and now and then a number's level.
    assert off < 0.2 * (right - plain).norm() / right.norm()


def test_tokens_do_not_depend_on_the_batch(case: Any, prompt: Any, drive: Any) -> None:
    prompts = [prompt(length, seed=length) for length in (1, 9, 40, 70)]
    config = RunnerConfig(**SETTINGS)
    with contextlib.closing(TorchRunner.load(case.path, ModelSpec.from_dir(case.path), config)) as runner:
        together = drive(runner, page=1, seed=1).generate(prompts, 24, chunk=13)
        assert [drive(runner).generate([ids], 24)[0] for ids in prompts] == together
    assert together == [case.greedy(ids, 24) for ids in prompts]


def test_ranks_share_it(case: Any, prompt: Any, drive: Any) -> None:
    ids = prompt(30, seed=2)
    with contextlib.closing(RanksHere(case.path, 2, RunnerConfig(**SETTINGS, tp_size=2))) as ranks:
        assert drive(ranks).generate([ids], 1) == [case.greedy(ids, 1)]


def test_where_it_cannot_be_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelLoadError, match="computed on the CPU, the model is on meta"):
        Int8().shared(torch.empty(4, 4, device="meta"))

    def absent(*given: Tensor) -> None:
        raise RuntimeError("no such engine")

    monkeypatch.setattr(int8, "product_of", lambda *given, **named: None)
    monkeypatch.setattr(int8, "_pack", absent)
    with pytest.raises(ModelLoadError, match="AVX2"):
        Int8()


def test_no_panels_are_made_for_a_processor_whose_fbgemm_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    native = library()
    if native is None or native.reads_rows(40, 64, 1):
        pytest.skip("no panels of integers here")

    def never(weight: Tensor) -> Tensor:
        raise AssertionError("panels")

    monkeypatch.setattr(int8, "_has_vnni", lambda: True)
    monkeypatch.setattr(products, "to_panels", never)
    # Half of the levels, so that this processor's FBGEMM does not overflow either.
    monkeypatch.setattr(int8, "input_levels", lambda: 63)
    weight, x = torch.randn(40, 64), torch.randn(3, 64)
    made = int8.Int8Linear(weight)
    assert made.product is None
    torch.testing.assert_close(made(x), x @ weight.T, atol=1.0, rtol=0)
