"""A matrix times one row, and tokens that are moved in a pool. Without a GPU in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from runtime.kernels.gemv import gemv, plain_gemv
from runtime.kernels.kv_store import move_kv, plain_move_kv

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs", "bias"), [(8, 512, False), (9, 40, True), (24, 1100, False)])
def test_gemv(outputs: int, inputs: int, bias: bool, dtype: torch.dtype) -> None:
    dice = torch.Generator().manual_seed(outputs)
    weight = torch.randn(outputs, inputs + 8, generator=dice).to(DEVICE, dtype)[:, :inputs]
    x = torch.randn(1, inputs, generator=dice).to(DEVICE, dtype)
    added = torch.randn(outputs, generator=dice).to(DEVICE, dtype) if bias else None
    got, right = gemv(x, weight, added), plain_gemv(x, weight, added)
    at = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(got, right, atol=at * float(right.abs().max()), rtol=at)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
def test_tokens_are_moved(dtype: torch.dtype) -> None:
    dice = torch.Generator().manual_seed(3)
    pool = torch.randint(0, 200, (3, 9, 2, 6), generator=dice).to(DEVICE, dtype)
    sources, targets = (torch.tensor(slots, dtype=torch.int32, device=DEVICE) for slots in ([7, 8], [4, 0]))
    right = pool.clone()
    plain_move_kv(right, sources, targets)
    move_kv(pool, sources, targets)
    assert torch.equal(pool, right)
    assert torch.equal(pool[:, 4], pool[:, 7])
