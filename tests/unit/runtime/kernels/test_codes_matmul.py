"""The product with codes gives what its plain twin gives. Without a GPU in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from runtime.kernels.codes_matmul import codes_matmul, plain_codes_matmul

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
F8 = torch.float8_e4m3fn


def given(
    kind: torch.dtype, outputs: int, inputs: int, group: int, offset: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(inputs)
    width = inputs // 2 if kind == torch.uint8 else inputs
    data = torch.randint(0, 256, (outputs, width), generator=generator, dtype=torch.uint8)
    if kind == F8:
        data[(data & 127) == 127] = 0  # no numbers
    groups = -(-inputs // group)
    scale = torch.rand(outputs, groups, generator=generator) / 16
    if kind == torch.uint8:
        scale = scale.half()
    zeros = torch.rand(outputs, groups, generator=generator) if offset else None
    return data.view(kind).to(DEVICE), scale.to(DEVICE), None if zeros is None else zeros.to(DEVICE)


@pytest.mark.parametrize(
    ("kind", "rows", "outputs", "inputs", "group", "offset", "dtype"),
    [
        (torch.int8, 1, 20, 40, 40, False, torch.float32),
        (torch.int8, 3, 16, 48, 16, True, torch.bfloat16),
        (torch.uint8, 2, 20, 72, 24, True, torch.float32),
        (torch.uint8, 5, 33, 64, 32, True, torch.bfloat16),
        (torch.uint8, 1, 16, 32, 32, False, torch.float32),
        (F8, 2, 18, 40, 32, False, torch.float32),  # the last group is shorter
        (F8, 17, 16, 32, 16, False, torch.bfloat16),
        # Of tiles whose inputs have one scale.
        (torch.int8, 3, 33, 256, 64, True, torch.float32),
        (torch.int8, 40, 20, 192, 192, False, torch.bfloat16),
        (torch.uint8, 2, 20, 256, 32, True, torch.float32),
        (F8, 17, 33, 160, 32, False, torch.float32),
        (torch.uint8, 2, 20, 1024, 32, True, torch.float32),  # whose inputs are split
    ],
)
def test_codes_matmul(
    kind: torch.dtype, rows: int, outputs: int, inputs: int, group: int, offset: bool, dtype: torch.dtype
) -> None:
    data, scale, zeros = given(kind, outputs, inputs, group, offset)
    x = torch.randn(rows, inputs + 8, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)[
        :, :inputs
    ]
    got, right = codes_matmul(x, data, scale, zeros, group), plain_codes_matmul(x, data, scale, zeros, group)
    assert got.dtype == dtype
    at = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(got, right, atol=at * float(right.abs().max()), rtol=at)
