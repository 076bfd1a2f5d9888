"""SchedulerProcess: joins control and compute. One thread owns the scheduler, the runner and the grammars.

It takes requests from a mailbox, steps, and posts output deltas to another mailbox. An error of a request
ends that request, an error of a step ends the running requests; if that fails too, `run` raises the cause.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from runtime.disagg.peers import Peers
from runtime.grammar.manager import GrammarManager
from runtime.ipc.mailbox import Inbox, MailboxClosed, Outbox, send_one_by_one
from runtime.plan import Runner, TextRunner
from runtime.processes.pipeline.vectors import Vectors, failed_vector, loop_of
from runtime.processes.pipeline.verbs import Profiler, Verbs, as_fault
from runtime.protocol import io_struct
from runtime.protocol.control import PrecompileReq
from runtime.protocol.errors import BadRequest, EngineDead, RuntimeFault, WireError
from runtime.protocol.io_struct import EmbeddingOutput, TokenizedGenerateReqInput, TokenOutput
from runtime.scheduler.embedding_scheduler import EmbeddingScheduler
from runtime.scheduler.requests.request import failure
from runtime.scheduler.scheduler import Scheduler

log = logging.getLogger(__name__)

IDLE_S = 5.0
"""The longest wait for mail; another one follows."""
BLOCKED_S = 0.001
"""The same while requests wait for their grammars."""
AWAITED_S = 0.016
"""The same while requests wait for other engines."""
PAUSED_S = 0.05
"""The same while generation is paused."""
LOOK_S = 0.005
"""The same while only constraints are compiled ahead."""
LOST_S = 0.5
"""How soon the loss of the runner is noticed."""
MAX_FAULTS_IN_A_ROW = 3


class SchedulerProcess:
    """Other threads may read `stalled_s`, and set `closed_because` before they close the inbox."""

    def __init__(
        self,
        scheduler: Scheduler | EmbeddingScheduler,
        runner: Runner | TextRunner,
        grammar: GrammarManager | None,
        inbox: Inbox,
        outbox: Outbox,
        clock: Callable[[], float] = time.monotonic,
        profiler: Profiler | None = None,
        vectors: Vectors | None = None,
        peers: Peers | None = None,
        path: str | None = None,
    ) -> None:
        """path: of the model's weights; None: they are in no file."""
        self._scheduler, self._runner, self._grammar = scheduler, runner, grammar
        self._inbox, self._outbox, self._clock, self._profiler = inbox, outbox, clock, profiler
        self._peers, self._awaited_s = peers, 0.0
        self._loop = loop_of(scheduler, runner)
        self._vectors = vectors or Vectors()
        self._begun: list[io_struct.TextRequest] = []
        self._live: dict[str, str | None] = {}  # rid -> its frontend
        self._verbs = Verbs(
            scheduler, runner, grammar, outbox.send, clock, self._live,
            profiler=profiler, path=path, shared=peers is not None,
        )  # fmt: skip
        self._working_since: float | None = None
        self.closed_because = "the engine was closed"
        self._lost: RuntimeFault | None = None

    def give_up(self, fault: RuntimeFault) -> None:
        """From any thread: the runner is lost. Within LOST_S `run` answers all with `fault` and raises it."""
        self._lost = fault

    @property
    def stalled_s(self) -> float:
        """Seconds since the current work began; 0 while waiting for messages."""
        since = self._working_since
        return 0.0 if since is None else max(0.0, self._clock() - since)

    def run(self) -> None:
        """Serve until the inbox is closed, then release everything. Raises the fault of give_up()."""
        try:
            wait = 0.0
            while True:
                self._working_since = None
                mail = self._receive(wait)
                if self._lost is not None:
                    self._fail_all(self._lost)
                    raise self._lost
                self._working_since = self._clock()
                for item in mail:
                    self._take(item)
                wait = self._step()
        except MailboxClosed as closed:
            # Ours, or the detokeniser's: then posting fails once more, and raises.
            self._fail_all(EngineDead(str(closed) or self.closed_because))
        finally:
            self._working_since = None
            if self._grammar is not None:
                self._grammar.close()
            if self._profiler is not None:
                self._profiler.close()
            if self._peers is not None:
                self._peers.close()
            self._runner.close()

    def _receive(self, wait: float) -> list[Any]:
        """The mail that comes within `wait` seconds; none after give_up()."""
        until = self._clock() + wait
        while True:
            mail = self._inbox.receive(min(wait, LOST_S))
            wait = until - self._clock()
            if mail or wait <= 0 or self._lost is not None:
                return mail

    # -- mail ------------------------------------------------------------------------------------------------

    def _take(self, item: Any) -> None:
        match item:
            case TokenizedGenerateReqInput() | io_struct.TokenizedEmbeddingReqInput():
                self._add(item)
            case io_struct.BatchTokenizedGenerateReqInput():
                for request in item.requests:
                    self._add(request)
            case io_struct.AbortReq(frontend=str(name)):
                for rid in [rid for rid, frontend in self._live.items() if frontend == name]:
                    self._scheduler.abort(rid, message=item.message)
            case io_struct.AbortReq():
                self._scheduler.abort(
                    None if item.abort_all else item.rid, prefix=item.prefix, message=item.message
                )
            case io_struct.SingleReq():
                self._verbs.take(item)
            case _:
                # A defect of the sender, which must not end the running requests.
                log.error("the scheduler got mail it does not know: %s", type(item).__name__)

    def _add(self, request: TokenizedGenerateReqInput | io_struct.TokenizedEmbeddingReqInput) -> None:
        rid, frontend = request.rid, request.http_worker_ipc
        if rid in self._live:
            self._refuse_twin(request)
            return
        self._live[rid] = frontend
        # Registered first, so that any error has a way back.
        if isinstance(request, TokenizedGenerateReqInput):
            self._begun.append(text_request(request))
        else:
            self._vectors.live[rid] = request
        try:
            if self._verbs.asleep:
                self._verbs.check_awake()
            if isinstance(request, TokenizedGenerateReqInput):
                self._scheduler.add(request)
            else:
                self._vectors.add(request, self._scheduler)
        except Exception as error:  # noqa: BLE001 - it is this request's answer
            self._scheduler.abort(rid)
            fault = as_fault(error, "the request could not be taken in")
            self._post([TokenOutput.failed(rid, fault, frontend)])

    def _refuse_twin(self, request: TokenizedGenerateReqInput | io_struct.TokenizedEmbeddingReqInput) -> None:
        rid = request.rid
        fault = BadRequest(f"a request with the id {rid!r} is still running", where="rid")
        if isinstance(request, io_struct.TokenizedEmbeddingReqInput):
            self._post_vectors([failed_vector(request, failure(fault))])
        else:
            # The detokeniser could not tell the deltas of the two apart, so it only passes this answer on.
            failed = TokenOutput.failed(rid, fault, request.http_worker_ipc)
            self._outbox.send(io_struct.BatchStrOutput.of([failed]))

    # -- steps -----------------------------------------------------------------------------------------------

    def _step(self) -> float:
        """One step; returns how long to wait for mail before the next."""
        try:
            outputs = self._loop.step()
        except Exception as error:
            # A defect: it is the answer to the live requests. If it repeats, the process ends.
            self._verbs.faults += 1
            log.exception("a step failed")
            self._fail_all(as_fault(error, "a step failed"))
            if self._verbs.faults >= MAX_FAULTS_IN_A_ROW:
                raise
            return 0.0
        if outputs:
            self._verbs.faults = 0
        self._post(outputs)
        if self._profiler is not None and self._profiler.recording:
            self._profiler.stepped()
        if self._verbs.waiting:
            self._verbs.answer_due(self._loop.in_flight)
        if self._loop.in_flight or outputs:
            self._awaited_s = 0.0
            return 0.0
        if not self._scheduler.busy or self._scheduler.paused is not None:
            if self._verbs.waiting and self._verbs.waits_for(PrecompileReq):
                return LOOK_S
            return PAUSED_S if self._scheduler.busy else IDLE_S
        if self._scheduler.running:
            self._awaited_s = 0.0
            return 0.0  # a step without deltas, such as a part of a prompt
        # All wait for their grammars, or for other engines: those are asked less and less often.
        if not self._scheduler.waits_elsewhere:
            return BLOCKED_S
        self._awaited_s = min(max(BLOCKED_S, 2 * self._awaited_s), AWAITED_S)
        return self._awaited_s

    def _fail_all(self, fault: RuntimeFault) -> None:
        """Answer every live request with `fault` and empty the scheduler."""
        try:
            outputs = self._loop.stop(fault)
        except Exception:
            log.exception("the scheduler cannot be emptied in order")
            outputs = []
        ended = {output.rid for output in outputs if output.finish is not None}
        for rid, frontend in sorted(self._live.items()):
            if rid not in ended:
                outputs.append(TokenOutput.failed(rid, fault, frontend))
        self._post(outputs)

    def _post(self, outputs: list[TokenOutput]) -> None:
        if not outputs and not self._begun:
            return
        begun, self._begun = self._begun, []
        for output in outputs:
            if output.finish is not None:
                self._live.pop(output.rid, None)
        if self._vectors.live:
            outputs, vectors = self._vectors.split(outputs)
            if vectors:
                self._post_vectors(vectors)
        if not outputs and not begun:
            return
        message = io_struct.BatchTokenIDOutput.of(outputs)
        message.begun = begun
        try:
            self._outbox.send(message)
        except WireError as error:
            log.error("outputs cannot travel: %s", error)
            self._outbox.send(io_struct.BatchTokenIDOutput(outputs=[], begun=begun))
            send_one_by_one(self._outbox, outputs, io_struct.BatchTokenIDOutput.of, self._fail)

    def _fail(self, output: TokenOutput, error: WireError) -> TokenOutput:
        """End a request whose output cannot travel."""
        self._scheduler.abort(output.rid)
        self._live.pop(output.rid, None)
        return TokenOutput.failed(output.rid, error, output.http_worker_ipc)

    def _post_vectors(self, vectors: list[EmbeddingOutput]) -> None:
        try:
            self._outbox.send(io_struct.BatchEmbeddingOutput.of(vectors))
        except WireError:
            send_one_by_one(self._outbox, vectors, io_struct.BatchEmbeddingOutput.of, EmbeddingOutput.failed)


def text_request(request: TokenizedGenerateReqInput) -> io_struct.TextRequest:
    """What the detokeniser needs to know of the request."""
    params = request.sampling_params
    return io_struct.TextRequest(
        rid=request.rid,
        stop=params.stop,
        stop_regex=params.stop_regex,
        skip_special_tokens=params.skip_special_tokens,
        no_stop_trim=params.no_stop_trim,
        at_start=request.at_start,
        http_worker_ipc=request.http_worker_ipc,
    )
