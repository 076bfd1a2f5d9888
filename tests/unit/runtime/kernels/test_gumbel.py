"""Gumbel noise: the same bits wherever it is made, with the distribution that it is named after."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from runtime.kernels import gumbel as source
from runtime.kernels.gumbel import MOST, gumbel, halves
from runtime.kernels.native.library import library

KEYS = [0, 1, 1 << 32, (1 << 64) - 1, *(random.Random(1).getrandbits(64) for _ in range(4))]
IDS = torch.cat((torch.arange(70_000), torch.randint(0, 2**31 - 1, (5000,)))).int()


def test_arrays_and_tensors_have_the_same_bits() -> None:
    by_torch = gumbel(torch.from_numpy(halves(KEYS)), IDS)
    assert by_torch.dtype == torch.float32
    assert np.array_equal(gumbel(halves(KEYS), IDS.numpy()).view(np.int32), by_torch.numpy().view(np.int32))
    assert by_torch.max() < MOST


@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_the_compiled_library_draws_by_them(lanes: int) -> None:
    """Its noise is seen by what draws: scores that differ by less than noise does, and by its last bits."""
    if (native := library()) is None:
        pytest.skip("no library")
    draw, dice = random.Random(lanes), torch.Generator().manual_seed(lanes)
    fast = source._native()
    assert fast is not None
    before = native.lanes
    try:
        if native.use_lanes(lanes) != lanes:
            pytest.skip("not on this processor")
        for turn in range(400):
            size = draw.choice((1, 2, 63, 64, 65, 700, 20_000))
            scores = draw.choice((0.0, 1e-6, 1.0, 5.0, 40.0)) * torch.randn(size, generator=dice)
            if turn % 3 == 0:
                scores = scores.round()
            scores[torch.rand(size, generator=dice) < draw.choice((0.0, 0.5))] = -math.inf
            best = int(scores.argmax())
            if scores[best] == -math.inf:
                continue
            ids = torch.randint(0, 1 << 18, (size,), generator=dice).sort().values if turn % 2 else None
            weights = scores.sub(scores[best]).exp() if turn % 5 else None
            temperature, key = draw.choice((1e-6, 0.3, 1.0, 1.7, 50.0)), draw.getrandbits(64)
            given = (scores, temperature, key, best, ids, weights, draw.choice((0.0, 0.01, 1.0)))
            values = scores.sub(scores[best]).div_(float(np.float32(temperature)))
            own = torch.arange(size) if ids is None else ids
            values += gumbel(torch.from_numpy(halves([key])), own.int())[0]
            if weights is not None:
                values[weights < given[-1]] = -math.inf
            whole = int(values.max(-1).indices)
            assert fast(*given) == whole
            assert source._plain_draw(*given) == whole
    finally:
        native.use_lanes(before)


def test_the_distribution() -> None:
    """-log(-log(u)) is below x with the probability exp(-exp(-x)); chi-square of equal shares, over ids of a
    key, over keys for an id, and of the differences between ids side by side, which are logistic."""
    dice, ids = random.Random(2), np.arange(1000, dtype=np.int32)
    rows = gumbel(halves([dice.getrandbits(64) for _ in range(400)]), ids)
    shares = np.exp(-np.exp(-rows.astype(np.float64)))
    between = rows[:, 1:].astype(np.float64) - rows[:, :-1]
    logistic = 1 / (1 + np.exp(-between[:, ::2]))
    for values in (shares, shares[:, 0], shares[0], logistic, logistic[:, 7]):
        bins = 100 if values.size > 10_000 else 20
        counts = np.histogram(values, bins, (0.0, 1.0))[0]
        wanted = values.size / bins
        statistic = float(((counts - wanted) ** 2 / wanted).sum())
        assert abs(statistic - (bins - 1)) < 4 * math.sqrt(2 * (bins - 1))
    for shift in (1, 2, 64, 500):  # ids are independent
        assert abs(np.corrcoef(shares[:, shift:].ravel(), shares[:, :-shift].ravel())[0, 1]) < 0.01
