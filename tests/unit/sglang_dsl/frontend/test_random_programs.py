"""Nothing hangs and nothing is left behind: random programs over a backend with faults, run in every way.

PROGRAMS in the environment says how many (tests/long runs 10,000); EXPLORE, from which on.
"""

from __future__ import annotations

import asyncio
import faulthandler
import functools
import gc
import logging
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

import sglang_dsl as sgl
from sglang_dsl.concurrency.loop import background
from tests.exploring import EXPLORE
from tests.unit.sglang_dsl.frontend.faulty import FAULTS, FaultyBackend
from tests.unit.sglang_dsl.frontend.random_programs import Boom, Maker, Reference, plain_mock, program_of

pytestmark = pytest.mark.drawn

DEADLINE_S = 60.0
WAYS = ("run", "arun", "stream", "astream", "run_batch", "arun_batch")
BEGIN = EXPLORE


class Trial:
    """One program with its backend, run one way; `outcomes`: how each reading of it ended."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.seed = seed
        self.rng = random.Random(f"trial {seed}")
        self.is_async = self.rng.random() < 0.5
        self.program = program_of(Maker(seed).steps(), is_async=self.is_async)
        self.way = self.rng.choice(WAYS)
        rate = self.rng.choice((0.0, 0.1, 0.3, 0.7))
        self.mock = plain_mock(seed)
        self.backend = FaultyBackend(self.mock, seed=seed, rate=rate, delay_s=0.003)
        self.words: dict[str, Any] = {"backend": self.backend, "timeout": self.rng.choice((0.02, 0.05))}
        if self.rng.random() < 0.2:
            limit = {"calls": self.rng.randint(0, 6)} if self.rng.random() < 0.5 else {"seconds": 0.02}
            self.words["budget"] = sgl.Budget(**limit)
        if self.rng.random() < 0.1:
            self.words |= {"cache": "rw", "cache_dir": str(folder), "seed": seed}
        self.outcomes: Counter[str] = Counter()
        self.stopped = False

    def play(self) -> None:
        match self.way:
            case "run":
                self.told(lambda: self.read_all(self.program.run(**self.words)))
            case "arun":
                asyncio.run(self.arun())
            case "stream":
                self.stream(self.program.stream(**self.words))
            case "astream":
                asyncio.run(self.astream())
            case "run_batch":
                self.told(self.batch)
            case "arun_batch":
                asyncio.run(self.abatch())

    def told(self, work: Callable[[], Any]) -> Any:
        """What `work` gives; what it raises is looked at and counted."""
        try:
            made = work()
        except BaseException as error:  # noqa: BLE001 - any kind is looked at
            self.look_at(error)
            return None
        self.outcomes["value"] += 1
        return made

    async def told_async(self, work: Any) -> Any:
        try:
            made = await work
        except BaseException as error:  # noqa: BLE001 - any kind is looked at
            self.look_at(error)
            return None
        self.outcomes["value"] += 1
        return made

    def look_at(self, error: BaseException) -> None:
        self.outcomes[type(error).__name__] += 1
        match error:
            case sgl.ProgramError():
                assert error.program, f"{self.seed}: no program in {error!r}"
                assert error.source is not None, f"{self.seed}: no place in {error!r}"
                assert error.source.line > 0
                assert str(error)
            case asyncio.CancelledError():
                assert self.stopped, f"{self.seed}: cancelled by nobody"
            case Boom() | sgl.BadProgram() | sgl.StateClosed():
                pass
            case _:
                raise error

    def read_all(self, state: Any) -> None:
        for name in "abcde":
            if name in state:
                self.told(functools.partial(state.get_var, name))
        for read in (state.text, state.messages, state.error, state.usage):
            self.told(read)

    async def read_all_async(self, state: Any) -> None:
        for name in "abcde":
            if name in state:
                await self.told_async(state.get_var(name))
        for read in (state.text, state.messages, state.error, state.usage):
            await self.told_async(read())

    async def arun(self) -> None:
        task = asyncio.ensure_future(self.program.arun(**self.words))
        await self.maybe_stop(task)
        state = await self.told_async(task)
        if state is not None:
            await self.read_all_async(state)

    async def maybe_stop(self, task: asyncio.Future[Any]) -> None:
        if self.rng.random() < 0.3:
            await asyncio.sleep(self.rng.random() * 0.02)
            self.stopped = task.cancel()

    def stream(self, state: Any) -> None:
        """Several readers at once, in threads and in another loop."""
        wholes: list[str | None] = []
        readers = [
            threading.Thread(target=lambda: wholes.append(self.told(lambda: "".join(state.text_iter()))))
            for _ in range(2)
        ]
        readers.append(threading.Thread(target=lambda: self.told(lambda: self.leave_early(state))))
        readers.append(threading.Thread(target=lambda: asyncio.run(self.stream_async(state, wholes))))
        for reader in readers:
            reader.start()
        stopping = self.rng.random() < 0.3
        if stopping:
            time.sleep(self.rng.random() * 0.01)
            state.cancel()
        text = self.told(state.text)
        for reader in readers:
            reader.join(DEADLINE_S)
            assert not reader.is_alive(), f"{self.seed}: a reader hangs"
        if text is not None:
            assert {whole for whole in wholes if whole is not None} <= {text}, self.seed
        self.read_all(state)

    @staticmethod
    def leave_early(state: Any) -> None:
        for count, _ in enumerate(state.text_iter("a")):
            if count:
                break

    async def stream_async(self, state: Any, wholes: list[str | None]) -> None:
        async def whole() -> str:
            return "".join([piece async for piece in state.text_async_iter()])

        async def variable(name: str) -> str:
            return "".join([piece async for piece in state.text_async_iter(name)])

        wholes.append(await self.told_async(whole()))
        await asyncio.gather(*(self.told_async(variable(name)) for name in "abc"))

    async def astream(self) -> None:
        state = await self.program.astream(**self.words)

        async def read(name: str | None) -> str:
            return "".join([piece async for piece in state.text_iter(name)])

        tasks = [asyncio.ensure_future(read(name)) for name in (None, None, "a", "b")]
        if self.rng.random() < 0.3:
            await asyncio.sleep(self.rng.random() * 0.01)
            self.stopped = True
            tasks[self.rng.randrange(4)].cancel()
            if self.rng.random() < 0.5:
                state.cancel()
        wholes = [await self.told_async(task) for task in tasks[:2]]
        text = await self.told_async(state.text())
        for task in tasks[2:]:
            await self.told_async(task)
        if text is not None:
            assert {whole for whole in wholes if whole is not None} <= {text}, self.seed
        await self.read_all_async(state)

    def batch(self) -> None:
        policy = self.rng.choice(("raise", "return"))
        words = {"num_threads": self.rng.choice((1, 2, "auto")), "on_error": policy} | self.words
        if self.rng.random() < 0.5:
            states = self.program.run_batch([{}] * 4, **words)
            assert len(states) == 4
        else:
            states = []
            for state in self.program.run_batch([{}] * 4, generator_style=True, **words):
                states.append(state)
                if self.rng.random() < 0.1:
                    break
        for state in states:
            if isinstance(state, BaseException):
                self.look_at(state)
            else:
                self.read_all(state)

    async def abatch(self) -> None:
        async def all_of_it() -> None:
            policy = self.rng.choice(("raise", "return"))
            words = {"num_threads": self.rng.choice((1, 2, "auto")), "on_error": policy} | self.words
            async for state in self.program.arun_batch([{}] * 4, **words):
                if isinstance(state, BaseException):
                    self.look_at(state)
                else:
                    await self.read_all_async(state)

        task = asyncio.ensure_future(all_of_it())
        await self.maybe_stop(task)
        await self.told_async(task)


def busy_threads() -> list[str]:
    """Threads of the language that do something, and those of batches, which have no business to be there."""
    found = []
    frames = sys._current_frames()
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        idle = frame is not None and frame.f_code.co_name == "_serve"
        if thread.name.startswith("sglang-dsl-batch") or (
            thread.name.startswith("sglang-dsl-body") and not idle
        ):
            found.append(thread.name)
    return found


def left_after(seconds: float) -> tuple[int, list[str]]:
    """Waits at most so long until no task and no thread of the language does anything. Gives those that do. A
    thread may begin a task, and a task a thread: nothing is left when two looks in turn find neither."""
    until, quiet = time.monotonic() + seconds, 0
    while True:
        threads, tasks = busy_threads(), background().task_count
        quiet = 0 if threads or tasks else quiet + 1
        if quiet == 2 or time.monotonic() > until:
            return tasks, threads
        time.sleep(0.002)


class Logged(logging.Handler):
    """What asyncio complains about: tasks that were destroyed, errors that nobody retrieved."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())


