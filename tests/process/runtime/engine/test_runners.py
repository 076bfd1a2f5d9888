"""The contract of a Runner, kept by the one in this process and by the one in a process of its own; both give
the same, bit for bit. And what only the second can meet: its process killed, stuck, or left alone."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from runtime.config.checkpoints import find_checkpoint
from runtime.config.engine import EngineConfig
from runtime.config.model import ModelSpec
from runtime.config.runner import RunnerConfig
from runtime.engine.runner import TorchRunner
from runtime.engine.sampling.logit_processors import PROCESSORS
from runtime.plan import Row, RowResult, Run, Runner, Segment, StepPlan, TokenMask
from runtime.processes.pipeline import loading
from runtime.processes.pipeline.runner_process import RunnerProcess
from runtime.protocol.errors import (
    BadRequest,
    DeadlineExceeded,
    EngineDead,
    InternalFault,
    ModelLoadError,
    RuntimeFault,
)
from runtime.protocol.sampling import SamplingParams

ROOT = Path(__file__).resolve().parents[4]
GREEDY = SamplingParams(temperature=0.0)
ONE = StepPlan((Row(1, (5,), 0, (Run(0, 1),), GREEDY),), ())
KINDS: dict[str, Callable[..., Any]] = {"here": TorchRunner.load, "own process": RunnerProcess}
# Packed: which weights a pass of few rows uses is timed by each process for itself otherwise.
SETTINGS = {
    "max_total_tokens": 2048, "dtype": "float32", "device": "cpu", "threads": 1, "seed": 7,
    "pack_weights": "always",
}  # fmt: skip


def make(kind: str, path: Path, **config: Any) -> Any:
    return KINDS[kind](path, ModelSpec.from_dir(path), RunnerConfig(**{**SETTINGS, **config}))


@pytest.fixture(scope="module")
def both(tiny: Any) -> Iterator[dict[str, Any]]:
    """One of each kind, on the same weights."""
    made = {kind: make(kind, tiny("llama").path, shared_kv=True) for kind in KINDS}
    yield made
    for runner in made.values():
        runner.close()


@pytest.fixture(params=KINDS)
def runner(request: pytest.FixtureRequest, both: dict[str, Any]) -> Any:
    return both[request.param]


@pytest.fixture
def alone(tiny: Any) -> Iterator[Callable[..., RunnerProcess]]:
    """Makes runners whose processes may come to harm."""
    made: list[RunnerProcess] = []

    def start(**config: Any) -> RunnerProcess:
        made.append(make("own process", tiny("llama").path, **config))
        return made[-1]

    yield start
    for one in made:
        one.close()
        assert not psutil.pid_exists(one.pid)


def packed(ids: Any, vocab: int = 160) -> np.ndarray:
    allowed = np.zeros(-(-vocab // 32) * 32, dtype=np.uint8)
    allowed[list(ids)] = 1
    return np.packbits(allowed, bitorder="little").view(np.uint32)


def ask(runner: Runner, plan: StepPlan, masks: dict[int, TokenMask] | None = None) -> tuple[RowResult, ...]:
    runner.launch(plan)
    return runner.finish(masks or {}).rows


# -- the contract --------------------------------------------------------------------------------------------


def test_greedy_text_is_the_models(tiny: Any, runner: Any, drive: Any, prompt: Any) -> None:
    prompts = [prompt(length, seed=length) for length in (1, 50)]
    right = [tiny("llama").greedy(ids, 24) for ids in prompts]
    assert (runner.slots, runner.vocab_size, runner.device) == (2048, 160, "cpu")
    assert drive(runner, page=1, seed=1).generate(prompts, 24, chunk=9) == right


@pytest.mark.parametrize(
    ("row", "segments", "told"),
    [
        (Row(1, (5,), 3, (Run(9, 1),), GREEDY), (Segment((Run(0, 2),), (0,), 0),), "position is 3"),
        (Row(1, (160,), 0, (Run(9, 1),), GREEDY), (), "vocabulary of 160"),
        (Row(1, (5,), 0, (Run(2048, 1),), GREEDY, masked=True), (), "pool of 2048 slots"),
        (Row(1, (), 0, (), GREEDY), (), "step plan, row 0 .sequence 1.: the row has no tokens"),
    ],
)
def test_a_plan_that_is_not_whole_is_told_and_the_runner_goes_on(
    runner: Any, row: Row, segments: Any, told: str
) -> None:
    with pytest.raises(InternalFault, match=told):
        ask(runner, StepPlan((row,), segments), {0: TokenMask(packed([3]))} if row.masked else {})
    assert ask(runner, ONE)[0].token is not None


def test_verbs_in_the_wrong_order(runner: Any) -> None:
    with pytest.raises(InternalFault, match="without launch"):
        runner.finish({})
    runner.launch(ONE)
    with pytest.raises(InternalFault, match="before finish"):
        runner.launch(ONE)
    assert runner.finish({}).rows[0].error is None


def test_done_is_said_of_a_pass_that_ended(runner: Any) -> None:
    masked = StepPlan((Row(1, (5,), 0, (Run(0, 1),), GREEDY, masked=True),), ())
    for plan in (ONE, masked):
        runner.launch(plan)
        while not runner.done():
            time.sleep(0.001)
        assert runner.finish({0: TokenMask(packed([9]))}).rows[0].token == 9
        assert runner.done()


def test_the_pool_is_reached_from_this_process(both: dict[str, Any]) -> None:
    """What a pass wrote is read there, and what is written there is what the next pass attends to."""
    long = StepPlan((Row(31, tuple(range(5, 25)), 0, (Run(100, 13), Run(300, 7)), GREEDY),), ())
    pieces = {}
    for kind, runner in both.items():
        runner.launch(long)
        runner.finish({})
        memory = runner.kv_memory
        assert memory is not None
        heads = memory.layout.span
        pieces[kind] = bytes(memory.read([Run(100, 13), Run(300, 7)], heads, "token"))
        assert any(pieces[kind])
        memory.write([Run(600, 20)], heads, "token", memoryview(pieces[kind]))
        moved = StepPlan(
            (Row(32, (9,), 20, (Run(700, 1),), GREEDY),), (Segment((Run(600, 20),), (0,), 0),), (31,)
        )
        runner.launch(moved)
        [found] = runner.finish({}).rows
        lying = StepPlan(
            (Row(33, (9,), 20, (Run(701, 1),), GREEDY),),
            (Segment((Run(100, 13), Run(300, 7)), (0,), 0),),
            (32,),
        )
        runner.launch(lying)
        [wanted] = runner.finish({}).rows
        assert found.token == wanted.token
        assert memory.mapping is not None
        copied, where_it_was = (
            np.frombuffer(memory.read([Run(slot, 1)], heads, "head"), np.float32) for slot in (700, 701)
        )
        # Sums over one run of slots and over two may be rounded otherwise.
        np.testing.assert_allclose(copied, where_it_was, rtol=1e-4, atol=1e-5)
    assert pieces["here"] == pieces["own process"]


def test_verify_refuses_before_anything_runs_and_also_while_a_pass_does(runner: Any) -> None:
    named = {"custom_logit_processor": "deterministic", "custom_params": {"token_id": 11}}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"custom_logit_processor": "nobody"}, "unknown logit processor 'nobody'; known: allowed_token_ids"),
        ({"custom_params": {"a": 1}}, "none is named"),
        ({"custom_logit_processor": "deterministic", "custom_params": {"token_id": 160}}, "token_id"),
    ]
    runner.verify(GREEDY)
    for during in (False, True):
        if during:
            runner.launch(ONE)
        runner.verify(SamplingParams(**named))
        for words, told in wrong:
            with pytest.raises(BadRequest, match=told) as caught:
                runner.verify(SamplingParams(**words))
            assert str(caught.value.where).startswith("sampling_params.custom_")
    assert runner.finish({}).rows[0].token is not None
    (got,) = ask(runner, StepPlan((Row(1, (5,), 0, (Run(0, 1),), SamplingParams(**named)),), ()))
    assert got.token == 11


def test_a_processor_that_was_registered_later_is_found(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROCESSORS._lines, "mine", "runtime.engine.sampling.processors:Deterministic")
    params = SamplingParams(custom_logit_processor="mine", custom_params={"token_id": 12})
    runner.verify(params)
    assert ask(runner, StepPlan((Row(1, (5,), 0, (Run(0, 1),), params),), ()))[0].token == 12


def test_what_cannot_be_sent_is_refused_before_it_runs(both: dict[str, Any]) -> None:
    for words in ({"custom_params": {"a": object()}}, {"logit_bias": {1 << 70: 1.0}}):
        with pytest.raises(BadRequest, match="cannot be sent"):
            both["own process"].verify(SamplingParams(**words))


def test_masks_of_many_rows(runner: Any) -> None:
    """Listed and packed ones, one array in several rows, more than fits into the first shared memory."""
    vocab, rows, masks, right = 160, [], {}, []
    wide = -(-vocab // 32) + 2000  # words beyond the vocabulary change nothing
    shared = np.arange(3, 160, 7)
    for index in range(600):
        rows.append(Row(index, (5,), 0, (Run(index, 1),), GREEDY, masked=True, logprob=index % 5 == 0))
        chosen = 3 + index % 150
        if index % 3 == 0:
            bits = np.zeros(wide, dtype=np.uint32)
            bits[: vocab // 32] = packed([chosen])
            masks[index] = TokenMask(bits)
        elif index % 3 == 1:
            masks[index] = TokenMask(packed([chosen]), np.array([chosen]))
        else:
            masks[index] = TokenMask(packed(shared), shared)
            chosen = -1
        right.append(chosen)
    got = [one.token for one in ask(runner, StepPlan(tuple(rows), ()), masks)]
    assert [token for token, one in zip(got, right) if one >= 0] == [one for one in right if one >= 0]
    free = [token for token, one in zip(got, right) if one < 0]
    assert set(free) <= set(shared.tolist())
    assert len(set(free)) == 1, "the same rows give the same"


def test_an_empty_mask_is_that_rows_error(runner: Any) -> None:
    rows = tuple(Row(index, (5,), 0, (Run(index, 1),), GREEDY) for index in range(3))
    nothing = np.array([], dtype=np.int64)
    got = ask(runner, StepPlan(rows, ()), {0: TokenMask(packed([])), 1: TokenMask(packed([]), nothing)})
    assert [one.error for one in got] == ["the mask allows no token"] * 2 + [None]


def test_loading_fails_in_the_same_words(tiny: Any) -> None:
    told = []
    for kind in KINDS:
        with pytest.raises(ModelLoadError) as caught:
            make(kind, tiny("llama").path, max_total_tokens=1 << 50)
        told.append(str(caught.value).partition(", ")[0])  # the rest tells how much is free
    assert told[0] == told[1]
    assert "max_total_tokens=1125899906842624 needs" in told[0]


def test_profiles_and_the_log(tiny: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tiny("llama").path
    spec, config = ModelSpec.from_dir(path), RunnerConfig(**SETTINGS)
    own = RunnerProcess(path, spec, config, profile_folder=str(tmp_path))
    with caplog.at_level("INFO"), contextlib.closing(own):
        with pytest.raises(BadRequest, match="no profile is being made"):
            own.stop()
        file = Path(own.start("mine", 2)["file"])
        assert file.parent == tmp_path / "mine"
        with pytest.raises(BadRequest, match="already"):
            own.start(None, None)
        for _ in range(2):
            ask(own, ONE)
            own.stepped()
        own.verify(SamplingParams(custom_logit_processor="deterministic", custom_params={"token_id": 1}))
        assert file.is_file()
    [line] = [one for one in caplog.records if "a profile was written" in one.getMessage()]
    assert line.name == "runtime.engine.profiler"


# -- bit for bit ---------------------------------------------------------------------------------------------


BAD_WORDS = {"custom_logit_processor": "bad_words", "custom_params": {"bad_words_ids": [[7, 8]]}}


class Text:
    """One sequence of a made-up scheduler: it grows, is cut back, changes what it asks for."""

    def __init__(self, seq: int, first: int, dice: random.Random, vocab: int) -> None:
        self.seq, self.first, self.dice, self.vocab = seq, first, dice, vocab
        self.prompt = [dice.randrange(vocab) for _ in range(dice.randint(1, 30))]
        self.output: list[int] = []
        self.computed = 0
        temperature = dice.choice([0.0, 0.7, 1.5])
        self.params = SamplingParams(
            temperature=temperature,
            top_p=dice.choice([1.0, 0.9]),
            top_k=dice.choice([-1, 20]),
            seed=dice.choice([None, 3]),
            frequency_penalty=dice.choice([0.0, 0.0, 0.5]),
            repetition_penalty=dice.choice([1.0, 1.0, 1.3]),
            logit_bias=dice.choice([{}, {5: 3.5, vocab - 1: -1.0}]),
            min_new_tokens=dice.choice([0, 0, 2]),
            **dice.choice([{}, {}, BAD_WORDS]),
        )
        self.reads = bool(
            self.params.frequency_penalty
            or self.params.repetition_penalty != 1.0
            or self.params.custom_logit_processor
        )

    def row(self) -> tuple[Row, tuple[Run, ...]]:
        dice, all_ids = self.dice, [*self.prompt, *self.output]
        if self.output and dice.random() < 0.15:  # taken back
            del self.output[dice.randrange(len(self.output)) :]
            all_ids = [*self.prompt, *self.output]
            self.computed = min(self.computed, len(all_ids) - 1)
        new = all_ids[self.computed :]
        count = dice.choice([0, 0, 2])
        scores = tuple((dice.randrange(len(new)), dice.randrange(self.vocab)) for _ in range(count))
        row = Row(
            self.seq, tuple(new), self.computed, (Run(self.first + self.computed, len(new)),), self.params,
            step=len(self.output), scores=scores, top_logprobs=dice.choice([0, 0, 4]),
            prompt=self.prompt if self.reads else (), output=self.output if self.reads else (),
            score_top=dice.choice([0, 2]), token_ids=dice.choice([(), (1, 2, 3)]),
            hidden=dice.choice(["none", "none", "last", "all"]), logprob=dice.random() < 0.5,
            masked=dice.random() < 0.4, drafts=dice.randrange(len(new)),
        )  # fmt: skip
        before = (Run(self.first, self.computed),) if self.computed else ()
        self.computed = len(all_ids)
        return row, before


Step = tuple[StepPlan, dict[int, TokenMask], list[Text]]


def steps(dice: random.Random, vocab: int, seqs: Iterator[int]) -> Iterator[Step]:
    texts: list[Text] = []
    free = [256 * place for place in range(8)]
    released: list[int] = []
    for _ in range(14):
        while free and dice.random() < 0.5:
            texts.append(Text(next(seqs), free.pop(), dice, vocab))
        if len(texts) > 1 and dice.random() < 0.2:
            gone = texts.pop(dice.randrange(len(texts)))
            released.append(gone.seq)
            free.append(gone.first)
        if not texts:
            continue
        rows, segments, masks = [], [], {}
        for index, text in enumerate(texts):
            row, before = text.row()
            rows.append(row)
            if before:
                segments.append(Segment(before, (index,), 0))
            if row.masked or (row.sampling.min_new_tokens > row.step):
                ids = np.array(sorted(dice.sample(range(vocab), dice.choice([1, 12, vocab // 2]))))
                masks[index] = TokenMask(packed(ids, vocab), dice.choice([None, ids]))
        yield StepPlan(tuple(rows), tuple(segments), tuple(released)), masks, texts
        released.clear()


@pytest.fixture(scope="module")
def pocket() -> Iterator[list[Any]]:
    made = [make(kind, find_checkpoint("pocket")) for kind in KINDS]
    yield made
    for one in made:
        one.close()


def test_both_give_the_same_bit_for_bit(pocket: list[Any]) -> None:
    here, other = pocket
    seqs = iter(range(1, 1 << 30))
    for case in range(6):
        for plan, masks, texts in steps(random.Random(case), here.vocab_size, seqs):
            mine, theirs = ask(here, plan, masks), ask(other, plan, masks)
            assert mine == theirs, (case, plan)
            for text, result in zip(texts, mine):
                text.output.append(result.token if result.token is not None else 4)


# -- what can happen to a process ----------------------------------------------------------------------------


def test_a_killed_process_is_told_to_the_step_and_to_those_who_asked(alone: Any) -> None:
    runner, told, heard = alone(), [], threading.Event()

    def mourn(fault: RuntimeFault) -> None:
        told.append(fault)
        heard.set()

    runner.on_death(mourn)
    ask(runner, ONE)
    masked = StepPlan((Row(1, (5,), 0, (Run(0, 1),), GREEDY, masked=True),), ())
    runner.launch(masked)
    os.kill(runner.pid, signal.SIGKILL)
    for act in (lambda: runner.finish({}), lambda: runner.launch(ONE), lambda: runner.unload_adapter(1)):
        with pytest.raises(InternalFault, match="the model's process was killed by SIGKILL"):
            act()
    assert heard.wait(300)
    assert isinstance(told[0], EngineDead)
    assert "was killed by SIGKILL" in str(told[0])
    runner.on_death(mourn)
    assert len(told) == 2, "also who asks afterwards"


def test_a_stuck_process_is_killed_when_the_step_has_had_its_time(alone: Any) -> None:
    runner = alone(step_timeout_s=0.3)
    os.kill(runner.pid, signal.SIGSTOP)
    runner.launch(ONE)
    with pytest.raises(DeadlineExceeded, match=r"a forward pass did not end within 0\.3 s"):
        runner.finish({})
    with pytest.raises(InternalFault, match="was killed by SIGKILL"):
        runner.verify(SamplingParams(custom_logit_processor="deterministic", custom_params={"token_id": 1}))


def test_a_closed_one_has_ended_though_it_was_stopped_and_says_so(
    alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.processes.pipeline.runner_process.CLOSE_S", 0.2)
    runner = alone()
    runner.launch(ONE)
    os.kill(runner.pid, signal.SIGSTOP)
    runner.close()
    monkeypatch.undo()
    runner.close()
    assert runner._processes[0].wait(300)
    with pytest.raises(InternalFault, match="the runner was closed"):
        runner.finish({})


@pytest.mark.parametrize("code", ["raise SystemExit(3)", "import time; time.sleep(600)"])
def test_one_that_cannot_start(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """In the place of the interpreter stands a program that ends, or says nothing."""
    program = tmp_path / "python"
    program.write_text(f"#!{sys.executable}\n{code}\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    path = tiny("llama").path
    told = "ended with code 3 while it loaded" if "SystemExit" in code else r"not loaded within 0\.5 s"
    with pytest.raises(EngineDead, match=told):
        RunnerProcess(path, ModelSpec.from_dir(path), load_timeout_s=60.0 if "SystemExit" in code else 0.5)


ENGINE = """
import os, signal, sys
from runtime.api import Engine
from runtime.protocol.errors import RuntimeFault

