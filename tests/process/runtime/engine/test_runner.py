"""TorchRunner: the same greedy text however it is batched, chunked, shared and paged; faults stay local."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from runtime.config.model import ModelSpec
from runtime.config.runner import RunnerConfig
from runtime.engine.runner import TorchRunner
from runtime.plan import MediaSpan, Row, Run, Segment, StepPlan, TokenMask
from runtime.protocol.errors import BadRequest, DeadlineExceeded, InternalFault, ModelLoadError
from runtime.protocol.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture
def load() -> Iterator[Callable[..., TorchRunner]]:
    runners: list[TorchRunner] = []

    def make(path: Any, **config: Any) -> TorchRunner:
        settings = RunnerConfig(**{"max_total_tokens": 2048, "dtype": "float32", "device": "cpu", **config})
        runners.append(TorchRunner.load(path, ModelSpec.from_dir(path), settings))
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()


@pytest.fixture
def runner(load: Callable[..., TorchRunner], tiny: Any) -> TorchRunner:
    return load(tiny("llama").path)


def packed(ids: list[int], vocab: int = 160) -> np.ndarray:
    allowed = np.zeros(-(-vocab // 32) * 32, dtype=np.uint8)
    allowed[ids] = 1
    return np.packbits(allowed, bitorder="little").view(np.uint32)


def test_greedy_64_tokens(case: Any, load: Any, drive: Any, prompt: Any) -> None:
    prompts = [prompt(length, seed=length) for length in (1, 50)]
    right = [case.greedy(ids, 64) for ids in prompts]
    runner = load(case.path)
    assert drive(runner).generate(prompts[1:2], 64) == right[1:2]
    assert drive(runner, page=1, seed=1).generate(prompts, 64, chunk=9) == right


def test_greedy_64_tokens_below_a_shared_prefix(tiny: Any, load: Any, drive: Any, prompt: Any) -> None:
    case = tiny("qwen3")
    runner, root_ids = load(case.path), prompt(100, seed=9)
    ends = [prompt(length, seed=50 + length) for length in (1, 4, 17, 30)]
    driver = drive(runner, page=4)
    root = driver.new()
    driver.step([driver.ask(root, root_ids, sample=False)])
    outs = driver.go_on([driver.fork(root) for _ in ends], ends, 64)
    assert outs == [case.greedy([*root_ids, *end], 64) for end in ends]


def test_scores_and_top_are_natural_logs_of_the_plain_distribution(
    tiny: Any, runner: TorchRunner, drive: Any, prompt: Any
) -> None:
    ids = prompt(40)
    right = tiny("llama").logits(ids).log_softmax(-1)
    driver = drive(runner)
    wanted = tuple((place, ids[place + 1]) for place in range(39))
    hot = SamplingParams(temperature=2.0, top_k=3, seed=1, frequency_penalty=1.0)
    mask = TokenMask(packed([5, 6, 7]))
    (got,) = driver.step(
        [driver.ask(driver.new(), ids, sampling=hot, scores=wanted, top_logprobs=160, output=(5, 5))],
        {0: mask},
    )
    assert got.token in (5, 6, 7)
    assert got.samples[0].logprob == pytest.approx(float(right[-1, got.token]), abs=1e-4)
    assert got.scores == pytest.approx([float(right[place, target]) for place, target in wanted], abs=1e-4)
    assert [token for token, _ in got.samples[0].top][:5] == right[-1].topk(5).indices.tolist()
    assert dict(got.samples[0].top) == pytest.approx(dict(enumerate(right[-1].tolist())), abs=1e-4)
    assert sum(math.exp(value) for _, value in got.samples[0].top) == pytest.approx(1.0, abs=1e-4)


def test_scores_in_chunks_give_the_same(
    runner: TorchRunner, drive: Any, prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = prompt(50)
    wanted = tuple((place, 5 + place) for place in (0, 49, 7, 7, 20))
    driver = drive(runner)
    (whole,) = driver.step([driver.ask(driver.new(), ids, scores=wanted, sample=False)])
    monkeypatch.setattr("runtime.engine.sampling.logprobs.CHUNK_BYTES", 2 * 160 * 4)
    (parts,) = driver.step([driver.ask(driver.new(), ids, scores=wanted, sample=False)])
    assert whole.token is None
    assert parts.scores == pytest.approx(whole.scores, abs=1e-5)


@pytest.mark.parametrize(
    "words",
    [
        {"temperature": 0.0},
        {"temperature": 1.3, "seed": 5},
        {"temperature": 0.9, "seed": 1, "frequency_penalty": 1.5, "repetition_penalty": 1.2},
    ],
)
def test_drafts_give_what_one_token_at_a_time_gives(
    runner: TorchRunner, drive: Any, prompt: Any, words: Any
) -> None:
    """As many tokens as were guessed right, and one more; rows with and without right guesses in one step."""
    ids, driver = prompt(30), drive(runner)
    asked: dict[str, Any] = {"sampling": SamplingParams(**words), "prompt": tuple(ids), "top_logprobs": 2}
    seq, feed, right = driver.new(), ids, []
    for step in range(9):
        output = tuple(one.token for one in right)
        (got,) = driver.step([driver.ask(seq, feed, step=step, output=output, **asked)])
        right += got.samples
        feed = [got.token]
    truth = [one.token for one in right]
    asks, sizes = [], []
    for good, guesses in ((0, 3), (1, 4), (3, 4), (4, 4), (0, 0), (6, 7)):
        drafts = truth[1 : 1 + guesses]
        if good < guesses:
            drafts[good] = (drafts[good] + 1) % 160
        row = driver.ask(
            driver.new(), [*ids, truth[0], *drafts], step=1, output=(truth[0],), drafts=guesses, **asked
        )
        asks.append(row)
        sizes.append(good + 1)
    for result, size in zip(driver.step(asks), sizes):
        assert [one.token for one in result.samples] == truth[1 : 1 + size]
        for mine, theirs in zip(result.samples, right[1:]):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert dict(mine.top) == pytest.approx(dict(theirs.top), abs=1e-4)


@pytest.mark.parametrize(
    "words", [{"temperature": 0.0}, {"temperature": 1.3, "seed": 5, "repetition_penalty": 1.2}]
)
@pytest.mark.parametrize("listed", [False, True])
def test_drafts_behind_masks(runner: TorchRunner, drive: Any, prompt: Any, words: Any, listed: bool) -> None:
    """Each place has its mask; nothing is sampled behind a draft that has none."""
    ids, driver, dice = prompt(30), drive(runner), random.Random(5)
    masks = []
    for _ in range(6):
        allowed = sorted(dice.sample(range(160), 9))
        masks.append(TokenMask(packed(allowed), np.array(allowed) if listed else None))
    asked: dict[str, Any] = {"sampling": SamplingParams(**words), "prompt": tuple(ids), "logprob": not listed}
    seq, feed, truth = driver.new(), ids, []
    for step, mask in enumerate(masks):
        row = driver.ask(seq, feed, step=step, output=tuple(truth), masked=True, **asked)
        feed = [driver.step([row], {0: mask})[0].token]
        truth += feed
    asks, given, sizes = [], {}, []
    for good, guesses, known in ((4, 4, 4), (2, 4, 4), (0, 2, 2), (4, 4, 2), (3, 3, 0)):
        drafts = truth[1 : 1 + guesses]
        if good < guesses:
            drafts[good] = (drafts[good] + 1) % 160
        given[len(asks)] = masks[1]._replace(behind=tuple(masks[2 : 2 + known]))
        words_of = {**asked, "drafts": guesses, "masked": True}
        first = [*ids, truth[0]]
        asks.append(driver.ask(driver.new(), [*first, *drafts], step=1, output=(truth[0],), **words_of))
        sizes.append(min(good, known) + 1)
    for result, size in zip(driver.step(asks, given), sizes):
        assert [one.token for one in result.samples] == truth[1 : 1 + size]


def test_rows_of_different_wants(tiny: Any, runner: TorchRunner, drive: Any, prompt: Any) -> None:
    driver, ids = drive(runner), [prompt(length, seed=length) for length in (5, 6, 7)]
    first, second, third = driver.step(
        [
            driver.ask(driver.new(), ids[0], sample=False),
            driver.ask(driver.new(), ids[1], top_logprobs=2),
            driver.ask(driver.new(), ids[2], scores=((2, 11),)),
        ]
    )
    assert (first.samples, first.scores) == ((), ())
    assert second.token == tiny("llama").greedy(ids[1], 1)[0]
    assert second.samples[0].top[0][0] == second.token
    assert len(second.samples[0].top) == 2
    assert third.samples[0].top == ()
    assert len(third.scores) == 1


def test_masks_by_bits_and_by_ids_agree(runner: TorchRunner, drive: Any, prompt: Any) -> None:
    ids, allowed = prompt(20), [3, 31, 32, 63, 64, 100, 159]
    driver = drive(runner)
    for sampling in (GREEDY, SamplingParams(seed=3), SamplingParams(seed=4, temperature=3.0, top_p=0.7)):
        results = driver.step(
            [driver.ask(driver.new(), ids, sampling=sampling) for _ in range(2)],
            {0: TokenMask(packed(allowed)), 1: TokenMask(packed(allowed), np.array(allowed))},
        )
        assert results[0].token == results[1].token
        assert results[0].token in allowed


def test_an_empty_mask_is_that_rows_error(runner: TorchRunner, drive: Any, prompt: Any) -> None:
    driver = drive(runner)
    empty = np.array([], dtype=np.int64)
    results = driver.step(
        [driver.ask(driver.new(), prompt(5)) for _ in range(3)],
        {0: TokenMask(packed([])), 1: TokenMask(packed([]), empty)},
    )
    assert [result.error is None for result in results] == [False, False, True]
    assert results[2].token is not None


@pytest.mark.parametrize("seed", [0, 7])
def test_a_seed_gives_the_same_whatever_else_runs(
    load: Any, tiny: Any, drive: Any, prompt: Any, seed: int
) -> None:
    mine, sampling = prompt(12), SamplingParams(temperature=1.5, top_p=0.95, seed=seed)
    alone = drive(load(tiny("llama").path)).generate([mine], 30, sampling=sampling)[0]
    runner = load(tiny("llama").path)
    others = [prompt(length, seed=length) for length in (3, 40, 77)]
    driver = drive(runner, page=1)
    seqs = [driver.new() for _ in range(4)]
    feed: list[Any] = [others[0], mine, others[1], others[2]]
    out: list[int] = []
    params = [SamplingParams(seed=1), sampling, SamplingParams(), SamplingParams(temperature=0.5, top_k=9)]
    for step in range(30):
        asks = [driver.ask(s, f, step=step, sampling=p) for s, f, p in zip(seqs, feed, params)]
        results = driver.step(asks)
        feed = [[result.token] for result in results]
        out.append(results[1].token)
    assert out == alone
    assert len(set(out)) > 5


def test_without_a_seed_each_sequence_has_its_own(load: Any, tiny: Any, drive: Any, prompt: Any) -> None:
    sampling = SamplingParams(temperature=2.0)
    runs = [
        drive(load(tiny("llama").path, seed=seed)).generate([prompt(5)] * 4, 12, sampling=sampling)
        for seed in (1, 1, 2)
    ]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
    assert len({tuple(out) for out in runs[0]}) == 4


def test_penalties_reach_the_draw(tiny: Any, runner: TorchRunner, drive: Any, prompt: Any) -> None:
    ids = prompt(10)
    best = tiny("llama").logits(ids)[-1].topk(3).indices.tolist()
    driver = drive(runner)

    def token(output: tuple[int, ...] = (), given: tuple[int, ...] = (), **words: float) -> int:
        sampling = SamplingParams(temperature=0.0, **words)
        ask = driver.ask(driver.new(), ids, sampling=sampling, output=output, prompt=given)
        (result,) = driver.step([ask])
        assert result.token is not None
        return result.token

    many = tuple(best[:1] * 50)
    assert token() == best[0]
    assert token(many, frequency_penalty=2.0) == best[1]
    assert token((*many, *best[1:2] * 50), frequency_penalty=2.0) == best[2]
    assert token(given=many, frequency_penalty=2.0) == best[0]  # only output counts


def test_a_row_that_is_not_finite_harms_no_other(load: Any, tiny: Any, drive: Any, prompt: Any) -> None:
    runner = load(tiny("llama").path)
    driver = drive(runner)
    seqs, ids = [driver.new() for _ in range(3)], prompt(8)
    first = driver.step([driver.ask(seq, ids) for seq in seqs])
    with torch.inference_mode():
        runner._attention.pool.kv[seqs[1].path[0].runs[0].start] = torch.nan
    results = driver.step([driver.ask(s, [r.token], scores=((0, 5),)) for s, r in zip(seqs, first)])
    assert "finite" in (results[1].error or "")
    assert (results[1].token, results[1].scores) == (None, ())
    right = tiny("llama").greedy(ids, 2)[1]
    assert [results[0].token, results[2].token] == [right, right]


@pytest.mark.parametrize(
    ("row", "segments", "told"),
    [
        (Row(1, (5,), 3, (Run(9, 1),), GREEDY), (Segment((Run(0, 2),), (0,), 0),), "position is 3"),
        (Row(1, (160,), 0, (Run(9, 1),), GREEDY), (), "vocabulary"),
        (Row(1, (-1,), 0, (Run(9, 1),), GREEDY), (), "vocabulary"),
        (Row(1, (5, 6), 0, (Run(9, 1),), GREEDY), (), "do not fit"),
        (Row(1, (5,), 0, (Run(2048, 1),), GREEDY), (), "2048 slots"),
        (Row(1, (5,), 2, (Run(0, 1),), GREEDY), (Segment((Run(2047, 2),), (0,), 0),), "2048 slots"),
        (Row(1, (5,), 2, (Run(0, 1),), GREEDY), (Segment((Run(0, 2),), (0, 4), 0),), "row 4"),
        (Row(1, (), 0, (), GREEDY), (), "no tokens"),
        (Row(1, (5,), 0, (Run(0, 1),), GREEDY, scores=((1, 5),)), (), "scores"),
        (Row(1, (5,), 0, (Run(0, 1),), GREEDY, drafts=1), (), "1 of its 1 tokens are drafts"),
        (Row(1, (5, 6), 0, (Run(0, 2),), GREEDY, sample=False, drafts=1), (), "drafts"),
        (Row(1, (5,), 0, (Run(0, 1),), GREEDY, adapter=3), (), "adapter 3"),
        (Row(1, (5,), 0, (Run(0, 1),), GREEDY, media=(MediaSpan(1, 0, 0, 1),)), (), "no media"),
    ],
)
def test_a_plan_that_is_not_whole_is_refused_before_it_runs(
    runner: TorchRunner, drive: Any, prompt: Any, row: Row, segments: Any, told: str
) -> None:
    with pytest.raises(InternalFault, match=told):
        runner.launch(StepPlan((row,), segments))
    assert drive(runner).generate([prompt(4)], 3)  # and the runner goes on


def test_verbs_in_the_wrong_order(runner: TorchRunner) -> None:
    plan = StepPlan((Row(1, (5,), 0, (Run(0, 1),), GREEDY),), ())
    with pytest.raises(InternalFault, match="without launch"):
        runner.finish({})
    runner.launch(plan)
    with pytest.raises(InternalFault, match="before finish"):
        runner.launch(plan)
    assert runner.finish({}).rows[0].error is None


def test_the_caller_is_free_while_the_pass_runs_and_waits_no_longer_than_the_limit(
    load: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load(tiny("llama").path, step_timeout_s=0.2)
    plan = StepPlan((Row(1, (5,), 0, (Run(0, 1),), GREEDY),), ())
    go_on, ended, forward = threading.Event(), threading.Event(), runner._forward

    def slow(*given: Any) -> Any:
        go_on.wait(300)
        try:
            return forward(*given)
        finally:
            ended.set()

    monkeypatch.setattr(runner, "_forward", slow)
    runner.launch(plan)
    assert not ended.is_set()
    with pytest.raises(DeadlineExceeded, match=r"0\.2 s"):
        runner.finish({})
    go_on.set()
    monkeypatch.undo()
    runner._config = RunnerConfig(step_timeout_s=100)
    runner.launch(plan)
    assert runner.finish({}).rows[0].token is not None


def test_a_failed_pass_is_told_and_the_next_one_runs(
    runner: TorchRunner, drive: Any, prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(runner._decoder, "hidden", fail)
    with pytest.raises(InternalFault, match="no such kernel"):
        drive(runner).generate([prompt(4)], 1)
    monkeypatch.undo()
    assert drive(runner).generate([prompt(4)], 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bfloat16_weights_and_compute(
    tmp_path: Any, make: Any, load: Any, drive: Any, prompt: Any, dtype: str
) -> None:
    case = make(tmp_path, "llama", torch.bfloat16)
    assert ModelSpec.from_dir(tmp_path).dtype == "bfloat16"
    ids = prompt(30)
    driver = drive(load(tmp_path, dtype=dtype))
    (got,) = driver.step([driver.ask(driver.new(), ids, top_logprobs=160)])
    right = case.logits(ids)[-1].log_softmax(-1)
    tolerance = 1e-4 if dtype == "float32" else 0.5
    assert dict(got.samples[0].top) == pytest.approx(dict(enumerate(right.tolist())), abs=tolerance)


@pytest.mark.parametrize("pack", ["always", "never"])
def test_packing_changes_no_text(tiny: Any, load: Any, drive: Any, prompt: Any, pack: str) -> None:
    case = tiny("llama")
    prompts = [prompt(5, seed=seed) for seed in range(9)] + [prompt(count) for count in (9, 20, 33)]
    runner = load(case.path, pack_weights=pack)
    right = [case.greedy(ids, 20) for ids in prompts]
    assert drive(runner).generate(prompts, 20) == right
    assert [drive(runner).generate([ids], 20)[0] for ids in prompts] == right


def test_on_a_cpu_it_computes_in_float32_unless_asked(tmp_path: Any, make: Any, load: Any) -> None:
    """In bfloat16 outputs would depend on what else is in the batch."""
    case = make(tmp_path, "llama", torch.bfloat16)
    assert load(case.path, dtype="auto")._decoder.dtype == torch.float32
    assert load(case.path, dtype="bfloat16")._decoder.dtype == torch.bfloat16


def test_slots_come_from_memory_unless_given(load: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny("llama").path
    assert load(path, max_total_tokens=77).slots == 77
    each = 2 * 3 * 2 * 16 * 4
    monkeypatch.setattr("runtime.engine.memory.available_bytes", lambda device: 10_000 * each)
    assert load(path, max_total_tokens=None, memory_fraction=0.5).slots == 5000
    with pytest.raises(ModelLoadError, match="at most 10000 fit"):
        load(path, max_total_tokens=10_001)
    with pytest.raises(ModelLoadError, match="memory_fraction"):
        load(path, max_total_tokens=None, memory_fraction=0.005)
    monkeypatch.setattr("runtime.engine.memory.available_bytes", lambda device: 1000)
    with pytest.raises(ModelLoadError, match="weights need"):
        load(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("device", "warp"),
        ("dtype", "int3"),
        ("max_total_tokens", 0),
        ("memory_fraction", 0.0),
        ("pack_weights", "maybe"),
        ("threads", 0),
    ],
)
def test_settings_are_checked(tiny: Any, load: Any, field: str, value: Any) -> None:
    with pytest.raises(BadRequest, match=field):
        load(tiny("llama").path, **{field: value})


def test_a_device_that_is_not_there_is_a_typed_error(tiny: Any, load: Any) -> None:
    with pytest.raises(ModelLoadError, match="cuda:99"):
        load(tiny("llama").path, device="cuda:99")
