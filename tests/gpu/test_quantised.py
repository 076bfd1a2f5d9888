"""Matrices in codes on a GPU give what they give on the CPU."""

from __future__ import annotations

import pytest
import torch

from runtime.layers.quantised.codes import Codes, nibbles
from runtime.layers.quantised.linear import QuantisedLinear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


def codes(kind: str, outputs: int, inputs: int) -> Codes:
    generator = torch.Generator().manual_seed(2)
    numbers = torch.randn(outputs, inputs, generator=generator)
    scale = torch.rand(outputs, inputs // 128, generator=generator) / 8
    match kind:
        case "int4":
            four = torch.randint(0, 16, (outputs, inputs), generator=generator)
            return Codes(nibbles(four), scale.half(), 128, scale * 8)
        case "int8":
            return Codes((numbers * 30).clamp(-127, 127).to(torch.int8), scale[:, :1].contiguous(), inputs)
        case _:
            return Codes(numbers.to(torch.float8_e4m3fn), scale, 128)


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
@pytest.mark.parametrize("rows", [1, 33, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_the_cpus(kind: str, rows: int, dtype: torch.dtype) -> None:
    """With the kernel, and with numbers made before."""
    part = codes(kind, 520, 1024)
    x = torch.randn(rows, 1024, generator=torch.Generator().manual_seed(3)).to(dtype)
    right = QuantisedLinear([part], None)(x.float())
    cuda = torch.device("cuda")
    got = QuantisedLinear([part.to(cuda)], None)(x.to(cuda)).cpu().float()
    at = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got, right, atol=at * float(right.abs().max()), rtol=at)
