"""A group of real processes without HTTP: the frontend is in this one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import selectors
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from runtime.config.engine import EngineConfig
from runtime.config.serving.server import ServerConfig
from runtime.ipc.mailbox import MemoryMailbox
from runtime.processes.checkpoint.model import load_model
from runtime.processes.frontend.tokenizer_manager import TokenizerManager
from runtime.processes.pipeline.launch import launch
from runtime.processes.supervise.channel import SCHEDULER, ChildSpec, Heartbeat, mailbox_of
from runtime.processes.supervise.engine_client import EngineClient
from runtime.processes.supervise.group import Group
from runtime.processes.supervise.lifecycle import Lifecycle
from runtime.protocol.control import AbortReq, FlushCacheReq, GetStateReq
from runtime.protocol.errors import EngineDead, RuntimeFault
from runtime.protocol.io_struct import GenerateOutput, GenerateReqInput
from runtime.protocol.sampling import SamplingParams
from tests.process.patience import PATIENCE_S

ENGINE = EngineConfig(max_total_tokens=8192, threads=1, seed=3)
SERVER = ServerConfig()
PROMPTS = ["The capital of France is", "3 + 4 =", "서울은", "🦊 and", "One, two, three", "yes\nno\n"]


@dataclass
class Running:
    group: Group
    front: EngineClient
    manager: TokenizerManager


@pytest.fixture
def start() -> Iterator[Callable[..., Running]]:
    with tempfile.TemporaryDirectory(prefix="group") as folder:
        started: list[Running] = []

        def make(engine: EngineConfig = ENGINE, server: ServerConfig = SERVER) -> Running:
            place = Path(folder) / str(len(started))
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            group = Group(engine, server, place, None, environment, frontends=("test",))
            front = EngineClient(place, "test")
            while not group.ready:
                group.wait(0.2)
            manager = front.open(engine, ServerConfig(), load_model(engine), group.facts)
            started.append(Running(group, front, manager))
            return started[-1]

        yield make
        for one in started:
            one.group.end()
            one.front.close()


def requests() -> list[GenerateReqInput]:
    """Fresh ones: a request is changed by being sent."""
    made = []
    for n, prompt in enumerate(PROMPTS * 3):
        params = SamplingParams(
            max_new_tokens=5 + n,
            temperature=0.0 if n % 2 else 0.8,
            seed=n,
            stop=("e",) if n % 3 == 0 else (),
            ignore_eos=n % 4 == 0,
        )
        made.append(GenerateReqInput(text=prompt, sampling_params=params, return_logprob=n % 5 == 0))
    return made


async def whole(manager: TokenizerManager) -> list[GenerateOutput]:
    return list(await asyncio.gather(*(manager.submit(request) for request in requests())))


async def streamed(manager: TokenizerManager) -> list[GenerateOutput]:
    async def last(request: GenerateReqInput) -> GenerateOutput:
        seen = ""
        async for output in manager.stream(request, cumulative=True):
            assert output.text.startswith(seen)
            seen = output.text
        return output

    return list(await asyncio.gather(*(last(request) for request in requests())))


def told(outputs: list[GenerateOutput]) -> list[Any]:
    return [(one.text, one.output_ids, one.meta["finish_reason"]) for one in outputs]


def strangers_mail(running: Running) -> None:
    """Orders and questions with names that nobody has."""
    outbox = mailbox_of(running.group.folder, SCHEDULER).outbox()
    for rid in ("", "unknown", "x" * 10_000):
        outbox.send(AbortReq(rid=rid, http_worker_ipc="../elsewhere"))
    outbox.send(GetStateReq(http_worker_ipc="nobody"))
    outbox.close()


class LooksAndStandsStill:
    """A selector that returns 10,000 seconds after it has looked, by this clock."""

    def __init__(self, within: selectors.BaseSelector) -> None:
        self._within, self._lost = within, 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self._lost

    def select(self, timeout: float) -> Any:
        found = self._within.select(timeout)
        self._lost += 10_000
        return found


def test_processes_answer_as_threads_do(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start()
    strangers_mail(running)
    mine = launch(ENGINE)
    try:
        expected = told(asyncio.run(whole(mine.manager)))
    finally:
        mine.close()
    assert told(asyncio.run(whole(running.manager))) == expected
    assert told(asyncio.run(streamed(running.manager))) == expected
    state = running.manager.control(GetStateReq(), 60).data
    assert state["live"] == state["running"] == 0
    assert running.manager.control(FlushCacheReq(), 60).ok
    assert running.manager.control(GetStateReq(), 60).data["free"] == running.group.facts["slots"]
    # One that watches them and stands still for long is not to blame them for it.
    running.group.wait(0.0)
    still = LooksAndStandsStill(running.group._selector)
    monkeypatch.setattr(running.group, "_selector", still)
    monkeypatch.setattr("runtime.processes.supervise.group.time", still)
    for _ in range(10):
        running.group.wait(0.0)


def test_a_process_that_stood_still_does_not_blame_its_work() -> None:
    """After a pause of the machine the clock says that the work took long; it gets a few beats to go on."""
    told: list[float] = []
    enough = threading.Event()

    class End:
        def send(self, report: Heartbeat) -> None:
            told.append(report.stalled_s)
            if len(told) == 4:
                enough.set()

    spec = ChildSpec(role="http", name="worker-0", folder="", engine=ENGINE, server=ServerConfig())
    lifecycle = Lifecycle(MemoryMailbox(), End(), spec)  # type: ignore[arg-type]
    clock = iter([1000.0, 1000.5, 0.0, 0.25])
    lifecycle.stalled_s = lambda: next(clock, 0.0)
    threading.Thread(target=lifecycle._send_heartbeats, daemon=True).start()
    assert enough.wait(300)
    assert told[:4] == [1.0, 2.0, 0.0, 0.25]


@pytest.mark.parametrize("victim", [0, 1])
def test_all_who_wait_hear_which_process_died(start: Callable[..., Running], victim: int) -> None:
    running = start(replace(ENGINE, runner_process=True))
    name = running.group.children[victim].name
    # Their model is stopped, so that nobody has an answer before.
    (model,) = psutil.Process(running.group.children[0].process.pid).children()
    model.suspend()

    async def ask() -> list[Any]:
        params = SamplingParams(max_new_tokens=1500, ignore_eos=True)
        tasks = [
            asyncio.ensure_future(running.manager.submit(GenerateReqInput(text=text, sampling_params=params)))
            for text in PROMPTS
        ]
        while running.manager.live < len(PROMPTS):
            await asyncio.sleep(0.01)
        running.group.children[victim].kill()
        with pytest.raises(EngineDead, match=f"the {name} process was killed by SIGKILL") as caught:
            await asyncio.to_thread(_watch, running.group)
        await asyncio.to_thread(running.group.fail, caught.value)
        return await asyncio.gather(*tasks, return_exceptions=True)

    try:
        outcomes = asyncio.run(asyncio.wait_for(ask(), 100))
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            model.resume()
    assert len(outcomes) == len(PROMPTS)
    for outcome in outcomes:
        assert isinstance(outcome, EngineDead)
        assert f"the {name} process was killed by SIGKILL" in str(outcome)
    with pytest.raises(RuntimeFault, match=name):
        running.manager.control(GetStateReq(), 60)


def _watch(group: Group) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        group.wait(0.2)


@pytest.mark.parametrize("name", ["scheduler", "detokenizer"])
def test_a_process_that_hangs_is_noticed_by_its_heartbeat(start: Callable[..., Running], name: str) -> None:
    running = start(server=ServerConfig(heartbeat_timeout_s=6))
    running.group.wait(0.1)
    [child] = [one for one in running.group.children if one.name == name]
    psutil.Process(child.process.pid).suspend()

    def watch() -> None:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            running.group.wait(0.2)

    with pytest.raises(EngineDead, match=f"the {name} process gave no sign of life for 6 s"):
        watch()
