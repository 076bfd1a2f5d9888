"""One row at a time and all rows at once give the same columns."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from runtime.engine.sampling.draw import pick
from runtime.kernels import gumbel
from runtime.protocol.sampling import SamplingParams
from tests.unit.runtime.engine.sampling.at_once import pick_at_once


@pytest.mark.parametrize("width", [1, 2, 127, 128, 129, 1000, 5000, 40_000])
def test_rows_alone_and_all_at_once(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(width)
    for _ in range(12):
        scores = random.normal(scale=random.choice([0.1, 1.0, 6.0]), size=(8, width)).astype(np.float32)
        if random.random() < 0.5:
            scores = scores.round()  # ties
        scores[random.random(scores.shape) < random.choice([0.0, 0.3, 0.99])] = -math.inf
        params = [
            SamplingParams(
                temperature=float(random.choice([0.0, 0.2, 1.0, 1.7])),
                top_k=int(random.choice([-1, 1, 7, 128, 900])),
                top_p=float(random.choice([1.0, 0.999, 0.8, 0.1])),
                min_p=float(random.choice([0.0, 0.0, 0.05, 1.0])),
            )
            for _ in scores
        ]
        keys = [0, (1 << 64) - 1, *random.integers(1 << 63, size=6).tolist()]
        table = torch.from_numpy(scores)
        ids = torch.from_numpy(np.sort(random.integers(1 << 17, size=scores.shape)))
        for listed in (None, ids):
            picked = pick(table, params, keys, listed)
            assert picked == pick_at_once(table, params, keys, listed)
            with monkeypatch.context() as patch:
                patch.setattr(gumbel, "_native", lambda: None)
                assert pick(table, params, keys, listed) == picked
        for row, column in zip(scores, picked):
            assert column is None if row.max() == -math.inf else row[column] > -math.inf


def test_a_listed_id_is_drawn_as_in_the_whole_vocabulary() -> None:
    dice = torch.Generator().manual_seed(1)
    logits = torch.randn(40, 6000, generator=dice)
    allowed = torch.randint(0, 6000, (40, 50), generator=dice).sort(-1).values
    params, keys = [SamplingParams(temperature=0.9, top_k=30)] * 40, list(range(40))
    masked = torch.full_like(logits, -math.inf).scatter(1, allowed, logits.gather(1, allowed))
    listed = pick(logits.gather(1, allowed), params, keys, allowed)
    assert [int(row[column or 0]) for row, column in zip(allowed, listed)] == pick(masked, params, keys)