def run_trials(first: int, count: int, folder: Path, at_once: int = 12) -> tuple[Counter[str], Counter[str]]:
    """Plays so many programs; every one must end, and leave nothing. Gives outcomes and faults met."""
    outcomes: Counter[str] = Counter()
    met: Counter[str] = Counter()
    gc.collect()  # what others have left is told before
    logged = Logged()
    logging.getLogger("asyncio").addHandler(logged)
    for begin in range(first, first + count, 100):
        trials = [Trial(seed, folder) for seed in range(begin, min(begin + 100, first + count))]
        pool = ThreadPoolExecutor(at_once, thread_name_prefix="trial")
        futures = {pool.submit(trial.play): trial for trial in trials}
        late = wait(futures, DEADLINE_S).not_done
        if late:
            faulthandler.dump_traceback(all_threads=True)
            running = [futures[future].seed for future in late if future.running()]
            raise AssertionError(f"these programs have not ended: {running}")
        pool.shutdown()
        for future in futures:
            future.result()
        assert left_after(DEADLINE_S) == (0, []), begin
        for trial in trials:
            assert trial.backend.in_flight == 0, trial.seed
            assert trial.mock.in_flight == 0, trial.seed
            outcomes += trial.outcomes
            met += trial.backend.met
    # What nobody awaited or asked for is told when it is collected: by a warning, which is an error, or here.
    gc.collect()
    logging.getLogger("asyncio").removeHandler(logged)
    assert logged.told == []
    return outcomes, met


