"""Ranks in processes of their own, which meet over gloo: the same answers as one process gives, for every
family; and what can happen to one of them."""

from __future__ import annotations

import contextlib
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

import psutil
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from runtime.config.model import ModelSpec
from runtime.config.runner import RunnerConfig
from runtime.engine.runner import TorchRunner
from runtime.plan import Row, Run, Segment, StepPlan
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
from tests.long.runtime.engine.ranks.test_tensor_parallel import GREEDY, close_to
from tests.process.runtime.engine.test_runners import ask, steps
from tests.unit.runtime.engine.ranks.ranks_here import SETTINGS

PATIENCE_S = 600.0  # four processes import torch: 8 s alone, two minutes beside many others
ONE = StepPlan((Row(1, (5,), 0, (Run(0, 1),), GREEDY),), ())
MASKED = StepPlan((Row(1, (5,), 0, (Run(0, 1),), GREEDY, masked=True),), ())


def start(path: Path, size: int = 2, load_timeout_s: float = PATIENCE_S, **config: Any) -> RunnerProcess:
    settings = RunnerConfig(**{**SETTINGS, "tp_size": size, **config})
    return RunnerProcess(path, ModelSpec.from_dir(path), settings, load_timeout_s=load_timeout_s)


@pytest.fixture
def ranks(tiny: Any) -> Iterator[Callable[..., RunnerProcess]]:
    """Makes them; in the end none is left."""
    made: list[RunnerProcess] = []

    def make(size: int = 2, **config: Any) -> RunnerProcess:
        made.append(start(tiny("llama").path, size, **config))
        return made[-1]

    yield make
    for one in made:
        one.close()
        assert not any(psutil.pid_exists(pid) for pid in one.pids)


# -- the same answers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("llama, tied, biased", 2),
        ("mistral, window", 2),
        ("qwen2", 2),
        ("qwen3", 4),
    ],
)
def test_each_family(tiny: Any, drive: Any, prompt: Any, name: str, size: int) -> None:
    prompts = [prompt(length, seed=length) for length in (1, 40, 55)]
    right = [tiny(name).greedy(ids, 16) for ids in prompts]
    with contextlib.closing(start(tiny(name).path, size)) as made:
        assert len(set(made.pids)) == size
        assert drive(made, page=1, seed=1).generate(prompts, 16, chunk=17) == right


def test_whatever_is_asked_and_kv_for_others(tiny: Any, prompt: Any) -> None:
    """As in test_tensor_parallel.py; one after the other on one pair, which takes long to start."""
    path = tiny("llama").path
    alone = TorchRunner.load(path, ModelSpec.from_dir(path), RunnerConfig(**SETTINGS), beside=False)
    seqs = iter(range(1, 1 << 30))
    with contextlib.closing(start(path, shared_kv=True)) as made:
        for number in range(4):
            for plan, masks, texts in steps(random.Random(number), alone.vocab_size, seqs):
                mine, theirs = ask(alone, plan, masks), ask(made, plan, masks)
                for one, other in zip(mine, theirs, strict=True):
                    close_to(one, other)
                for text, result in zip(texts, mine):
                    text.output.append(result.token if result.token is not None else 4)
        with pytest.raises(BadRequest, match="unknown logit processor"):
            made.verify(SamplingParams(custom_logit_processor="nobody"))
        with pytest.raises(InternalFault, match="vocabulary of 160"):
            ask(made, StepPlan((Row(1, (160,), 0, (Run(9, 1),), GREEDY),), ()))

        # KV of two processes, read as one pool, goes on in a pool of all heads; and the other way round.
        ids = prompt(30)
        right = tiny("llama").greedy(ids, 2)
        first = StepPlan((Row(1, tuple(ids), 0, (Run(10, 30),), GREEDY),), ())
        second = StepPlan(
            (Row(2, (right[0],), 30, (Run(100, 1),), GREEDY),), (Segment((Run(60, 30),), (0,), 0),)
        )
        assert made.kv_memory is not None
        span = made.kv_memory.layout.span
        for source, target in ((made, alone), (alone, made)):
            assert [one.token for one in ask(source, first)] == right[:1]
            there, here = source.kv_memory, target.kv_memory
            here.write([Run(60, 30)], span, "head", there.read([Run(10, 30)], span, "head"))
            assert [one.token for one in ask(target, second)] == right[1:]


# -- what can happen to a rank -------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named(ranks: Callable[..., RunnerProcess], victim: int) -> None:
    runner, told, heard = ranks(), [], threading.Event()

    def mourn(fault: RuntimeFault) -> None:
        told.append(fault)
        heard.set()

    runner.on_death(mourn)
    assert ask(runner, ONE)[0].token is not None
    os.kill(runner.pids[victim], signal.SIGSTOP)  # so that the other one waits for it
    runner.launch(ONE)
    os.kill(runner.pids[victim], signal.SIGKILL)
    killed = f"rank {victim} of the model's process was killed by SIGKILL"
    for act in (lambda: runner.finish({}), lambda: runner.launch(ONE), lambda: runner.unload_adapter(1)):
        with pytest.raises(InternalFault, match=killed):
            act()
    assert heard.wait(PATIENCE_S)
    assert [type(fault) for fault in told] == [EngineDead]
    assert killed in str(told[0])


