"""RunnerProcess: a Runner whose model is in another process, or in several that share it (tensor
parallelism). It starts them, sends plans, notices their end and leaves none behind. Loads no torch.

Scheduler and model then have an interpreter each: Python code for constraints takes no time from the forward
pass. The messages are in runtime/ipc/plans.py. Each rank gets every order and answers it; rank 0's answer is
the result.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from msgspec.structs import replace

from runtime.config.model import ModelSpec
from runtime.config.runner import RunnerConfig, World
from runtime.config.shards import check_ranks
from runtime.disagg.transfer.memory import ArrayMemory, JoinedMemory, KVMapping, KVMemory
from runtime.engine.follower import FROM_RUNNER, TO_RUNNER, Failed, Ready, Start
from runtime.engine.sampling.logit_processors import PROCESSORS, Processors
from runtime.ipc import plans
from runtime.ipc.address import Address
from runtime.ipc.mailbox import Inbox, Outbox
from runtime.ipc.plans import Failure, MaskWriter, PlanWriter, Result, call
from runtime.ipc.ranks import Ranks
from runtime.plan import Adapter, Image, StepPlan, StepResult, TokenMask
from runtime.processes.pipeline.rank_process import RankProcess
from runtime.protocol.control import MemoryPart
from runtime.protocol.errors import (
    BadRequest,
    DeadlineExceeded,
    EngineDead,
    InternalFault,
    RuntimeFault,
    WireError,
    from_dict,
)
from runtime.protocol.request_base import SingleReq
from runtime.protocol.sampling import SamplingParams

log = logging.getLogger(__name__)

CLOSE_S = 5.0
"""How long a process may take to end; then it is killed."""


class RunnerProcess:
    """Implements runtime.plan.Runner and the scheduler's Profiler. One thread calls it; on_death() any.

    The error of a wrong plan is raised by finish(), as launch() does not wait. When a process has ended or
    hangs, every method raises.
    """

    def __init__(
        self,
        path: str | Path,
        spec: ModelSpec,
        config: RunnerConfig | None = None,
        *,
        load_timeout_s: float = 1800.0,
        profile_folder: str | None = None,
    ) -> None:
        """Start config.tp_size processes and wait until the model is loaded. Raises the errors of
        TorchRunner.load; BadRequest if so many cannot share the model; EngineDead when one ends, or is not
        ready in time."""
        self._config = (config or RunnerConfig()).verify()
        self._size = self._config.tp_size
        if self._size > 1:
            check_ranks(spec, self._size)
        self._dead: RuntimeFault | None = None
        self._closing = False
        self._death_callbacks: list[Callable[[RuntimeFault], None]] = []
        self._lock = threading.Lock()
        self._plans = PlanWriter()
        self._launched: tuple[StepPlan, plans.Launch] | None = None
        self._early: Result | Failure | None = None  # a result that came before the answer to a call
        self._masks = MaskWriter()
        self._kv_files = [os.memfd_create("kv") for _ in range(self._size if self._config.shared_kv else 0)]
        self._processes: list[RankProcess] = []
        self._links: list[tuple[Outbox, Inbox]] = []
        self._ranks = Ranks(())
        self._why = ""  # why they were killed
        self._folder = tempfile.mkdtemp(prefix="ranks") if self._size > 1 else None  # for its user alone
        self._start_lock = threading.Lock()
        try:
            with self._start_lock:  # _ended() waits until there are mailboxes to close
                for rank in range(self._size):
                    self._spawn(rank)
                self._ranks = Ranks(self._links)
            start = Start(
                path=str(Path(os.path.expanduser(path))),
                spec=spec,
                config=self._config,
                parent=os.getpid(),
                profile_folder=profile_folder,
                search=tuple(os.path.abspath(folder) for folder in sys.path),
            )
            ranks = self._load(start, load_timeout_s)
            self.slots, self.vocab_size, self.device = ranks[0].slots, ranks[0].vocab_size, ranks[0].device
            self.kv_memory = self._map([one.kv for one in ranks])
        except BaseException:
            self._kill()
            self.close()
            raise
        if self.device == "cpu":
            self._remove_folder()  # gloo's ranks have connected; NCCL's may still need it

    @property
    def pid(self) -> int:
        """Of rank 0."""
        return self._processes[0].pid

    @property
    def pids(self) -> tuple[int, ...]:
        """Of all ranks, in order."""
        return tuple(process.pid for process in self._processes)

    def on_death(self, act: Callable[[RuntimeFault], None]) -> None:
        """Call `act` when a process ends by itself, from another thread; at once if it has already."""
        with self._lock:
            dead = self._dead
            if dead is None:
                self._death_callbacks.append(act)
        if dead is not None:
            act(dead)

    def verify(self, params: SamplingParams) -> None:
        """Raise BadRequest for parameters that no logit processor takes, or that cannot be sent."""
        name = params.custom_logit_processor
        target = None if name is None else PROCESSORS.target(name)
        try:
            order = call("verify", params, target)
            TO_RUNNER.encode(order)
        except WireError as error:
            field = "sampling_params.custom_params" if params.custom_params else "sampling_params"
            raise BadRequest(f"cannot be sent to the model's process: {error}", where=field) from error
        if name is None:
            Processors().verify(params, self.vocab_size)
        else:
            self._ask(order)

    def launch(self, plan: StepPlan) -> None:
        """Send the plan. Raises InternalFault: the process has ended, or a value cannot travel."""
        if self._launched is not None:
            raise InternalFault("launch() before finish() of the step before", where="runner")
        # A plan without masks needs no second message. If masks come all the same, it is run again with them.
        at_once = not any(row.masked or row.sampling.min_new_tokens for row in plan.rows if row.sample)
        self._launched = plan, self._send_plan(plan, at_once=at_once)

    def done(self) -> bool:
        launched = self._launched
        return launched is None or self._dead is not None or self._masks.ended == launched[1].number

    def finish(self, masks: Mapping[int, TokenMask]) -> StepResult:
        """Raises DeadlineExceeded after step_timeout_s, InternalFault for a failed pass or ended process."""
        launched, self._launched = self._launched, None
        if launched is None:
            raise InternalFault("finish() without launch()", where="runner")
        plan, sent = launched
        until = time.monotonic() + self._config.step_timeout_s
        if sent.at_once and masks:
            self._result(sent, until)
            sent = self._send_plan(plan, at_once=False)
        if not sent.at_once:
            processed = [
                index
                for index in masks
                if 0 <= index < len(plan.rows)
                and plan.rows[index].sampling.custom_logit_processor is not None
            ]
            positions = self._masks.write(masks, processed)
            self._send(plans.Finish(sent.number, positions, self._masks.size))
        match self._result(sent, until):
            case Result(_, result):
                return result
            case Failure(_, error):
                raise from_dict(error)

    def load_adapter(self, adapter: Adapter) -> None:
        """Every rank loads its part. Raises AdapterError; then no rank keeps it."""
        try:
            self._ask(call("load_adapter", adapter))
        except BadRequest:
            self.unload_adapter(adapter.number)
            raise

    def unload_adapter(self, number: int) -> None:
        self._ask(call("unload_adapter", number))

    def load_images(self, images: Sequence[Image]) -> None:
        """One message per image. Every rank encodes them itself."""
        for image in images:
            self._send(call("load_images", (image,), answered=False))

    def drop_images(self, numbers: Sequence[int]) -> None:
        self._send(call("drop_images", tuple(numbers), answered=False))

    def update_weights(self, path: str) -> None:
        """Every rank loads its part, within step_timeout_s. Raises ModelLoadError, BadRequest."""
        self._check_between_steps("update_weights")
        self._ask(call("update_weights", path))

    def release_memory(self, parts: Sequence[MemoryPart]) -> None:
        self._check_between_steps("release_memory")
        self._ask(call("release_memory", tuple(parts)))

    def restore_memory(self, parts: Sequence[MemoryPart], path: str) -> None:
        """Within step_timeout_s. If it fails on one rank, it can be called again."""
        self._ask(call("restore_memory", tuple(parts), path))

    def start(self, folder: str | None, steps: int | None) -> dict[str, Any]:
        """Begin a profile of the process. Raises BadRequest like TorchProfiler."""
        return self._ask(call("start_profile", folder, steps))

    def stop(self) -> dict[str, Any]:
        """End the profile. Raises BadRequest if there is none, or it cannot be written."""
        return self._ask(call("stop_profile"))

    def call(self, name: str, request: SingleReq) -> dict[str, Any]:
        """Carry out a runner verb on every rank; returns rank 0's answer. Raises its errors."""
        return self._ask(call(name, request))

    recording = False

    def stepped(self) -> None:
        """The process counts its steps itself."""

    def close(self) -> None:
        """End the processes, by force after CLOSE_S. May be called more than once."""
        with self._lock:
            again, self._closing = self._closing, True
            if self._dead is None:
                self._dead = InternalFault("the runner was closed", where="runner")
        if again:
            return
        Ranks(self._links).close()
        until = time.monotonic() + CLOSE_S
        for process in self._processes:
            if not process.wait(max(0.0, until - time.monotonic())):
                log.warning("%s's process does not end and is killed", process.name)
                process.kill()
                process.wait(CLOSE_S)
        for process in self._processes:
            process.release(CLOSE_S)
        self._masks.close()
        for file in self._kv_files:
            os.close(file)
        self._remove_folder()

    def _check_between_steps(self, name: str) -> None:
        if self._launched is not None:
            raise InternalFault(f"{name}() during a step", where="runner")

    def _map(self, mappings: list[KVMapping | None]) -> KVMemory | None:
        """The KV pool of all ranks; None unless all can be mapped."""
        pools = [ArrayMemory.map(file, one) for file, one in zip(self._kv_files, mappings) if one is not None]
        if len(pools) < self._size:
            return None
        return pools[0] if self._size == 1 else JoinedMemory(pools)

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _spawn(self, rank: int) -> None:
        mine, theirs = socket.socketpair()
        with mine, theirs:
            address = Address.fd(mine.fileno())
            outbox = address.outbox(TO_RUNNER, timeout_s=self._config.step_timeout_s)
            self._links.append((outbox, address.inbox(FROM_RUNNER)))
            name = "the model" if self._size == 1 else f"rank {rank} of the model"
            files = [theirs.fileno(), self._masks.file, *self._kv_files[rank : rank + 1]]
            self._processes.append(RankProcess(name, files, lambda ended: self._ended(rank, ended)))

    def _load(self, start: Start, timeout: float) -> list[Ready]:
        file = "" if self._folder is None else os.path.join(self._folder, "ranks")
        worlds = [World(rank, self._size, file, timeout) for rank in range(self._size)]
        until = time.monotonic() + timeout
        try:
            for rank, world in enumerate(worlds):
                self._ranks.send_to(rank, replace(start, world=world))
            reports = self._ranks.gather(max(0.0, until - time.monotonic()))
        except DeadlineExceeded:
            raise EngineDead(
                f"the model was not loaded within {timeout:g} s", where=start.path, hint="load_timeout_s"
            ) from None
        except EngineDead:
            rank = self._ranks.first_lost or 0
            reports = self._ranks.remains(rank)
            if not any(isinstance(report, Failed) for report in reports):
                how = self._processes[rank].how_it_ended(CLOSE_S)
                raise EngineDead(f"{how} while it loaded", where=start.path) from None
        for report in sorted(reports, key=_lost_others):
            match report:
                case Failed(error):
                    raise from_dict(error)
                case Ready():
                    pass
                case other:
                    raise InternalFault(
                        f"the model's process began with {type(other).__name__}", where=start.path
                    )
        return reports

    def _send_plan(self, plan: StepPlan, *, at_once: bool) -> plans.Launch:
        order = self._plans.write(plan, at_once=at_once)
        try:
            self._send(order)
        except WireError as error:
            self._plans.forget(plan)
            raise InternalFault(f"the plan cannot be sent: {error}", where="runner") from error
        return order

    def _send(self, order: plans.Order) -> None:
        if self._dead is not None:
            raise self._engine_dead()
        try:
            self._ranks.send(order)
        except DeadlineExceeded as late:
            raise self._stuck("took no order", late) from None
        except EngineDead:
            raise self._engine_dead() from None

    def _ask(self, order: plans.Order) -> dict[str, Any]:
        """Send a call and wait for its answer, which comes after that of a pass under way."""
        self._send(order)
        until = time.monotonic() + self._config.step_timeout_s
        while True:
            match self._receive(until):
                case plans.Done(data):
                    return data
                case Failure(-1, error):
                    raise from_dict(error)
                case Result() | Failure() as early:
                    self._early = early

    def _result(self, sent: plans.Launch, until: float) -> Result | Failure:
        early, self._early = self._early, None
        if early is not None and early.number == sent.number:
            return early
        while True:
            match self._receive(until):
                case Result(number) | Failure(number) as answer if number == sent.number:
                    return answer
                case other:
                    log.error("the model's process gave an answer to nothing: %s", type(other).__name__)

    def _receive(self, until: float) -> plans.Answer:
        """Rank 0's answer, once all ranks have answered; or a failure of one of them."""
        if self._dead is not None:
            raise self._engine_dead()
        try:
            answers = self._ranks.gather(max(0.0, until - time.monotonic()))
        except DeadlineExceeded as late:
            raise self._stuck("did not end", late) from None
        except EngineDead:
            raise self._engine_dead() from None
        except WireError as error:
            self._kill()
            raise InternalFault(
                f"the model's process gave what cannot be read: {error}", where="runner"
            ) from error
        failures = sorted((one for one in answers if isinstance(one, Failure)), key=_lost_others)
        if not failures:
            return cast("plans.Answer", answers[0])
        if _lost_others(failures[0]):  # all ranks live, and have lost one another
            self._kill()
        return failures[0]

    def _stuck(self, how: str, late: DeadlineExceeded) -> DeadlineExceeded:
        """Kill the processes: the next step would wait for their late answer."""
        who = "" if self._size == 1 else f" on {late.where}"
        self._why = f"a forward pass {how}{who} within {self._config.step_timeout_s:g} s"
        self._kill()
        return DeadlineExceeded(self._why, where="runner")

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        until = time.monotonic() + CLOSE_S
        for process in self._processes:
            process.wait(max(0.0, until - time.monotonic()))

    def _engine_dead(self) -> InternalFault:
        if self._closing:
            return InternalFault("the runner was closed", where="runner")
        rank = self._ranks.first_lost or 0
        why = [str(from_dict(one.error)) for one in self._ranks.remains(rank) if isinstance(one, Failure)]
        how = [self._why, self._processes[rank].how_it_ended(CLOSE_S), *why[:1]]
        return InternalFault(
            ": ".join(one for one in how if one), where="runner", hint="its last lines are in the log"
        )

    def _ended(self, rank: int, process: RankProcess) -> None:
        """A process has ended: wake the waiting thread, end the others, call the death callbacks."""
        with self._lock:
            if self._dead is not None:
                return
            fault = EngineDead(self._why or process.how_it_ended(CLOSE_S), where="runner")
            self._dead = fault
            callbacks = list(self._death_callbacks)
        with self._start_lock:
            self._ranks.lost(rank, "has ended")
        for other in self._processes:
            other.kill()
        for act in callbacks:
            act(fault)


def _lost_others(answer: Any) -> bool:
    """Whether a rank's failure is only that it lost the others."""
    match answer:
        case Failure(error=error) | Failed(error=error):
            return isinstance(from_dict(error), EngineDead)
        case _:
            return False
