"""A runner on kernels, with and without recorded steps, says what transformers says. Without a GPU kernels
are interpreted, and a recorded step is one that is computed again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from runtime.config.model import ModelSpec
from runtime.config.runner import RunnerConfig
from runtime.engine.graphs import CudaRecorder, sizes_up_to
from runtime.engine.runner import TorchRunner
from runtime.kernels.device import current
from runtime.plan import Adapter, StepPlan
from tests.unit.runtime.engine.conftest import Tiny
from tests.unit.runtime.lora.making import make_adapter

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinity, in the interpreter
ON_GPU = torch.cuda.is_available()


class Again:
    """A recorder for a CPU."""

    def __init__(self) -> None:
        self.recorded = self.repeated = 0

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], object]]:
        self.recorded += 1
        out = run()

        def again() -> None:
            self.repeated += 1
            out.copy_(run())

        return out, again


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., TorchRunner]]:
    """With all kernels."""
    monkeypatch.setattr("runtime.kernels.table.compiled", lambda device: True)
    monkeypatch.setattr("runtime.engine.sampling.rows.compiled", lambda device: True)
    runners: list[TorchRunner] = []

    def make(path: Any, **config: Any) -> TorchRunner:
        words = {"cuda_graph": False, "cuda_graph_max_bs": 8, **config}
        settings = RunnerConfig(max_total_tokens=512, dtype="float32", attention="triton", **words)
        runners.append(TorchRunner.load(path, ModelSpec.from_dir(path), settings))
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()


def generated(
    runner: TorchRunner, drive: Any, prompt: Any, count: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts that share a prefix, and what comes after them."""
    root_ids, ends = prompt(20, seed=9), [prompt(length, seed=length) for length in (1, 4, 9)]
    driver = drive(runner, page=1, seed=1)
    root = driver.new()
    driver.step([driver.ask(root, root_ids, sample=False)])
    outs = driver.go_on([driver.fork(root) for _ in ends], ends, count)
    return [[*root_ids, *end] for end in ends], outs


def test_recorded_steps_say_the_same(tiny: Any, load: Any, drive: Any, prompt: Any) -> None:
    case = tiny("qwen3")
    runner, again = load(case.path), Again()
    with torch.inference_mode():
        runner._passes.record(4, CudaRecorder(torch.device("cuda")) if ON_GPU else again)
    prompts, outs = generated(runner, drive, prompt, 3)
    assert outs == [case.greedy(ids, 3) for ids in prompts]
    if not ON_GPU:
        assert (again.recorded, again.repeated) == (3, 2)  # the first token comes from the prompts' pass


def test_a_step_that_does_not_fit_is_computed_as_it_is(
    tiny: Any, load: Any, drive: Any, prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, again = tiny("llama"), Again()
    runner = load(case.path)
    with torch.inference_mode():
        runner._passes.record(2, again)
    prompts, outs = generated(runner, drive, prompt, 2)  # of three rows
    assert outs == [case.greedy(ids, 2) for ids in prompts]
    assert again.repeated == 0


def test_rows_with_adapters_are_computed_as_they_are(
    tiny: Any, load: Any, drive: Any, prompt: Any, tmp_path: Path
) -> None:
    """Beside recorded steps of those without."""
    case, again, ids = tiny("llama"), Again(), prompt(5)
    made = make_adapter(tmp_path / "a", case.model)
    runner = load(case.path, enable_lora=True, adapters=(Adapter(1, "a", str(made.path)),))
    with torch.inference_mode():
        runner._passes.record(2, again)
    adapted = Tiny(case.path, made.model)
    for number, model, repeated in ((1, adapted, 0), (0, case, 1), (1, adapted, 1)):
        assert drive(runner).generate([ids], 2, adapter=number) == [model.greedy(ids, 2)]
        assert again.repeated == repeated


def test_a_pass_that_cannot_be_recorded_is_not(
    tiny: Any, load: Any, drive: Any, prompt: Any, caplog: pytest.LogCaptureFixture
) -> None:
    case = tiny("llama")
    runner = load(case.path)

    def fails(run: Callable[[], Tensor]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    runner._passes.record(2, fails)
    assert "not permitted when stream is capturing" in caplog.text
    prompts, outs = generated(runner, drive, prompt, 1)
    assert outs == [case.greedy(ids, 1) for ids in prompts]


def test_kernels_are_launched_on_the_models_gpu() -> None:
    assert current(torch.device("cuda:1")).idx == 1  # type: ignore[attr-defined]
    with current(torch.device("cpu")):
        pass


def test_sizes() -> None:
    assert sizes_up_to(20) == [1, 2, 4, 8, 16, 20]
    assert sizes_up_to(1) == [1]
    assert sizes_up_to(160)[-3:] == [128, 144, 160]


def test_attention_without_fixed_tables_records_nothing(tiny: Any, drive: Any, prompt: Any) -> None:
    case, again = tiny("llama"), Again()
    runner = TorchRunner.load(
        case.path,
        ModelSpec.from_dir(case.path),
        RunnerConfig(max_total_tokens=512, device="cpu", dtype="float32"),
    )
    runner._passes.record(4, again)
    prompts, outs = generated(runner, drive, prompt, 2)
    runner.close()
    assert again.recorded == 0
    assert outs == [case.greedy(ids, 2) for ids in prompts]


def test_a_plan_of_prompts_is_not_repeated(tiny: Any, load: Any, drive: Any, prompt: Any) -> None:
    runner, again = load(tiny("llama").path), Again()
    with torch.inference_mode():
        runner._passes.record(1, again)
    plans: list[StepPlan] = []
    launch = runner.launch
    runner.launch = lambda plan: (plans.append(plan), launch(plan))[1]  # type: ignore[method-assign]
    drive(runner).generate([prompt(9)], 3)
    assert [plan.token_count for plan in plans] == [9, 1, 1]
    assert again.repeated == 2
