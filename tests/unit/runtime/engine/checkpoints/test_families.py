"""Every family's logits and greedy tokens equal transformers': in chunks, token by token, in batches with a
shared prefix, on ranks, and in the whole engine."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from runtime.api import Engine
from runtime.attention.base import choose
from runtime.attention.pool import KVShape
from runtime.config.model import ModelSpec
from runtime.config.runner import RunnerConfig
from runtime.layers.dense import Dense
from runtime.models.decoder import Decoder
from runtime.plan import Row, Run, StepPlan
from runtime.protocol.sampling import SamplingParams
from tests.unit.runtime.engine.checkpoints.families import FAMILIES
from tests.unit.runtime.engine.ranks.ranks_here import RanksHere
from tests.unit.runtime.engine.sampling.test_logits import AllLogits
from tests.unit.runtime.engine.test_greedy_engine import with_tokenizer

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


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_token_by_token(name: str, tiny: Any, drive: Any, prompt: Any) -> None:
    case, ids = tiny(name), prompt(70, seed=3)
    driver = drive(AllLogits(case.path), page=1, seed=3)
    seq, seen = driver.new(), []
    for token in ids:
        driver.step([driver.ask(seq, [token])])
        seen.append(driver.runner.seen)
    close(torch.cat(seen), case.logits(ids))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_ranks_give_the_models_greedy_tokens(
    name: str, size: int, tiny: Any, drive: Any, prompt: Any
) -> None:
    case, prompts = tiny(name), [prompt(length, seed=length) for length in (1, 50)]
    right = [case.greedy(ids, 12) for ids in prompts]
    config = RunnerConfig(max_total_tokens=1024, dtype="float32", device="cpu", threads=1, tp_size=size)
    with contextlib.closing(RanksHere(case.path, size, config)) as ranks:
        assert drive(ranks, page=1, seed=1).generate(prompts, 12, chunk=17) == right


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_in_bfloat16_logits_are_near(name: str, tiny: Any, prompt: Any) -> None:
    """Each layer's parts take and give the model's type. A token's KV is rounded as its numbers are."""
    case, ids = tiny(name), prompt(60, seed=7)
    spec, cpu = ModelSpec.from_dir(case.path), torch.device("cpu")
    decoder = Decoder.load(case.path, spec, torch.bfloat16, cpu, Dense())
    shape = KVShape(spec.num_layers, spec.num_kv_heads, spec.head_dim, torch.bfloat16, cpu)
    attention = choose("auto", cpu)(shape, 64, spec.num_heads, spec.windows, decoder.scoring)
    plan = StepPlan((Row(1, tuple(ids), 0, (Run(0, 60),), SamplingParams()),), ())
    with torch.inference_mode():
        step = attention.begin(plan)
        hidden = decoder.hidden(torch.tensor(ids), torch.arange(60), step)
        got, right = decoder.logits(hidden), case.logits(ids)
    assert (hidden.dtype, got.dtype) == (torch.bfloat16, torch.float32)
    assert (got - right).std() < 0.1 * right.std()


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_the_engines_greedy_tokens(name: str, tiny: Any, prompt: Any) -> None:
    """Prompts with a common beginning, in small chunks, more of them than run at once; again from the
    cache."""
    case, shared = tiny(name), prompt(30, seed=8)
    with_tokenizer(case.path)
    prompts = [[*shared, *prompt(length, seed=length)] for length in (1, 9, 25)]
    params = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)
    options = {"page_size": 4, "chunked_prefill_size": 16, "max_running_requests": 2, "max_total_tokens": 512}
    with Engine(str(case.path), dtype="float32", **options) as engine:
        for _ in range(2):
            outs = engine.generate(prompts, params)
            assert [out.output_ids for out in outs] == [case.greedy(ids, 12) for ids in prompts]
