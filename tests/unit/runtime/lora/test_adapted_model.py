"""A model with adapters gives what transformers gives with the same adapters merged into its weights; many
adapters in one pass, however their tokens arrive, and shared out among ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.config.model import ModelSpec
from runtime.config.runner import RunnerConfig
from runtime.engine.runner import TorchRunner
from runtime.plan import Adapter
from runtime.protocol.errors import AdapterError, InternalFault
from tests.unit.runtime.engine.conftest import Tiny
from tests.unit.runtime.engine.ranks.ranks_here import RanksHere
from tests.unit.runtime.lora.making import EVERY, make_adapter

SETTINGS: dict[str, Any] = {
    "max_total_tokens": 4096, "dtype": "float32", "device": "cpu", "threads": 1, "seed": 7,
    "enable_lora": True,
}  # fmt: skip
ATTENTION = ("q_proj", "v_proj")
DIFFERENT = (
    "gemma3, beside a vision tower", "phi3", "gpt2", "gpt_neox", "qwen2 moe", "gpt oss", "deepseek v2",
    "llama4",
)  # fmt: skip
"""Families whose matrices lie differently from Llama's."""


def greedy(model: Any, ids: Sequence[int], count: int) -> list[int]:
    return Tiny(Path(), model).greedy(ids, count)


@contextlib.contextmanager
def runner(path: Path, *adapters: Path, **config: Any) -> Iterator[TorchRunner]:
    """With these adapters, numbered from 1 on."""
    given = tuple(Adapter(number, f"a{number}", str(one)) for number, one in enumerate(adapters, 1))
    made = TorchRunner.load(
        path,
        ModelSpec.from_dir(path),
        RunnerConfig(**{**SETTINGS, "adapters": given, **config}),
        beside=False,
    )
    with contextlib.closing(made):
        yield made