engine = Engine("pocket", max_total_tokens=2048, threads=1, runner_process=True)
assert engine.generate("The city of", {"max_new_tokens": 4, "temperature": 0}).meta["completion_tokens"] == 4
threads = os.listdir(f"/proc/{os.getpid()}/task")
[child] = sum((open(f"/proc/{os.getpid()}/task/{one}/children").read().split() for one in threads), [])
print("torch" in sys.modules, child, flush=True)
if sys.argv[1] == "dies":
    os.kill(int(child), signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGKILL)
os.kill(int(child), signal.SIGKILL)
for _ in range(2):
    try:
        engine.generate("The city of", {"max_new_tokens": 400, "ignore_eos": True})
    except RuntimeFault as fault:
        print(fault)
engine.close()
"""


def engine_process(how: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", ENGINE, how],
        capture_output=True, text=True, timeout=300, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_an_engine_with_it_holds_no_torch_and_says_why_it_ended() -> None:
    done = engine_process("is told")
    assert done.returncode == 0, done.stderr
    first, *faults = done.stdout.splitlines()
    assert first.startswith("False ")
    assert len(faults) == 2
    assert all("the model's process was killed by SIGKILL" in fault for fault in faults), faults


def test_it_ends_with_whoever_started_it_even_when_stopped() -> None:
    done = engine_process("dies")
    assert done.returncode == -signal.SIGKILL, done.stderr
    torch, child = done.stdout.split()
    assert torch == "False"
    until = time.monotonic() + 60
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(int(child)).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < until
            time.sleep(0.02)


def test_a_process_of_its_own_is_the_default_where_it_pays() -> None:
    decide = loading.needs_process.__wrapped__  # without what tests/conftest.py does
    cores = len(os.sched_getaffinity(0))
    small = ModelSpec.from_dir(find_checkpoint("pocket"))
    large = dataclasses.replace(small, hidden_size=1024)
    assert sum(small.matrix_sizes) < loading.SMALL < sum(large.matrix_sizes)
    assert decide(EngineConfig(model="pocket"), small) is False
    assert decide(EngineConfig(model="pocket"), large) is (cores >= 2)
    assert decide(EngineConfig(model="pocket", runner_process=False), large) is False
    assert decide(EngineConfig(model="pocket", runner_process=True), small) is True
