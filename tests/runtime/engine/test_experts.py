"""Mixtures of experts: logits and greedy tokens of every family equal transformers', also on two ranks."""

from __future__ import annotations

from typing import Any

import torch

from tests.runtime.engine.test_logits import AllLogits
from tests.runtime.engine.test_tensor_parallel import ranks

TOLERANCE = 2e-4


def _close(got: torch.Tensor, right: torch.Tensor) -> None:
    assert got.shape == right.shape
    assert (got - right).abs().max() < TOLERANCE


def test_logits(expert_case: Any, prompt: Any, drive: Any) -> None:
    """A prompt in chunks of odd sizes, rows that share it in one batch, and a step of all of them."""
    ids, ends = prompt(90, seed=1), [prompt(n, seed=4 + n) for n in (1, 3, 20)]
    driver = drive(AllLogits(expert_case.path), page=4, seed=2)
    root, seen, first = driver.new(), [], 0
    for size in (1, 7, 50, 32):
        driver.step([driver.ask(root, ids[first : first + size])])
        seen.append(driver.runner.seen)
        first += size
    right = expert_case.logits(ids)
    assert right.std() > 0.5  # or the comparison would say little
    _close(torch.cat(seen), right)
    leaves = [driver.fork(root) for _ in ends]
    driver.step([driver.ask(leaf, end) for leaf, end in zip(leaves, ends)])
    _close(driver.runner.seen, torch.cat([expert_case.logits([*ids, *end])[90:] for end in ends]))
    driver.step([driver.ask(leaf, [9]) for leaf in leaves])
    _close(driver.runner.seen, torch.stack([expert_case.logits([*ids, *end, 9])[-1] for end in ends]))


def test_greedy_text_of_two_ranks_is_the_models(expert_case: Any, drive: Any, prompt: Any) -> None:
    prompts = [prompt(length, seed=length) for length in (1, 40)]
    right = [expert_case.greedy(ids, 8) for ids in prompts]
    with ranks(expert_case.path, 2) as made:
        assert drive(made, page=1, seed=1).generate(prompts, 8, chunk=17) == right
