"""One row at a time and all rows at once give the same columns."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from runtime.engine.sampling.draw import pick, pick_at_once
from runtime.protocol.sampling import SamplingParams


@pytest.mark.parametrize("width", [1, 2, 127, 128, 129, 1000])
def test_rows_alone_and_all_at_once(width: int) -> None:
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
        draws = [0.0, 1.0 - 2.0**-53, *random.random(6).tolist()]
        table = torch.from_numpy(scores)
        picked = pick(table, params, draws)
        assert picked == pick_at_once(table, params, draws)
        for row, column in zip(scores, picked):
            assert column is None if row.max() == -math.inf else row[column] > -math.inf
