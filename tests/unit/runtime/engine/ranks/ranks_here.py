"""Ranks as threads of one process: a fake of the group that they meet in, all else as it is. What a
collective gives depends on all ranks, so a rank that leaves one out, or makes one too many, is found out."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from runtime.config.model import ModelSpec
from runtime.config.runner import RunnerConfig, World
from runtime.engine.runner import TorchRunner
from runtime.parallel import Group
from runtime.plan import StepPlan, StepResult, TokenMask

PATIENCE_S = 300.0
SETTINGS: dict[str, Any] = {
    "max_total_tokens": 2048, "dtype": "float32", "device": "cpu", "threads": 1, "seed": 7,
}  # fmt: skip


def rank_processes() -> list[psutil.Process]:
    """The processes of models that this one started, in their order."""
    found = []
    for one in psutil.Process().children():
        line = " ".join(one.cmdline())
        if "runtime.engine.follower" in line or line.startswith("sglang-dsl runner"):
            found.append(one)
    return sorted(found, key=lambda one: one.pid)


class Meeting:
    """Where all ranks bring something, under the name of what they do, and take what all brought."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._brought: list[tuple[str, Any]] = [("", None)] * size
        self._barrier = threading.Barrier(size)
        self.calls: list[str] = []

    def exchange(self, rank: int, name: str, thing: Any) -> list[Any]:
        self._brought[rank] = (name, thing)
        self._barrier.wait(PATIENCE_S)
        brought = list(self._brought)
        self._barrier.wait(PATIENCE_S)
        assert len({one for one, _ in brought}) == 1, brought
        if rank == 0:
            self.calls.append(name)
        return [one for _, one in brought]

    def abort(self) -> None:
        self._barrier.abort()

    def again(self) -> None:
        """Nobody waits any more."""
        self._barrier.reset()


class GroupHere(Group):
    def __init__(self, rank: int, meeting: Meeting) -> None:
        super().__init__(rank, meeting.size)
        self._meeting = meeting

    def sum_(self, x: Tensor) -> Tensor:
        parts = self._meeting.exchange(self.rank, f"sum {tuple(x.shape)}", x.clone())
        return x.copy_(torch.stack(parts).sum(0))

    def gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._meeting.exchange(self.rank, f"gather {tuple(x.shape)}", x.clone()), -1)

    def least(self, value: int) -> int:
        return min(self._meeting.exchange(self.rank, "least", value))


class RanksHere:
    """Implements Runner with `size` TorchRunners, each in a thread of its own."""

    def __init__(self, path: Path, size: int, config: RunnerConfig) -> None:
        self.meeting = Meeting(size)
        self._threads = [ThreadPoolExecutor(1) for _ in range(size)]
        spec = ModelSpec.from_dir(path)
        self.runners: list[TorchRunner] = self._all(
            lambda rank: TorchRunner.load(
                path, spec, config, beside=False, world=World(rank, size), group=GroupHere(rank, self.meeting)
            )
        )
        self.slots, self.vocab_size = self.runners[0].slots, self.runners[0].vocab_size

    def launch(self, plan: StepPlan) -> None:
        self._all(lambda rank: self.runners[rank].launch(plan))

    def finish(self, masks: Mapping[int, TokenMask]) -> StepResult:
        result, *others = self._all(lambda rank: self.runners[rank].finish(masks))
        assert all(other.rows == () for other in others)
        return result

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown()

    def _all(self, act: Callable[[int], Any]) -> list[Any]:
        def run(rank: int) -> Any:
            try:
                return act(rank)
            except BaseException:
                self.meeting.abort()
                raise

        futures = [thread.submit(run, rank) for rank, thread in enumerate(self._threads)]
        failed = [error for one in futures if (error := one.exception(PATIENCE_S)) is not None]
        if failed:  # those who only waited for it in vain come last
            self.meeting.again()
            raise min(failed, key=lambda error: isinstance(error, threading.BrokenBarrierError))
        return [one.result() for one in futures]


@contextlib.contextmanager
def ranks(path: Path, size: int, **config: Any) -> Iterator[RanksHere]:
    made = RanksHere(path, size, RunnerConfig(**{**SETTINGS, "tp_size": size, **config}))
    with contextlib.closing(made):
        yield made
