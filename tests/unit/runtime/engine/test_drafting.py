"""A small model that guesses beside a large one: what it guesses is what it would generate, whatever was
guessed wrong before."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from runtime.config.checkpoints import draft_spec
from runtime.config.model import ModelSpec
from runtime.config.runner import RunnerConfig
from runtime.engine.drafting import ROWS, DraftingRunner
from runtime.engine.runner import TorchRunner
from runtime.plan import Run, StepPlan
from runtime.protocol.errors import ModelLoadError
from runtime.protocol.sampling import SamplingParams

MOST = 4
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.2, seed=4, top_k=20),
    SamplingParams(temperature=0.8, seed=9, repetition_penalty=1.3, frequency_penalty=0.5),
]


@pytest.fixture
def load() -> Iterator[Callable[..., DraftingRunner]]:
    runners: list[DraftingRunner] = []

    def make(path: Any, draft: Any, **config: Any) -> DraftingRunner:
        words = {"max_total_tokens": 1500, "dtype": "float32", "device": "cpu", **config}
        settings = RunnerConfig(**words, draft_model=str(draft), draft_tokens=MOST)
        runners.append(DraftingRunner.load(path, ModelSpec.from_dir(path), settings))
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()


def play(driver: Any, prompts: list[list[int]], count: int, *, spoil: int = 0, guess: bool = True) -> Any:
    """`count` tokens of each prompt, by plans as a scheduler makes them; one guess of every `spoil`-th step
    is made wrong. The tokens, and how many guesses were verified, and how many of these were right."""
    seqs = [driver.new() for _ in prompts]
    outs: list[list[int]] = [[] for _ in prompts]
    drafts: list[list[int]] = [[] for _ in prompts]
    verified = right = 0
    while min(map(len, outs)) < count:
        asks = []
        for number, (seq, ids, out, mine) in enumerate(zip(seqs, prompts, outs, drafts)):
            tokens = [*(ids if not out else out[-1:]), *mine]
            sampling = SAMPLINGS[number % len(SAMPLINGS)]
            asks.append(
                driver.ask(
                    seq, tokens, sampling=sampling, step=len(out), output=list(out), prompt=tuple(ids),
                    drafts=len(mine), guesses=MOST if guess else 0, logprob=False,
                )
            )  # fmt: skip
        for number, result in enumerate(driver.step(asks)):
            more = [one.token for one in result.samples]
            wrong = len(drafts[number]) - (len(more) - 1)
            verified, right = verified + len(drafts[number]), right + len(more) - 1
            take_back(seqs[number], wrong)
            outs[number] += more
            drafts[number] = list(result.guesses)
            assert len(result.guesses) == (MOST if guess else 0)
            if spoil and drafts[number] and (len(outs[number]) + number) % spoil == 0:
                drafts[number][number % MOST] = (drafts[number][number % MOST] + 1) % 160
    return [out[:count] for out in outs], verified, right


def take_back(seq: Any, count: int) -> None:
    """The KV of its last `count` tokens is of no use."""
    piece = seq.path[-1]
    seq.length -= count
    piece.length -= count
    while count:
        last = piece.runs.pop()
        if last.length > count:
            piece.runs.append(Run(last.start, last.length - count))
        count = max(0, count - last.length)


@pytest.mark.parametrize("page", [0, 1])
def test_the_same_model_guesses_right(load: Any, tiny: Any, drive: Any, prompt: Any, page: int) -> None:
    path = tiny("llama").path
    prompts = [prompt(length, seed=length) for length in (1, 40, 9)]
    runner = load(path, path)
    expected, _, _ = play(drive(runner, page=page), prompts, 25, guess=False)
    for spoil in (0, 2):
        found, verified, right = play(drive(load(path, path), page=page), prompts, 25, spoil=spoil)
        assert found == expected
        assert verified > 40
        assert right == verified if not spoil else 0.2 * verified < right < verified


def test_another_model_changes_no_token(load: Any, tiny: Any, drive: Any, prompt: Any) -> None:
    prompts = [prompt(length, seed=length) for length in (30, 3, 12, 5)]
    case = tiny("llama")
    found, verified, _ = play(drive(load(case.path, tiny("qwen3").path), page=1), prompts, 20)
    plain = TorchRunner.load(
        case.path,
        ModelSpec.from_dir(case.path),
        RunnerConfig(max_total_tokens=1500, dtype="float32", device="cpu"),
    )
    expected, _, _ = play(drive(plain, page=1), prompts, 20, guess=False)
    plain.close()
    assert found == expected
    assert found[0] == case.greedy(prompts[0], 20)
    assert verified > 0


def test_below_a_shared_prefix_and_in_chunks(load: Any, tiny: Any, drive: Any, prompt: Any) -> None:
    """The small model's KV is shared, forked and copied with the large one's."""
    path = tiny("qwen3").path
    runner, root_ids = load(path, path), prompt(60, seed=9)
    driver = drive(runner, page=4)
    root = driver.new()
    for first in range(0, 60, 25):
        driver.step([driver.ask(root, root_ids[first : first + 25], sample=False)])
    ends = [prompt(length, seed=50 + length) for length in (2, 7)]
    seqs = [driver.fork(root) for _ in ends]
    results = driver.step([driver.ask(seq, end, guesses=MOST) for seq, end in zip(seqs, ends)])
    for end, result in zip(ends, results):
        truth = tiny("qwen3").greedy([*root_ids, *end], 1 + MOST)
        assert [result.token, *result.guesses] == truth


def test_more_rows_than_have_room_and_longer_ones_than_it_takes(
    load: Any, tiny: Any, drive: Any, prompt: Any
) -> None:
    path = tiny("llama").path
    made = load(path, path)
    short = DraftingRunner(made._target, made._draft, MOST, positions=40)
    driver = drive(short)
    results = driver.step(
        [
            driver.ask(driver.new(), prompt(size), guesses=wanted)
            for size, wanted in ((30, 9), (38, 4), (5, 0))
        ]
    )
    assert [len(one.guesses) for one in results] == [MOST, 0, 0]
    short._scratch = 2 * MOST - 1
    driver = drive(short)
    results = driver.step([driver.ask(driver.new(), prompt(5 + size), guesses=MOST) for size in range(3)])
    assert [len(one.guesses) for one in results] == [MOST, 0, 0]
    assert made.slots == 1500
    assert made._draft.slots == 1500 + MOST * ROWS


def test_what_cannot_guess_is_refused(tiny: Any, make: Any, tmp_path: Any) -> None:
    spec = ModelSpec.from_dir(tiny("llama").path)
    other = dataclasses.replace(spec, vocab_size=170)
    with pytest.raises(ModelLoadError, match="160 ids, the model 170"):
        draft_spec(other, str(tiny("llama").path))
    with pytest.raises(ModelLoadError):
        draft_spec(spec, str(tmp_path / "nowhere"))


def test_a_step_that_fails_leaves_it_ready(load: Any, tiny: Any, drive: Any, prompt: Any) -> None:
    path = tiny("llama").path
    runner = load(path, path)
    with pytest.raises(Exception, match="no rows"):
        runner.launch(StepPlan((), ()))
    with pytest.raises(Exception, match="without launch"):
        runner.finish({})
    driver = drive(runner)
    (result,) = driver.step([driver.ask(driver.new(), prompt(5), guesses=2)])
    assert [result.token, *result.guesses] == tiny("llama").greedy(prompt(5), 3)
