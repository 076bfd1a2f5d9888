"""Follower: a runner in a process of its own. It receives plans, runs them and sends results back.

    python -m runtime.engine.follower <descriptor of a socket> <memory of masks> <memory of KV, or -1>

Started by runtime.processes.pipeline.runner_process, and ends with the process that started it. If several
followers share a model, each is a rank: all get every order, and rank 0's results count. A pass runs in the
only working thread. Torch is imported after the start message.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec

from runtime.config.model import ModelSpec
from runtime.config.runner import RunnerConfig, World
from runtime.disagg.transfer.memory import KVMapping
from runtime.engine.sampling.logit_processors import PROCESSORS
from runtime.ipc.address import Address
from runtime.ipc.mailbox import Inbox, MailboxClosed, Outbox
from runtime.ipc.plans import (
    ANSWERS,
    ORDERS,
    Call,
    Done,
    Failure,
    Finish,
    Launch,
    MaskReader,
    Order,
    PlanReader,
    Result,
    arguments_of,
)
from runtime.ipc.wire import Wire
from runtime.plan import Runner, TokenMask
from runtime.protocol.console import set_title
from runtime.protocol.errors import EngineDead, InternalFault, RuntimeFault
from runtime.protocol.sampling import SamplingParams

log = logging.getLogger(__name__)

YOUNG = 20_000
"""New objects between two runs of the garbage collector, as in the scheduler's process."""
ANSWER_S = 600.0
"""How long the parent may take to read an answer: longer than a machine may be suspended."""
LOOK_MS = 1000
"""The interval between checks that the parent is still the same process."""


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """The start message of a follower. world: its rank among the model's. search: the module search path of
    the process that starts it."""

    path: str
    spec: ModelSpec
    config: RunnerConfig
    parent: int
    world: World = World()
    profile_folder: str | None = None
    search: tuple[str, ...] = ()


class Ready(msgspec.Struct, frozen=True):
    """It is loaded. device: the kind of device it computes on. kv: the layout of its KV in the shared memory;
    None if the KV is not there."""

    slots: int
    vocab_size: int
    device: str
    kv: KVMapping | None = None


class Failed(msgspec.Struct, frozen=True):
    """It cannot be loaded; error: RuntimeFault.to_dict()."""

    error: dict[str, Any]


class LogLine(msgspec.Struct, frozen=True, array_like=True):
    """A line for the log of the process that started it."""

    logger: str
    level: int
    text: str


Report: TypeAlias = Ready | Failed
TO_RUNNER = Wire((Start, *ORDERS))
FROM_RUNNER = Wire((Ready, Failed, *ANSWERS))


class OutOfStep(Exception):
    """A rank failed in its part of a pass. The others wait for it, so it must end for them to notice."""


class Follower:
    """Takes orders from its inbox until that is closed."""

    def __init__(
        self,
        inbox: Inbox,
        outbox: Outbox,
        masks: MaskReader,
        runner: Runner,
        profiler: Any,
        world: World | None = None,
    ) -> None:
        self._inbox, self._outbox, self._world = inbox, outbox, world or World()
        self._masks, self._runner, self._profiler = masks, runner, profiler
        self._plans = PlanReader()
        self._fault: RuntimeFault | None = None  # of the last launched plan
        self._out_of_step = False  # other ranks did not meet that fault

    def serve(self) -> None:
        """Raises MailboxClosed at the end, OutOfStep if it must end earlier."""
        while True:
            for order in self._inbox.receive(None):
                self._obey(order)

    def _obey(self, order: Order) -> None:
        match order:
            case Launch():
                self._launch(order)
                if order.at_once:
                    self._finish(order.number, {})
            case Finish():
                self._finish(order.number, self._masks.read(order))
            case Call():
                self._call(order)

    def _launch(self, order: Launch) -> None:
        plan = self._plans.read(order)
        self._fault = None
        try:
            self._runner.launch(plan)
        except RuntimeFault as fault:  # the plan is invalid: every rank finds that
            self._fault = fault
        except Exception as error:  # noqa: BLE001 - it is this plan's result
            self._fault, self._out_of_step = fault_of(error), True
        if self._world.rank == 0:
            self._masks.tell_ended(order.number)

    def _finish(self, number: int, masks: dict[int, TokenMask]) -> None:
        fault = self._fault
        if fault is None:
            try:
                result = self._runner.finish(masks)
            except Exception as error:  # noqa: BLE001 - it is this plan's result
                fault, self._out_of_step = fault_of(error), True
            else:
                self._outbox.send(Result(number, result))
        if fault is not None:
            self._outbox.send(Failure(number, fault.to_dict()))
            # A rank that lost another one (EngineDead) is not the cause.
            if self._world.size > 1 and self._out_of_step and not isinstance(fault, EngineDead):
                raise OutOfStep(str(fault))
        self._profiler.stepped()

    def _call(self, order: Call) -> None:
        """This class implements some of the names in CALLS, the runner the others."""
        here: dict[str, Callable[..., Any]] = {
            "verify": self._verify,
            "start_profile": self._start_profile,
            "stop_profile": self._stop_profile,
        }
        try:
            arguments = arguments_of(order)
            act = here.get(order.name) or getattr(self._runner, order.name)
            data = act(*arguments)
        except Exception as error:
            if not order.answered:
                raise
            self._outbox.send(Failure(-1, fault_of(error).to_dict()))
        else:
            if order.answered:
                self._outbox.send(Done(data or {}))

    def _verify(self, params: SamplingParams, target: str | None) -> None:
        name = params.custom_logit_processor
        if name is not None and target is not None and name not in PROCESSORS:
            PROCESSORS.add(name, target)
        self._runner.verify(params)

    def _start_profile(self, folder: str | None, steps: int | None) -> dict[str, Any]:
        """Only of rank 0: the ranks' profiles differ little."""
        started: dict[str, Any] = {} if self._world.rank else self._profiler.start(folder, steps)
        return started

    def _stop_profile(self) -> dict[str, Any]:
        written: dict[str, Any] = {} if self._world.rank else self._profiler.stop()
        return written