def test_nothing_hangs_and_nothing_is_left(tmp_path: Path) -> None:
    outcomes, met = run_trials(BEGIN, 300, tmp_path)
    assert set(met) == set(FAULTS)
    assert outcomes["value"] > 300
    assert {"BackendError", "Timeout", "ProgramCancelled", "BudgetExceeded", "Boom"} <= set(outcomes)


@pytest.mark.parametrize("way", ["run", "stream", "arun", "astream"])
def test_programs_say_what_a_reference_on_strings_says(way: str) -> None:
    for seed in range(150):
        steps = Maker(seed, safe=True).steps()
        expected = Reference().play(steps)
        if way == "stream" or way == "astream":
            steps = [step for step in steps if not has_back(step)]
            expected = Reference().play(steps)
        program, backend = program_of(steps, is_async=seed % 2 == 0), plain_mock(seed)
        if way in ("run", "stream"):
            state = getattr(program, way)(backend=backend)
        else:
            state = asyncio.run(getattr(program, way)(backend=backend)).blocking
        assert state.text() == expected.text, (seed, steps)
        assert {name: state[name] for name in expected.values} == expected.values, (seed, steps)
        if way in ("stream", "astream"):
            assert "".join(state.text_iter()) == expected.text
        assert backend.in_flight == 0


def has_back(step: Any) -> bool:
    """Streams cannot go back."""
    if isinstance(step, tuple | list):
        return step[:1] == ("back",) or any(has_back(part) for part in step)
    return False