@pytest.mark.parametrize("victim", [0, 1])
def test_a_silent_rank_is_named_when_the_step_has_had_its_time(
    ranks: Callable[..., RunnerProcess], victim: int
) -> None:
    runner = ranks(step_timeout_s=8.0)
    os.kill(runner.pids[victim], signal.SIGSTOP)
    runner.launch(ONE)
    late = rf"a forward pass did not end on rank {victim} within 8 s"
    with pytest.raises(DeadlineExceeded, match=late):
        runner.finish({})
    with pytest.raises(InternalFault, match=late):
        runner.launch(MASKED)


ATTENTION = """
import torch.distributed
from runtime.attention.torch_views import TorchViews

class Fails(TorchViews):
    def __init__(self, shape, slots, *more):
        if torch.distributed.get_rank() == 1 and slots == 65:
            raise MemoryError("no room for the pool of this rank")
        super().__init__(shape, slots, *more)

    def begin(self, plan):
        if torch.distributed.get_rank() == 1 and plan.rows[0].tokens == (99,):
            raise MemoryError("no room on this rank")
        return super().begin(plan)
"""


def test_what_one_rank_alone_cannot_do_is_told_by_it(
    ranks: Callable[..., RunnerProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd_attention.py").write_text(ATTENTION)
    info = tmp_path / "odd_attention-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: odd-attention\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[sglang_dsl.attention]\nodd = odd_attention:Fails\n")
    monkeypatch.syspath_prepend(tmp_path)
    runner = ranks(attention="odd")
    assert ask(runner, ONE)[0].token is not None
    runner.launch(StepPlan((Row(1, (99,), 0, (Run(0, 1),), GREEDY),), ()))
    with pytest.raises(InternalFault, match="no room on this rank"):
        runner.finish({})
    with pytest.raises(InternalFault, match="rank 1 of the model's process"):
        ask(runner, ONE)
    with pytest.raises(InternalFault, match="no room for the pool of this rank"):
        ranks(attention="odd", max_total_tokens=65)


@pytest.mark.parametrize("how", ["killed", "silent"])
def test_a_rank_lost_while_it_loads(tiny: Any, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped as soon as it is there, before it can have met the other one."""
    spawned: list[int] = []
    spawn = RunnerProcess._spawn

    def stop(self: RunnerProcess, rank: int) -> None:
        spawn(self, rank)
        pid = self._processes[rank].pid
        spawned.append(pid)
        if rank == 1:
            os.kill(pid, signal.SIGSTOP)
            if how == "killed":
                os.kill(pid, signal.SIGKILL)

    monkeypatch.setattr(RunnerProcess, "_spawn", stop)
    told = "rank 1 of the model's process was killed by SIGKILL while it loaded"
    if how == "silent":
        told = "the model was not loaded within 15 s"
    with pytest.raises(EngineDead, match=told):
        start(tiny("llama").path, load_timeout_s=15.0 if how == "silent" else PATIENCE_S)
    assert not any(psutil.pid_exists(pid) for pid in spawned)


def test_what_cannot_be_loaded_is_told_as_by_one_process(tiny: Any) -> None:
    with pytest.raises(ModelLoadError, match="max_total_tokens=1125899906842624 needs"):
        start(tiny("llama").path, max_total_tokens=1 << 50)
    with pytest.raises(BadRequest, match="3 ranks cannot share 4 attention heads"):
        start(tiny("llama").path, 3)


PARENT = """
import os, signal, sys
from pathlib import Path
from runtime.config.checkpoints import find_checkpoint
from runtime.config.model import ModelSpec
from runtime.config.runner import RunnerConfig
from runtime.processes.pipeline.runner_process import RunnerProcess

path = find_checkpoint("pocket")
config = RunnerConfig(max_total_tokens=64, threads=1, tp_size=2)
runner = RunnerProcess(path, ModelSpec.from_dir(path), config)
print(*runner.pids, flush=True)
os.kill(runner.pids[1], signal.SIGSTOP)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_no_rank_outlives_whoever_started_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PARENT], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    for pid in map(int, done.stdout.split()):
        until = time.monotonic() + PATIENCE_S
        with contextlib.suppress(psutil.NoSuchProcess):
            while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                assert time.monotonic() < until
                time.sleep(0.02)


# -- memory --------------------------------------------------------------------------------------------------


def resident(pid: int) -> tuple[int, int]:
    """Bytes of a process's own memory now, and of all that it ever had in memory at once, files included."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith(" kB")}
    return found["RssAnon"], found["VmHWM"]


def test_no_rank_ever_holds_the_whole_model(tiny: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16384, hidden_size=1024, intermediate_size=4096, num_hidden_layers=5,
        num_attention_heads=16, num_key_value_heads=8,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    weights = sum(weight.nbytes for weight in model.parameters())
    assert sum(weight.numel() for weight in model.parameters()) > 100e6
    model.save_pretrained(tmp_path)
    del model
    plain = {"pack_weights": "never", "max_total_tokens": 64}
    with contextlib.closing(start(tiny("llama").path, **plain)) as small:
        base = [resident(pid) for pid in small.pids]
    with contextlib.closing(start(tmp_path, **plain)) as made:
        for pid, (anonymous, peak) in zip(made.pids, base, strict=True):
            now, most = resident(pid)
            assert now - anonymous < 0.55 * weights
            # With what was read of the files, which the system keeps in memory as long as it likes.
            assert most - peak < 1.4 * weights
        assert ask(made, ONE)[0].token is not None
