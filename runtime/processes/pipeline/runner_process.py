"""RunnerProcess: a Runner whose model is in a process of its own. It starts it, sends plans, notices its end
and leaves none behind. Loads no torch; it knows no requests, grammars or policies.

Scheduler and model each have an interpreter to themselves then: what is computed in Python for constraints
takes no time from the forward pass. How they talk: runtime/ipc, in plans.py.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from runtime.config.model import ModelSpec
from runtime.config.runner import RunnerConfig
from runtime.engine.follower import FROM_RUNNER, TO_RUNNER, Failed, LogLine, Ready, Start
from runtime.engine.logit_processors import PROCESSORS, Processors
from runtime.ipc.address import Address
from runtime.ipc.plans import (
    Answer,
    Copy,
    Done,
    Failure,
    Finish,
    Launch,
    MaskWriter,
    Order,
    PlanWriter,
    Profile,
    Result,
    Verify,
)
from runtime.ipc.ranks import Ranks
from runtime.plan import Run, StepPlan, StepResult, TokenMask
from runtime.processes.pipeline.environment import for_children
from runtime.protocol.errors import (
    BadRequest,
    DeadlineExceeded,
    EngineDead,
    InternalFault,
    RuntimeFault,
    WireError,
    from_dict,
)
from runtime.protocol.sampling import SamplingParams

log = logging.getLogger(__name__)

CLOSE_S = 5.0
"""How long the process may take to end when nobody needs it any more; then it is killed."""
WAITING = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Unless the environment says otherwise: threads of one operation that wait for one another sleep. They would
turn round and round on cores that the scheduler needs, and each operation wait for its turn."""


