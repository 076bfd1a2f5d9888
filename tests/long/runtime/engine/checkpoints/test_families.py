"""unit/runtime/engine/checkpoints/test_families.py, at length."""

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
from tests.long.runtime.engine.test_greedy_engine import with_tokenizer
from tests.unit.runtime.engine.checkpoints.families import FAMILIES
from tests.unit.runtime.engine.checkpoints.test_families import close
from tests.unit.runtime.engine.ranks.ranks_here import RanksHere
from tests.unit.runtime.engine.sampling.test_logits import AllLogits


@pytest.mark.parametrize("name", FAMILIES)
def test_token_by_token(name: str, tiny: Any, drive: Any, prompt: Any) -> None:
    case, ids = tiny(name), prompt(70, seed=3)
    driver = drive(AllLogits(case.path), page=1, seed=3)
    seq, seen = driver.new(), []
    for token in ids:
        driver.step([driver.ask(seq, [token])])
        seen.append(driver.runner.seen)
    close(torch.cat(seen), case.logits(ids))


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
