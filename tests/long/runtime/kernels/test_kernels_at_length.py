"""long/runtime/kernels/test_kernels.py, at length."""

from __future__ import annotations

import pytest
import torch

from runtime.kernels.sampling import plain_sample, sample
from tests.long.runtime.kernels.test_kernels import _seeded, draws_of, noise

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


NO_MASK = torch.zeros(1, 1, dtype=torch.int32)


@pytest.mark.parametrize("seed", range(12))
def test_sampling_of_random_rows(seed: int) -> None:
    torch.manual_seed(seed)
    rows = [
        (float(torch.rand(()) * 2), int(torch.randint(0, 60, ())), float(torch.rand(())),
         float(torch.rand(()) ** 4), int(torch.randint(0, 2**62, ())), -1)
        for _ in range(8)
    ]  # fmt: skip
    scores = (4 * noise(8, 50)).round(decimals=1)  # many ties
    given = draws_of(rows, NO_MASK)
    assert sample(scores, given).tolist() == plain_sample(scores, given).tolist()