class RunnerProcess:
    """Implements runtime.plan.Runner and the scheduler's Profiler. One thread calls it; on_death() may be
    called by any.

    A plan that is not whole is an error of finish(), with TorchRunner of launch(): launch() does not
    wait for an answer. When the process ends or hangs, every verb raises from then on.
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
        """Start the process and wait until the model is loaded. Raises what TorchRunner.load raises;
        EngineDead when it ends, or is not ready in time."""
        self._config = (config or RunnerConfig()).verify()
        self._dead: RuntimeFault | None = None
        self._closing = False
        self._death_callbacks: list[Callable[[RuntimeFault], None]] = []
        self._lock = threading.Lock()
        self._plans = PlanWriter()
        self._launched: tuple[StepPlan, Launch] | None = None
        self._early: Result | Failure | None = None  # a result that came while something else was awaited
        self._masks = MaskWriter()
        mine, theirs = socket.socketpair()
        with mine, theirs:
            address = Address.fd(mine.fileno())
            outbox = address.outbox(TO_RUNNER, timeout_s=self._config.step_timeout_s)
            self._ranks = Ranks([(outbox, address.inbox(FROM_RUNNER))])
            try:
                self._process = self._spawn(theirs.fileno())
            except BaseException:
                self._ranks.close()
                self._masks.close()
                raise
        self._watcher = threading.Thread(target=self._watch, name="runner-process", daemon=True)
        self._watcher.start()
        start = Start(
            path=str(Path(path).expanduser()),
            spec=spec,
            config=self._config,
            parent=os.getpid(),
            profile_folder=profile_folder,
            search=tuple(os.path.abspath(place) for place in sys.path),
        )
        try:
            self._ready = self._load(start, load_timeout_s)
        except BaseException:
            self._process.kill()
            self.close()
            raise

    @property
    def slots(self) -> int:
        return self._ready.slots

    @property
    def vocab_size(self) -> int:
        return self._ready.vocab_size

    @property
    def device(self) -> str:
        """The kind of device the model computes on: cpu or cuda."""
        return self._ready.device

    @property
    def pid(self) -> int:
        return self._process.pid

    def on_death(self, act: Callable[[RuntimeFault], None]) -> None:
        """Call `act` from another thread when the process ends by itself; at once when it
        has already."""
        with self._lock:
            dead = self._dead
            if dead is None:
                self._death_callbacks.append(act)
        if dead is not None:
            act(dead)

    def verify(self, params: SamplingParams) -> None:
        """Raise BadRequest for a logit processor that is not known, or that cannot use its parameters, and
        for what cannot be sent."""
        name = params.custom_logit_processor
        target = None if name is None else PROCESSORS.target(name)
        order = Verify(params, target)
        try:
            TO_RUNNER.encode(order)
        except WireError as error:
            where = "sampling_params.custom_params" if params.custom_params else "sampling_params"
            raise BadRequest(f"cannot be sent to the model's process: {error}", where=where) from error
        if name is None:
            Processors().verify(params, self.vocab_size)
        else:
            self._ask(order)

    def launch(self, plan: StepPlan) -> None:
        """Send the plan. Raises InternalFault: the process is gone, or a value in it cannot travel."""
        if self._launched is not None:
            raise InternalFault("launch() before finish() of the step before", where="runner")
        # Without masks to come the result need not be asked for. Should some come all the same, the plan is
        # run once more, with them.
        at_once = not any(row.masked or row.sampling.min_new_tokens for row in plan.rows if row.sample)
        self._launched = plan, self._send_plan(plan, at_once=at_once)

    def done(self) -> bool:
        launched = self._launched
        return launched is None or self._dead is not None or self._masks.ended == launched[1].number

    def finish(self, masks: Mapping[int, TokenMask]) -> StepResult:
        """Raises DeadlineExceeded when it takes longer than step_timeout_s (the process is killed then),
        InternalFault when the pass failed or the process is gone, and for a plan that was not whole."""
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
            places = self._masks.write(masks, processed)
            self._send(Finish(sent.number, places, self._masks.size))
        match self._result(sent, until):
            case Result(_, result):
                return result
            case Failure(_, error):
                raise from_dict(error)

    def copy_slots(self, pairs: Sequence[tuple[Run, Run]]) -> None:
        if self._launched is not None:
            raise InternalFault("copy_slots() during a step", where="runner")
        for source, target in pairs:
            if source.length != target.length:
                raise ValueError(f"cannot copy {source} to {target}: their lengths differ")
        self._ask(Copy(tuple(pairs)))

    def start(self, folder: str | None, steps: int | None) -> dict[str, Any]:
        """Begin a profile of the process. Raises BadRequest as TorchProfiler does."""
        return self._ask(Profile("start", folder, steps))

    def stop(self) -> dict[str, Any]:
        """End it. Raises BadRequest when none is made, or it cannot be written."""
        return self._ask(Profile("stop", None, None))

    def stepped(self) -> None:
        """The process counts its steps itself."""

    def close(self) -> None:
        """End the process: by closing its mailbox, and by force when that does not help in time. May be
        called more than once."""
        with self._lock:
            again, self._closing = self._closing, True
            if self._dead is None:
                self._dead = InternalFault("the runner was closed", where="runner")
        if again:
            return
        self._ranks.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            log.warning("the model's process does not end and is killed")
            self._kill()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._watcher.join(CLOSE_S)
        self._masks.close()

    # -- within ----------------------------------------------------------------------------------------------

    def _spawn(self, end: int) -> subprocess.Popen[bytes]:
        arguments = [Address.fd(end).url, str(self._masks.file)]
        try:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "runtime.engine.follower", *arguments],
                stdin=subprocess.PIPE,  # it ends when this end of it is closed
                stdout=subprocess.PIPE,
                bufsize=0,
                env={**WAITING, **for_children(os.environ)},
                pass_fds=(end, self._masks.file),
            )
        except OSError as error:
            raise InternalFault(f"the model's process cannot be started: {error}", where="runner") from error

    def _load(self, start: Start, timeout: float) -> Ready:
        try:
            self._ranks.send(start)
            (report,) = self._ranks.gather(timeout)
        except DeadlineExceeded:
            raise EngineDead(
                f"the model was not loaded within {timeout:g} s", where=start.path, hint="load_timeout_s"
            ) from None
        except EngineDead:
            raise EngineDead(f"{self._how_it_ended()} while it loaded", where=start.path) from None
        match report:
            case Failed(error):
                raise from_dict(error)
            case Ready():
                return report
            case other:
                raise InternalFault(
                    f"the model's process began with {type(other).__name__}", where=start.path
                )

    def _send_plan(self, plan: StepPlan, *, at_once: bool) -> Launch:
        order = self._plans.write(plan, at_once=at_once)
        try:
            self._send(order)
        except WireError as error:
            self._plans.forget(plan)
            raise InternalFault(f"the plan cannot be sent: {error}", where="runner") from error
        return order

    def _send(self, order: Order) -> None:
        if self._dead is not None:
            raise self._gone()
        try:
            self._ranks.send(order)
        except DeadlineExceeded:
            raise self._stuck("took no order") from None
        except EngineDead:
            raise self._gone() from None

    def _ask(self, order: Order) -> dict[str, Any]:
        """The answer to what is no plan; behind a pass that is under way, once that has ended."""
        self._send(order)
        until = time.monotonic() + self._config.step_timeout_s
        while True:
            match self._receive(until):
                case Done(made):
                    return made
                case Failure(-1, error):
                    raise from_dict(error)
                case Result() | Failure() as early:
                    self._early = early

    def _result(self, sent: Launch, until: float) -> Result | Failure:
        early, self._early = self._early, None
        if early is not None and early.number == sent.number:
            return early
        while True:
            match self._receive(until):
                case Result(number) | Failure(number) as found if number == sent.number:
                    return found
                case other:
                    log.error("the model's process gave an answer to nothing: %s", type(other).__name__)

    def _receive(self, until: float) -> Answer:
        if self._dead is not None:
            raise self._gone()
        try:
            (answer,) = self._ranks.gather(max(0.0, until - time.monotonic()))
        except DeadlineExceeded:
            raise self._stuck("did not end") from None
        except EngineDead:
            raise self._gone() from None
        except WireError as error:
            self._kill()
            raise InternalFault(
                f"the model's process gave what cannot be read: {error}", where="runner"
            ) from error
        return cast("Answer", answer)

    def _stuck(self, how: str) -> DeadlineExceeded:
        """Kill it: nothing that it may still give would be wanted, and the next step would wait for it."""
        self._kill()
        limit = self._config.step_timeout_s
        return DeadlineExceeded(f"a forward pass {how} within {limit:g} s", where="runner")

    def _kill(self) -> None:
        with contextlib.suppress(OSError):
            self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_S)

    def _gone(self) -> InternalFault:
        if self._closing:
            return InternalFault("the runner was closed", where="runner")
        return InternalFault(self._how_it_ended(), where="runner", hint="its last lines are in the log")

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            return "the model's process closed its mailbox"
        if code >= 0:
            return f"the model's process ended with code {code}"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"the model's process was killed by {name}"

    def _watch(self) -> None:
        """Pass on what it logs until it ends; then call the death callbacks."""
        pipe = self._process.stdout
        assert pipe is not None
        left = b""
        with pipe:
            while data := os.read(pipe.fileno(), 1 << 16):
                *lines, left = (left + data).split(b"\n")
                for raw in lines:
                    with contextlib.suppress(msgspec.DecodeError):
                        line = msgspec.json.decode(raw, type=LogLine)
                        logging.getLogger(line.logger).log(line.level, "%s", line.text)
        self._process.wait()
        with self._lock:
            if self._dead is not None:
                return
            fault = EngineDead(self._how_it_ended(), where="runner")
            self._dead = fault
            callbacks = list(self._death_callbacks)
        for act in callbacks:
            act(fault)