def fault_of(error: Exception) -> RuntimeFault:
    return InternalFault.of(error, where="runner")


class _ToParent(logging.Handler):
    """Sends log lines as frames through the pipe that was stdout. A line is dropped if the pipe is full."""

    def __init__(self, file: int) -> None:
        super().__init__()
        self._file = file
        os.set_blocking(file, False)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)[:2000]
            line = msgspec.json.encode(LogLine(record.name, record.levelno, text)) + b"\n"
            os.write(self._file, line)  # short enough to be written atomically
        except (OSError, ValueError):
            return


def _adopt_stdout() -> None:
    """Log to the pipe; other output goes to stderr."""
    pipe = os.dup(1)
    os.dup2(2, 1)
    root = logging.getLogger()
    root.addHandler(_ToParent(pipe))
    root.setLevel(logging.INFO)


def _tie_to_parent() -> None:
    """Let the system kill this process when the other end of stdin is closed, even if it is stuck in a
    library or stopped: no process is left to read its results."""
    with contextlib.suppress(OSError):
        fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(0, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)


def _end_with_parent(file: int, parent: int) -> None:
    """The same if a fork of the parent also holds that end: exit when the mailbox is closed, or when the
    parent has changed."""
    poll = select.poll()
    poll.register(file, 0)  # a hang-up is always reported
    while not poll.poll(LOOK_MS) and os.getppid() == parent:
        pass
    os._exit(0)


def _load(start: Start, kv_file: int | None) -> tuple[Runner, Any, Ready]:
    from runtime.engine.drafting import DraftingRunner  # these import torch
    from runtime.engine.profiler import TorchProfiler
    from runtime.engine.runner import TorchRunner

    kind: Any = TorchRunner if start.config.draft_model is None else DraftingRunner
    runner = kind.load(start.path, start.spec, start.config, beside=False, kv_file=kv_file, world=start.world)
    ready = Ready(runner.slots, runner.vocab_size, runner.device, runner.kv_memory.mapping)
    return runner, TorchProfiler(start.profile_folder), ready


def main(arguments: list[str]) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the process that started it handles these
    _tie_to_parent()
    _adopt_stdout()
    socket, memory, kv = map(int, arguments)
    address = Address.fd(socket)
    inbox, outbox = address.inbox(TO_RUNNER), address.outbox(FROM_RUNNER, timeout_s=ANSWER_S)
    try:
        (start,) = inbox.receive(None)
        assert isinstance(start, Start)
        set_title(f"runner-{start.world.rank}")
        watch = threading.Thread(
            target=_end_with_parent, args=(socket, start.parent), name="lifeline", daemon=True
        )
        watch.start()
        sys.path += [path for path in start.search if path not in sys.path]
        importlib.invalidate_caches()
        if start.world.rank:  # messages that all ranks have are logged once
            logging.getLogger().setLevel(logging.WARNING)
        try:
            runner, profiler, ready = _load(start, kv if kv >= 0 else None)
        except Exception as error:
            fault = fault_of(error)
            if not isinstance(error, RuntimeFault):
                log.error("the model cannot be loaded: %s", error, exc_info=error)
            outbox.send(Failed(fault.to_dict()))
            return 1
        gc.collect()
        gc.freeze()  # loaded objects stay
        gc.set_threshold(YOUNG)
        outbox.send(ready)
        Follower(inbox, outbox, MaskReader(memory), runner, profiler, start.world).serve()
    except MailboxClosed:
        return 0
    except OutOfStep as error:
        log.error("rank %d of %d ends: %s", start.world.rank, start.world.size, error)
        return 1
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    os._exit(code)  # threads of libraries must not keep the process
