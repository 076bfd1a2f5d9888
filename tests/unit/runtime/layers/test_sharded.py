"""Layers of which ranks hold parts, against the whole ones; sizes that ranks cannot share evenly included."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from runtime.layers.dense import DenseLinear
from runtime.layers.sharded import Embedding, Gathered, Summed
from runtime.parallel import ALONE, Group
from tests.unit.runtime.engine.ranks.ranks_here import PATIENCE_S, GroupHere, Meeting

SIZES = st.integers(1, 4)


def on_all(size: int, act: Callable[[Group], Any]) -> list[Any]:
    """What each rank gives."""
    meeting = Meeting(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(act, [GroupHere(rank, meeting) for rank in range(size)], timeout=PATIENCE_S))


def part_of(total: int, group: Group) -> range:
    """As config/shards.py shares out the vocabulary."""
    each = -(-total // group.size)
    return range(min(group.rank * each, total), min((group.rank + 1) * each, total))


@given(size=SIZES, outputs=st.integers(4, 23), rows=st.integers(1, 4), seed=st.integers(0, 99))
def test_outputs_of_all_ranks_and_some_of_them(size: int, outputs: int, rows: int, seed: int) -> None:
    dice = torch.Generator().manual_seed(seed)
    weight, x = torch.randn(outputs, 6, generator=dice), torch.randn(rows, 6, generator=dice)
    some = torch.randperm(outputs, generator=dice)[: seed % outputs + 1]
    whole = DenseLinear(weight)

    def act(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        own = part_of(outputs, group)
        linear = Gathered(DenseLinear(weight[own.start : own.stop].clone()), own, outputs, group)
        return linear(x), linear.some(x, some)

    # A rank may have none, where there are many ranks and few outputs: check_ranks() refuses that.
    if not part_of(outputs, Group(size - 1, size)):
        return
    for every, few in on_all(size, act):
        assert torch.allclose(every, whole(x), atol=1e-5)
        assert torch.allclose(few, whole.some(x, some), atol=1e-5)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_inputs_of_all_ranks(size: int, biased: bool) -> None:
    weight, x = torch.randn(5, 7), torch.randn(3, 7)
    bias = torch.randn(5) if biased else None
    some = torch.tensor([4, 0])

    def act(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        own = range(group.rank * 7 // size, (group.rank + 1) * 7 // size)
        linear = Summed(DenseLinear(weight[:, own.start : own.stop].clone()), bias, group)
        mine = x[:, own.start : own.stop]
        return linear(mine), linear.some(mine, some)

    right = F.linear(x, weight, bias)
    for every, few in on_all(size, act):
        assert torch.allclose(every, right, atol=1e-5), "the bias is added once"
        assert torch.allclose(few, right[:, some], atol=1e-5)


@given(size=SIZES, ids=st.lists(st.integers(0, 10), min_size=1, max_size=8))
def test_an_embedding_finds_every_id_on_every_rank(size: int, ids: list[int]) -> None:
    table, wanted = torch.randn(11, 4), torch.tensor(ids)

    def act(group: Group) -> torch.Tensor:
        own = part_of(11, group)
        return Embedding(table[own.start : own.stop].clone(), own.start, group)(wanted)

    for found in on_all(size, act):
        assert found.equal(table[wanted])
    assert wanted.tolist() == ids


def test_alone_nothing_is_exchanged() -> None:
    x = torch.randn(2, 3)
    assert ALONE.sum_(x) is x
    assert ALONE.gather(x) is x
    assert ALONE.least(3) == 3
