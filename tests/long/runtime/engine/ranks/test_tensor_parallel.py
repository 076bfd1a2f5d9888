"""Ranks that share a decoder give what one process gives; each holds and reads its own part. The ranks are
threads here (ranks_here.py); tests/long/runtime/engine/ranks/test_rank_processes.py has real ones."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.config.engine import EngineConfig
from runtime.config.model import ModelSpec
from runtime.config.runner import RunnerConfig
from runtime.config.shards import Shard, check_ranks
from runtime.disagg.transfer.memory import JoinedMemory
from runtime.engine.runner import TorchRunner
from runtime.layers.weights import Checkpoint
from runtime.plan import Row, RowResult, Run, Segment, StepPlan
from runtime.protocol.errors import BadRequest, InternalFault
from runtime.protocol.sampling import SamplingParams
from tests.process.runtime.engine.test_runners import ask, steps
from tests.unit.runtime.engine.ranks.ranks_here import SETTINGS, RanksHere, ranks

GREEDY = SamplingParams(temperature=0.0)


def close_to(mine: RowResult, theirs: RowResult) -> None:
    """The same tokens and ids, and numbers up to rounding."""
    assert (mine.error, len(mine.samples)) == (theirs.error, len(theirs.samples))
    assert mine.scores == pytest.approx(theirs.scores, abs=1e-3)
    for one, other in zip(mine.samples, theirs.samples):
        assert one.token == other.token
        assert (one.logprob is None) == (other.logprob is None)
        assert one.logprob is None or one.logprob == pytest.approx(other.logprob, abs=1e-3)
        assert one.token_ids == pytest.approx(other.token_ids, abs=1e-3)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
    for mine_state, their_state in zip(mine.hidden, theirs.hidden, strict=True):
        assert mine_state == pytest.approx(their_state, abs=1e-3)


@pytest.mark.parametrize("size", [2, 4])
def test_greedy_text_is_the_models(case: Any, drive: Any, prompt: Any, size: int) -> None:
    """Every family. With 4 ranks and 2 key heads two ranks hold the same one."""
    prompts = [prompt(length, seed=length) for length in (1, 40, 55)]
    right = [case.greedy(ids, 12) for ids in prompts]
    with ranks(case.path, size) as made:
        assert drive(made, page=1, seed=1).generate(prompts, 12, chunk=17) == right


@pytest.mark.parametrize("size", [2, 4])
def test_whatever_is_asked_is_answered_as_by_one(tiny: Any, size: int) -> None:
    """Sampling, penalties, processors, masks, scores, log-probabilities, hidden states."""
    path = tiny("qwen3").path
    alone = TorchRunner.load(path, ModelSpec.from_dir(path), RunnerConfig(**SETTINGS), beside=False)
    seqs = iter(range(1, 1 << 30))
    with ranks(path, size) as made:
        for number in range(4):
            for plan, masks, texts in steps(random.Random(number), alone.vocab_size, seqs):
                mine, theirs = ask(alone, plan, masks), ask(made, plan, masks)
                for one, other in zip(mine, theirs, strict=True):
                    close_to(one, other)
                for text, result in zip(texts, mine):
                    text.output.append(result.token if result.token is not None else 4)


def test_in_bfloat16_log_probabilities_are_near(tiny: Any, prompt: Any) -> None:
    path, ids = tiny("qwen2").path, prompt(20)
    plan = StepPlan(
        (Row(1, tuple(ids), 0, (Run(0, 20),), GREEDY, scores=tuple((n, 7) for n in range(20))),), ()
    )
    config = {**SETTINGS, "dtype": "bfloat16"}
    alone = TorchRunner.load(path, ModelSpec.from_dir(path), RunnerConfig(**config), beside=False)
    with ranks(path, 2, dtype="bfloat16") as made:
        (mine,), (theirs,) = ask(alone, plan), ask(made, plan)
    assert mine.scores == pytest.approx(theirs.scores, abs=0.5)
    assert mine.scores != theirs.scores, "they were rounded in another place"


def test_drafts_are_verified_by_all_ranks(tiny: Any, prompt: Any) -> None:
    ids = prompt(12)
    right = tiny("llama").greedy(ids, 4)
    wrong = [right[0], right[1], (right[2] + 1) % 160]
    rows = tuple(
        Row(seq, (*ids, *drafts), 0, (Run(20 * seq, len(ids) + len(drafts)),), GREEDY, drafts=len(drafts))
        for seq, drafts in enumerate((right[:3], wrong, []))
    )
    with ranks(tiny("llama").path, 2) as made:
        got = ask(made, StepPlan(rows, ()))
        assert [[one.token for one in row.samples] for row in got] == [right, right[:3], right[:1]]


@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1), (2, 4), (4, 2)])
def test_kv_of_ranks_goes_on_with_another_number_of_ranks(
    tiny: Any, prompt: Any, prefill: int, decode: int
) -> None:
    ids, path = prompt(30), tiny("qwen3").path
    right = tiny("qwen3").greedy(ids, 2)
    with ranks(path, prefill) as source, ranks(path, decode) as target:
        there, here = (
            JoinedMemory([runner.kv_memory for runner in made.runners]) for made in (source, target)
        )
        (first,) = ask(source, StepPlan((Row(1, tuple(ids), 0, (Run(10, 30),), GREEDY),), ()))
        order = here.layout.order
        here.write(
            [Run(50, 10), Run(0, 20)], here.layout.span, order,
            there.read([Run(10, 30)], there.layout.span, order),
        )  # fmt: skip
        moved = Segment((Run(50, 10), Run(0, 20)), (0,), 0)
        (second,) = ask(target, StepPlan((Row(1, (right[0],), 30, (Run(70, 1),), GREEDY),), (moved,)))
    assert [first.token, second.token] == right


def test_a_plan_that_is_not_whole_is_refused_by_all_and_they_go_on(tiny: Any) -> None:
    with ranks(tiny("llama").path, 2) as made:
        with pytest.raises(InternalFault, match="vocabulary of 160"):
            made.launch(StepPlan((Row(1, (160,), 0, (Run(9, 1),), GREEDY),), ()))
        assert ask(made, StepPlan((Row(1, (5,), 0, (Run(0, 1),), GREEDY),), ()))[0].token is not None


def test_a_rank_reads_and_holds_its_part(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    finish = Checkpoint.finish

    def count(self: Checkpoint, *names: tuple[str, ...]) -> None:
        read.append(self.bytes_taken)
        finish(self, *names)

    monkeypatch.setattr(Checkpoint, "finish", count)
    for case in ("llama", "qwen2", "llama, tied, biased"):
        path = tiny(case).path
        spec, config = ModelSpec.from_dir(path), RunnerConfig(**SETTINGS)
        TorchRunner.load(path, spec, config)
        (whole,) = read
        read.clear()
        with ranks(path, 2) as made:
            shapes = {runner._attention.pool.kv_heads for runner in made.runners}
        assert shapes == {spec.num_kv_heads // 2}
        small = 4 * spec.hidden_size * 5 * (spec.num_layers + 1)  # norms, and biases of all outputs
        assert whole / 2 <= max(read) <= whole / 2 + small
        assert sum(read) >= whole
        read.clear()


def test_a_runner_must_know_its_ranks(tiny: Any) -> None:
    path = tiny("llama").path
    with pytest.raises(InternalFault, match="tp_size is 2, there are 1 ranks"):
        TorchRunner.load(path, ModelSpec.from_dir(path), RunnerConfig(**{**SETTINGS, "tp_size": 2}))


# -- who holds what ------------------------------------------------------------------------------------------


def spec_of(tiny: Any) -> ModelSpec:
    return ModelSpec.from_dir(tiny("llama").path)


@given(
    size=st.integers(1, 16), kv=st.integers(1, 16), group=st.integers(1, 8), ffn=st.integers(1, 300),
    vocab=st.integers(1, 2000),
)  # fmt: skip
def test_parts_are_the_whole(tiny: Any, size: int, kv: int, group: int, ffn: int, vocab: int) -> None:
    spec = dataclasses.replace(
        spec_of(tiny), num_heads=kv * group, num_kv_heads=kv, ffn_size=ffn, vocab_size=vocab
    )
    try:
        check_ranks(spec, size)
    except BadRequest:
        return
    shards = [Shard(rank, size) for rank in range(size)]
    assert [head for shard in shards for head in shard.heads(spec)] == list(range(kv * group))
    assert [place for shard in shards for place in shard.ffn(spec)] == list(range(ffn))
    assert [token for shard in shards for token in shard.vocab(spec)] == list(range(vocab))
    for shard in shards:
        mine = list(shard.kv_heads(spec))
        each = len(shard.heads(spec)) // len(mine)
        assert all(len(part) for part in (shard.ffn(spec), shard.vocab(spec), mine))
        # The attention of a rank finds a query head's key head by its own numbers.
        assert [head // group for head in shard.heads(spec)] == [
            mine[place // each] for place in range(len(shard.heads(spec)))
        ]


def test_ranks_that_cannot_share_a_model_are_refused_with_those_that_can(tiny: Any) -> None:
    spec = spec_of(tiny)  # 4 heads over 2
    with pytest.raises(BadRequest, match="3 ranks cannot share 4 attention heads") as caught:
        check_ranks(spec, 3)
    assert caught.value.hint == "possible for this model: 1, 2, 4"
    with pytest.raises(BadRequest, match="3 ranks cannot share"):
        EngineConfig.of({"model": str(tiny("llama").path), "tp_size": 3}).locate()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"tp_size": 0}, "tp_size: must be in 1 to 64"),
        ({"tp_size": 2, "runner_process": False}, "must not be False"),
        ({"tp_size": 2, "device": "cuda:1"}, "each takes a GPU of its own"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], told: str) -> None:
    with pytest.raises(BadRequest, match=told):
        EngineConfig.of(options)
