"""Threads: small passes are computed by one thread; the caller's own choice stands."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from runtime.config.shards import Shard
from runtime.engine.runner import SHARED, Threads


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def decoder(hidden: int, ffn: int, device: str = "cpu") -> Any:
    spec = SimpleNamespace(hidden_size=hidden, ffn_size=ffn, num_heads=4, head_dim=hidden // 4)
    return cast("Any", SimpleNamespace(spec=spec, shard=Shard(), device=torch.device(device)))


def test_only_what_is_worth_it_is_shared() -> None:
    torch.set_num_threads(4)
    threads = Threads.of(decoder(192, 512))
    assert threads is not None
    few, many = SHARED // (192 * 512), SHARED // (192 * 512) + 1
    for tokens, wanted in ((1, 1), (few, 1), (many, 4), (many, 4), (2, 1)):
        threads.use_for(tokens)
        assert torch.get_num_threads() == wanted


def test_a_wide_model_uses_all_from_the_first_token_on() -> None:
    torch.set_num_threads(4)
    threads = Threads.of(decoder(4096, 11008))
    assert threads is not None
    threads.use_for(1)
    assert torch.get_num_threads() == 4


@pytest.mark.parametrize(("threads", "device"), [(1, "cpu"), (4, "meta")])
def test_nothing_to_choose(threads: int, device: str) -> None:
    torch.set_num_threads(threads)
    assert Threads.of(decoder(192, 512, device)) is None
