"""Every family's logits and greedy tokens equal transformers': in chunks, token by token, in batches with a
shared prefix, on ranks, and in the whole engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from runtime.config.model import ModelSpec
from tests.unit.runtime.engine.checkpoints.families import FAMILIES
from tests.unit.runtime.engine.sampling.test_logits import AllLogits

TOLERANCE = 1e-4


def close(got: torch.Tensor, right: torch.Tensor) -> None:
    assert right.std() > 0.2  # or the comparison would say little
    assert (got - right).abs().max() < TOLERANCE * max(1.0, float(right.std()))


@pytest.mark.parametrize("name", FAMILIES)
def test_logits(name: str, tiny: Any, drive: Any, prompt: Any) -> None:
    """A prefix longer than the windows in two chunks; then three rows below it, extended by several tokens,
    then by one; beside them a row of its own."""
    case, shared = tiny(name), prompt(60, seed=1)
    driver = drive(AllLogits(case.path), page=4, seed=1)
    root, seen = driver.new(), []
    for part in (shared[:41], shared[41:]):
        driver.step([driver.ask(root, part)])
        seen.append(driver.runner.seen)
    close(torch.cat(seen), case.logits(shared))
    ends = [prompt(length, seed=length) for length in (1, 7, 20)]
    rows = [driver.fork(root) for _ in ends]
    other, alone = driver.new(), prompt(9, seed=2)
    driver.step([*(driver.ask(row, end) for row, end in zip(rows, ends)), driver.ask(other, alone)])
    right = [case.logits([*shared, *end])[60:] for end in ends]
    close(driver.runner.seen, torch.cat([*right, case.logits(alone)]))
    driver.step([driver.ask(row, [9]) for row in rows])
    close(driver.runner.seen, torch.stack([case.logits([*shared, *end, 9])[-1] for end in ends]))


@pytest.mark.parametrize("name", ["gemma2", "granite", "cohere", "phi"])
def test_some_logits_alone_are_scaled_and_capped_too(name: str, tiny: Any) -> None:
    path, chosen = tiny(name).path, torch.tensor([3, 150, 9])
    decoder = AllLogits(path).decoder
    with torch.inference_mode():
        hidden = torch.randn(4, decoder.spec.hidden_size, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(decoder.logits_of(hidden, chosen), decoder.logits(hidden)[:, chosen])


def test_long_contexts_of_longrope(tiny: Any, drive: Any, prompt: Any) -> None:
    """Beyond the trained length all positions have the other frequencies, in transformers too."""
    case, ids = tiny("phi3, longrope"), prompt(120, seed=5)
    short = ModelSpec.from_dir(case.path)
    assert (short.max_position_embeddings, short.for_context(96), short.for_context(513)) == (
        96,
        short,
        short,
    )
    spec = short.for_context(200)
    assert spec.max_position_embeddings == 512
    driver = drive(AllLogits(case.path, spec=spec))
    seq, seen = driver.new(), []
    for part in (ids[:50], ids[50:]):
        driver.step([driver.ask(seq, part)])
        seen.append(driver.runner.seen)
    close(torch.cat(seen), case.logits(ids))