@pytest.fixture(scope="module")
def several(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of one model: all matrices, the attention's alone, another rank, and one layer with rsLoRA."""
    base, folder = tiny("llama"), tmp_path_factory.mktemp("adapters")
    return base, [
        make_adapter(folder / "all", base.model),
        make_adapter(folder / "attention", base.model, modules=ATTENTION, seed=1),
        make_adapter(folder / "large", base.model, rank=11, alpha=7.0, seed=2),
        make_adapter(folder / "layer", base.model, layers=[1], use_rslora=True, seed=3, std=0.3),
    ]


def test_one_adapter_equals_the_merged_weights(case: Any, prompt: Any, drive: Any, tmp_path: Path) -> None:
    made = make_adapter(tmp_path / "a", case.model)
    ids = prompt(60)
    right = greedy(made.model, ids, 8)
    assert right != case.greedy(ids, 8)  # or the comparison would say little
    with runner(case.path, made.path) as run:
        assert drive(run).generate([ids], 8, adapter=1) == [right]
        assert drive(run).generate([ids], 8, chunk=13, adapter=1) == [right]
        assert drive(run).generate([ids], 8) == [case.greedy(ids, 8)]


@pytest.mark.parametrize("name", DIFFERENT)
def test_every_family_takes_adapters(name: str, tiny: Any, prompt: Any, drive: Any, tmp_path: Path) -> None:
    """In all layers but experts and what latent attention folds; fused, transposed and shared ones too."""
    base = tiny(name)
    made = make_adapter(tmp_path / "a", base.model, modules=None)
    ids = prompt(30)
    right = [greedy(model, ids, 5) for model in (base.model, made.model)]
    with runner(base.path, made.path) as run:
        driver = drive(run)
        rows = [driver.ask(driver.new(), ids, adapter=number, scores=((28, ids[29]),)) for number in (0, 1)]
        scores = [got.scores[0] for got in driver.step(rows)]
        for score, model in zip(scores, (base.model, made.model)):
            logprob = Tiny(base.path, model).logits(ids)[28].log_softmax(-1)[ids[29]]
            assert score == pytest.approx(float(logprob), abs=2e-4)
        assert abs(scores[0] - scores[1]) > 1e-2  # or the comparison would say little
        assert [drive(run).generate([ids], 5, adapter=number)[0] for number in (0, 1)] == right


def test_the_log_probabilities_are_those_of_the_merged_weights(several: Any, prompt: Any, drive: Any) -> None:
    base, adapters = several
    ids = prompt(40)
    scores = tuple((place, ids[place + 1]) for place in range(39))
    with runner(base.path, *(one.path for one in adapters)) as run:
        driver = drive(run)
        asks = [
            driver.ask(driver.new(), ids, adapter=number, scores=scores, hidden="all")
            for number in range(len(adapters) + 1)
        ]
        found = driver.step(asks)
    for model, got in zip([base.model, *(one.model for one in adapters)], found):
        with torch.inference_mode():
            out = model(torch.tensor([ids]), output_hidden_states=True)
        right = out.logits[0].log_softmax(-1)[range(39), ids[1:]]
        assert got.scores == pytest.approx(right.tolist(), abs=1e-4)
        assert torch.tensor(got.hidden).sub(out.hidden_states[-1][0]).abs().max() < 1e-4


def mixed(run: Any, drive: Any, base: Any, adapters: Any, prompt: Any) -> None:
    """A batch with every adapter, and with none; two prompts with the same one, and prompts that come while
    others decode."""
    models = [base.model, *(one.model for one in adapters)]
    chosen = [2, 0, 1, 3, 2, 4, 0]
    prompts = [prompt(20 + 3 * place, seed=place) for place in range(len(chosen))]
    driver = drive(run, page=1)
    seqs = [driver.new() for _ in chosen]
    outs: list[list[int]] = [[] for _ in chosen]
    feed: dict[int, list[int]] = {}
    for step in range(10):
        if step < len(chosen):
            feed[step] = prompts[step]  # one more joins
        asks = [driver.ask(seqs[at], ids, adapter=chosen[at], step=step) for at, ids in feed.items()]
        for at, result in zip(list(feed), driver.step(asks)):
            outs[at].append(result.token)
            feed[at] = [result.token]
    for number, ids, out in zip(chosen, prompts, outs):
        assert out == greedy(models[number], ids, len(out))


def test_many_adapters_in_one_batch(several: Any, prompt: Any, drive: Any) -> None:
    base, adapters = several
    with runner(base.path, *(one.path for one in adapters)) as run:
        mixed(run, drive, base, adapters, prompt)


def test_ranks_share_adapters(several: Any, prompt: Any, drive: Any) -> None:
    base, adapters = several
    given = tuple(Adapter(number, f"a{number}", str(one.path)) for number, one in enumerate(adapters, 1))
    config = RunnerConfig(**{**SETTINGS, "tp_size": 2, "adapters": given})
    with contextlib.closing(RanksHere(base.path, 2, config)) as run:
        mixed(run, drive, base, adapters, prompt)


def test_who_was_not_used_for_longest_makes_place(several: Any, prompt: Any, drive: Any) -> None:
    base, adapters = several
    models = [base.model, *(one.model for one in adapters)]
    ids = prompt(25, seed=9)
    right = [greedy(model, ids, 3) for model in models]
    with runner(base.path, *(one.path for one in adapters), max_loras_per_batch=2) as run:
        driver = drive(run)
        for first, second in ((1, 2), (3, 2), (4, 1), (3, 0), (2, 4), (1, 3)):
            seqs = [driver.new(), driver.new()]
            feed, outs = [ids, ids], [[], []]
            for step in range(3):
                asks = [
                    driver.ask(seq, one, adapter=number, step=step)
                    for seq, one, number in zip(seqs, feed, (first, second))
                ]
                tokens = [result.token for result in driver.step(asks)]
                feed = [[token] for token in tokens]
                for out, token in zip(outs, tokens):
                    out.append(token)
            assert outs == [right[first], right[second]]
        driver = drive(run)
        three = [driver.ask(driver.new(), ids, adapter=number) for number in (1, 2, 3)]
        with pytest.raises(InternalFault, match="2 adapters"):
            driver.step(three)


def test_one_is_pinned(several: Any, prompt: Any, drive: Any) -> None:
    base, adapters = several
    ids = prompt(25, seed=9)
    with runner(base.path, max_loras_per_batch=2) as run:
        for number, one in enumerate(adapters[:3], 1):
            run.load_adapter(Adapter(number, "a", str(one.path), pinned=number == 1))
        for number in (1, 2, 3, 2, 1):
            assert drive(run).generate([ids], 2, adapter=number) == [
                greedy(adapters[number - 1].model, ids, 2)
            ]
        driver = drive(run)
        asks = [driver.ask(driver.new(), ids, adapter=number) for number in (2, 3)]
        with pytest.raises(InternalFault, match="2 adapters"):
            driver.step(asks)


def test_loaded_and_unloaded_between_passes(several: Any, prompt: Any, drive: Any) -> None:
    base, (first, second, large, _) = several
    ids = prompt(25, seed=4)
    with runner(base.path) as run:
        assert drive(run).generate([ids], 3) == [base.greedy(ids, 3)]
        run.load_adapter(Adapter(1, "one", str(second.path)))
        assert drive(run).generate([ids], 3, adapter=1) == [greedy(second.model, ids, 3)]
        run.load_adapter(Adapter(2, "two", str(large.path)))  # of a larger rank: the first one moves
        assert drive(run).generate([ids], 3, adapter=1) == [greedy(second.model, ids, 3)]
        assert drive(run).generate([ids], 3, adapter=2) == [greedy(large.model, ids, 3)]
        run.unload_adapter(1)
        run.unload_adapter(1)
        with pytest.raises(InternalFault, match="adapter 1 is not loaded"):
            drive(run).generate([ids], 1, adapter=1)
        run.load_adapter(Adapter(3, "one", str(first.path)))
        assert drive(run).generate([ids], 3, adapter=3) == [greedy(first.model, ids, 3)]
        assert drive(run).generate([ids], 3, adapter=2) == [greedy(large.model, ids, 3)]
        with pytest.raises(AdapterError, match="adapter_config"):
            run.load_adapter(Adapter(4, "none", str(base.path)))
        assert drive(run).generate([ids], 3) == [base.greedy(ids, 3)]


def test_ranks_and_scales_of_single_projections(tiny: Any, prompt: Any, drive: Any, tmp_path: Path) -> None:
    base = tiny("qwen3")
    ids = prompt(30)
    made = make_adapter(
        tmp_path / "a", base.model, modules=EVERY,
        rank_pattern={"q_proj": 7, "down_proj": 2}, alpha_pattern={"v_proj": 20.0},
    )  # fmt: skip
    with runner(base.path, made.path, max_lora_rank=7) as run:
        assert drive(run).generate([ids], 6, adapter=1) == [greedy(made.model, ids, 6)]


@pytest.mark.parametrize("quantization", ["fp8", "w8a8_int8"])
def test_over_rounded_matrices(several: Any, prompt: Any, drive: Any, quantization: str) -> None:
    """The model's are rounded, the adapter's are not."""
    base, (made, *_) = several
    ids = prompt(40)
    scores = tuple((place, ids[place + 1]) for place in range(39))
    with runner(base.path, made.path, quantization=quantization) as run:
        driver = drive(run)
        found = driver.step(
            [driver.ask(driver.new(), ids, adapter=number, scores=scores) for number in (0, 1)]
        )
    right = [
        Tiny(base.path, model).logits(ids).log_softmax(-1)[range(39), ids[1:]]
        for model in (base.model, made.model)
    ]
    apart = (right[0] - right[1]).abs().mean()
    for got, mine in zip(found, right):
        assert (torch.tensor(got.scores) - mine).abs().mean() < 0.2 * apart


def test_in_bfloat16(make: Any, prompt: Any, drive: Any, tmp_path: Path) -> None:
    """Two prompts, and then three tokens of which the second has no adapter."""
    base = make(tmp_path / "base", "llama", torch.bfloat16)
    made = make_adapter(tmp_path / "a", base.model, dtype=torch.bfloat16, std=0.3)
    ids, wanted = prompt(33), list(range(0, 160, 7))
    models = [made.model, base.model, made.model]
    with torch.inference_mode():
        right = [model(torch.tensor([[*ids, 9]])).logits[0, -2:].log_softmax(-1) for model in models]
    with runner(base.path, made.path, dtype="bfloat16") as run:
        driver = drive(run)
        seqs = [driver.new() for _ in models]
        for place, tokens in ((0, ids), (1, [9])):
            asks = [
                driver.ask(seq, tokens, adapter=number, token_ids=tuple(wanted))
                for seq, number in zip(seqs, (1, 0, 1))
            ]
            for row, mine in zip(driver.step(asks), right):
                found = torch.tensor(row.samples[0].token_ids)
                assert (found - mine[place, wanted]).abs().mean() < 0.2
    assert (right[0] - right[1]).abs().mean() > 1.0
