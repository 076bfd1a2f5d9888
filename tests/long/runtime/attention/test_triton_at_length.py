"""long/runtime/attention/test_triton.py, at length."""

from __future__ import annotations

import random

import pytest

from runtime.attention.triton_tiles import TritonTiles
from tests.long.contracts.test_attention import compare, plan_of
from tests.long.runtime.attention.test_triton import _one_thread

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("seed", range(6))
def test_random_trees(seed: int) -> None:
    chance = random.Random(seed)
    lengths = [chance.choice([1, 2, 17, 63, 64, 130]) for _ in range(5)]
    parent = [None] + [chance.choice([None, *range(n)]) for n in range(1, len(lengths))]

    def path(node: int | None) -> list[int]:
        return [] if node is None else [*path(parent[node]), node]

    rows = [
        (path(chance.choice([None, *range(len(lengths))])), chance.choice([1, 1, 1, 2, 9, 17]))
        for _ in range(chance.randint(1, 6))
    ]
    plan = plan_of(rows, lengths, chance.choice([0, 1, 3, 16]), seed)
    compare(TritonTiles, plan, windows=(None, chance.randint(1, 100)))
