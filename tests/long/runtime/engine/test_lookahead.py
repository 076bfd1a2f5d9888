"""Steps that are queued before their plans are there change no answer: random traffic of rows that come, end,
go on with other tokens than those drawn, or with several, are masked, penalised, drawn, forked. Without a GPU
what is queued is computed at once."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from runtime.config.model import ModelSpec
from runtime.config.runner import RunnerConfig
from runtime.engine import lookahead
from runtime.engine.graphs import Passes
from runtime.engine.runner import TorchRunner
from runtime.engine.sampling import fused
from runtime.engine.sampling.fused import FusedSampler
from runtime.kernels.logprobs import plain_gather_logprobs
from runtime.kernels.sampling import plain_change, plain_sample
from runtime.plan import RowResult, StepPlan, TokenMask
from runtime.protocol.sampling import SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinity, in the interpreter
ON_GPU = torch.cuda.is_available()
VOCAB = 160
Load = Callable[..., TorchRunner]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """load(path, ahead)"""

    def recorded(self: Passes, plan: StepPlan, ids: Tensor, positions: Tensor) -> Tensor:
        return self._decoder.hidden(ids, positions, self._attention.begin(plan)).clone()

    if not ON_GPU:
        monkeypatch.setattr(Passes, "recorded", recorded)
        monkeypatch.setattr(fused, "sample", plain_sample)
        monkeypatch.setattr(fused, "change", plain_change)
        monkeypatch.setattr(fused, "gather_logprobs", plain_gather_logprobs)
        monkeypatch.setattr("runtime.engine.runner.sampler_on", lambda device: FusedSampler())
    with contextlib.ExitStack() as stack:

        def make(path: Any, ahead: int) -> TorchRunner:
            monkeypatch.setattr("runtime.engine.runner.rows_ahead", lambda *_: ahead)
            config = RunnerConfig(
                max_total_tokens=4000, dtype="float32", lookahead=ahead > 0, cuda_graph_max_bs=8
            )
            runner = TorchRunner.load(path, ModelSpec.from_dir(path), config)
            return stack.enter_context(contextlib.closing(runner))

        yield make


def mask_of(allowed: list[int], *, listed: bool) -> TokenMask:
    bits = np.zeros(VOCAB // 32, dtype=np.uint32)
    for token in allowed:
        bits[token // 32] |= np.uint32(1 << token % 32)
    return TokenMask(bits, np.array(sorted(allowed)) if listed else None)


def sampling_of(draw: random.Random) -> SamplingParams:
    words: dict[str, Any] = {"temperature": 0.0}
    if draw.random() < 0.6:
        words = {"seed": draw.randrange(99), "top_k": draw.choice((-1, 5)), "top_p": draw.choice((1.0, 0.8))}
    if draw.random() < 0.2:
        words["repetition_penalty"] = 1.3
    return SamplingParams(max_new_tokens=draw.choice((3, 8, 30)), **words)


def play(drive: Any, runner: TorchRunner, prompt: Any, seed: int, steps: int) -> list[list[RowResult]]:
    """What each row of each step was answered."""
    draw = random.Random(seed)
    driver = drive(runner, page=draw.choice((0, 1, 16)), seed=seed)
    live: list[dict[str, Any]] = []
    answers: list[list[RowResult]] = []
    quiet = 0
    for step in range(steps):
        if not quiet and draw.random() < 0.5:
            quiet = draw.choice((0, 4, 12))  # nobody comes, and nothing is forced
        elif quiet:
            quiet -= 1
        if not live or (not quiet and len(live) < 6):
            ids = prompt(draw.choice((1, 3, 20)), seed=seed * 100 + step)
            parent = draw.choice(live)["seq"] if live and draw.random() < 0.5 else None
            seq = driver.new() if parent is None else driver.fork(parent)
            live.append({"seq": seq, "feed": ids, "prompt": ids, "out": [], "sampling": sampling_of(draw)})
        draw.shuffle(live)
        asks, masks = [], {}
        for index, one in enumerate(live):
            asks.append(
                driver.ask(
                    one["seq"], one["feed"], sampling=one["sampling"], step=len(one["out"]),
                    output=list(one["out"]), prompt=tuple(one["prompt"]), logprob=len(one["prompt"]) > 1,
                    masked=len(one["prompt"]) == 3,
                )
            )  # fmt: skip
            if len(one["prompt"]) == 3:
                masks[index] = mask_of(draw.sample(range(VOCAB), 9), listed=draw.random() < 0.5)
        results = driver.step(asks, masks)
        answers.append(list(results))
        for one, result in zip(live, results):
            token = result.token
            assert token is not None
            one["out"].append(token)
            one["feed"] = [token]
            if not quiet and draw.random() < 0.1:  # a grammar says what comes
                one["feed"] = draw.choice(([token, 7, 9], [(token + 1) % VOCAB]))
                one["out"][-1:] = one["feed"]
        live = [one for one in live if len(one["out"]) < one["sampling"].max_new_tokens]
    return answers


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["llama", "qwen2, upper layers windowed"])
def test_no_answer_changes(
    tiny: Any, drive: Any, prompt: Any, load: Load, monkeypatch: pytest.MonkeyPatch, name: str, seed: int
) -> None:
    path, steps, taken = tiny(name).path, 60, []
    merged = lookahead.merged

    def counted(*given: Any) -> Tensor:
        taken.append(given[2])
        return merged(*given)

    monkeypatch.setattr("runtime.engine.runner.merged", counted)
    right = play(drive, load(path, 0), prompt, seed, steps)
    assert not taken
    found = play(drive, load(path, 8), prompt, seed, steps)
    for there, here in zip(right, found, strict=True):
        for one, other in zip(there, here, strict=True):
            assert one.token == other.token
            assert one.samples[0].logprob == pytest.approx(other.samples[0].logprob, abs=1e-4)
    # Whole plans, and some whose other rows are computed beside.
    assert sum(rest is None for rest in taken) > steps // 8
    assert any(rest is not None for rest in taken)


def test_what_cannot_go_on_is_not_queued(
    tiny: Any, drive: Any, prompt: Any, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the last token that is asked for, and for more rows than there are slots set aside."""
    case = tiny("llama")
    runner, sizes = load(case.path, 2), []
    recorded = Passes.recorded

    def counted(self: Passes, plan: StepPlan, ids: Tensor, positions: Tensor) -> Tensor | None:
        sizes.append(len(plan.rows))
        return recorded(self, plan, ids, positions)

    monkeypatch.setattr(Passes, "recorded", counted)
    few = SamplingParams(temperature=0.0, max_new_tokens=4)
    ids = prompt(5)
    assert drive(runner).generate([ids], 4, sampling=few) == [case.greedy(ids, 4)]
    assert sizes == [1, 1]
    assert drive(runner).generate([ids] * 3, 4, sampling=few) == [case.greedy(ids, 4)] * 3
    assert sizes == [1, 1]


def test_those_who_come_in_each_step_are_not_looked_ahead_for(
    tiny: Any, drive: Any, prompt: Any, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two passes in place of one would not pay."""
    runner, queued = load(tiny("llama").path, 8), []
    recorded = Passes.recorded

    def counted(self: Passes, plan: StepPlan, ids: Tensor, positions: Tensor) -> Tensor | None:
        queued.append(plan)
        return recorded(self, plan, ids, positions)

    monkeypatch.setattr(Passes, "recorded", counted)
    driver = drive(runner)
    old = driver.new()
    driver.step([driver.ask(old, prompt(3))])
    for step in range(40):
        driver.step([driver.ask(old, [9]), driver.ask(driver.new(), prompt(1, seed=step))])
    assert len(queued) < 8


def test_the_slots_set_aside_are_no_ones(tiny: Any, load: Load) -> None:
    runner = load(tiny("llama").path, 8)
    assert runner.slots == 4000
    assert runner._attention.pool.slots == 4008
    runner.release_memory(["kv_cache"])
    assert runner._attention.pool.slots == 1
    runner.restore_memory(["kv_cache"], "")
    assert runner._attention.pool.slots == 4008
