"""SchedulerProcess: joins control and compute. One thread owns the scheduler, the runner and the grammars.

Takes requests from a mailbox, steps, and posts output deltas to another. What goes wrong with one request
ends that request; what goes wrong with a step ends the requests that were running; only when even that fails
does the process end, and then its cause is in `run`'s exception.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from runtime.disagg.peers import Peers
from runtime.grammar.manager import GrammarManager
from runtime.ipc.mailbox import Inbox, MailboxClosed, Outbox
from runtime.plan import Runner, TextRunner
from runtime.processes.pipeline.outputs import (
    Vectors,
    as_fault,
    batch,
    failed,
    failed_vector,
    loop_of,
    text_request,
    vector_batch,
)
from runtime.processes.pipeline.precompile import LOOK_S
from runtime.processes.pipeline.verbs import Profiler, Verbs
from runtime.protocol.errors import BadRequest, EngineDead, RuntimeFault, WireError
from runtime.protocol.io_struct import (
    AbortReq,
    BatchStrOutput,
    BatchTokenizedGenerateReqInput,
    EmbeddingOutput,
    SingleReq,
    StrOutput,
    TextRequest,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
    TokenOutput,
)
from runtime.scheduler.embedding_scheduler import EmbeddingScheduler
from runtime.scheduler.requests.request import failure
from runtime.scheduler.scheduler import Scheduler

log = logging.getLogger(__name__)

IDLE_S = 5.0
"""How long one wait for mail lasts; a new one follows."""
BLOCKED_S = 0.001
"""How long to wait for mail while requests wait for something other than a step (their grammar)."""
AWAITED_S = 0.016
"""The same while only other engines are waited for, after a while."""
PAUSED_S = 0.05
"""The same while generation is paused, or a flush waits for requests to end."""
LOST_S = 0.5
"""How long it may take until it is noticed that the runner is lost."""
MAX_FAULTS_IN_A_ROW = 3


class SchedulerProcess:
    """`run()` until the inbox is closed. Other threads may read `stalled_s`, and say why they close it in
    `closed_because`."""

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
        """path: of the model's weights; None: they are nowhere."""
        self._scheduler, self._runner, self._grammar = scheduler, runner, grammar
        self._inbox, self._outbox, self._clock, self._profiler = inbox, outbox, clock, profiler
        self._peers, self._awaited_s = peers, 0.0
        self._loop = loop_of(scheduler, runner)
        self._vectors = vectors or Vectors()
        self._begun: list[TextRequest] = []
        self._live: dict[str, str | None] = {}  # rid -> its frontend
        self._verbs = Verbs(
            scheduler, runner, grammar, outbox.send, clock, self._live,
            profiler=profiler, path=path, shared=peers is not None,
        )  # fmt: skip
        self._working_since: float | None = None
        self.closed_because = "the engine was closed"
        self._lost: RuntimeFault | None = None

    def give_up(self, fault: RuntimeFault) -> None:
        """From any thread: nothing can be computed any more. `run` answers everybody with `fault`, and raises
        it, within LOST_S. Until then messages are still taken: whoever sends some gets the reason."""
        self._lost = fault

    @property
    def stalled_s(self) -> float:
        """Seconds since the current work began; 0 while waiting for messages."""
        since = self._working_since
        return 0.0 if since is None else max(0.0, self._clock() - since)

    def run(self) -> None:
        """Serve until the inbox is closed; then end what still runs, and release runner and grammars. Raises
        what it was given up for."""
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
            # Ours, or the detokeniser's, which takes no more: then posting fails once more, and says so.
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
        """Mail; none when there is none for so long, or when it was given up."""
        until = self._clock() + wait
        while True:
            mail = self._inbox.receive(min(wait, LOST_S))
            wait = until - self._clock()
            if mail or wait <= 0 or self._lost is not None:
                return mail

    # -- mail ------------------------------------------------------------------------------------------------

    def _take(self, item: Any) -> None:
        match item:
            case TokenizedGenerateReqInput() | TokenizedEmbeddingReqInput():
                self._add(item)
            case BatchTokenizedGenerateReqInput():
                for request in item.requests:
                    self._add(request)
            case AbortReq(frontend=str(gone)):
                for own in [rid for rid, frontend in self._live.items() if frontend == gone]:
                    self._scheduler.abort(own, message=item.message)
            case AbortReq():
                rid = None if item.abort_all else item.rid
                self._scheduler.abort(rid, prefix=item.prefix, message=item.message)
            case SingleReq():
                self._verbs.take(item)
            case _:
                # Dropped rather than fatal: whoever sent it is a defect, those who run are not.
                log.error("the scheduler got mail it does not know: %s", type(item).__name__)

    def _add(self, request: TokenizedGenerateReqInput | TokenizedEmbeddingReqInput) -> None:
        rid, frontend = request.rid, request.http_worker_ipc
        if rid in self._live:
            self._refuse_twin(request)
            return
        self._live[rid] = frontend
        # First registered, so that whatever goes wrong has a way back.
        if isinstance(request, TokenizedGenerateReqInput):
            self._begun.append(text_request(request))
        else:
            self._vectors.begin(request)
        try:
            self._verbs.check_awake()
            if isinstance(request, TokenizedGenerateReqInput):
                self._scheduler.add(request)
            else:
                self._vectors.add(request, self._scheduler)
        except Exception as error:  # noqa: BLE001 - it is this request's answer
            self._scheduler.abort(rid)
            self._post([failed(rid, frontend, as_fault(error, "the request could not be taken in"))])

    def _refuse_twin(self, request: TokenizedGenerateReqInput | TokenizedEmbeddingReqInput) -> None:
        rid = request.rid
        fault = BadRequest(f"a request with the id {rid!r} is still running", where="rid")
        if isinstance(request, TokenizedEmbeddingReqInput):
            self._post_vectors([failed_vector(request, failure(fault))])
        else:
            # The detokeniser could not distinguish the deltas of the two, so it only passes this answer on.
            taken = failed(rid, request.http_worker_ipc, fault)
            self._outbox.send(BatchStrOutput(rids=[rid], outputs=[StrOutput(rid=rid, text="", delta=taken)]))

    # -- steps -----------------------------------------------------------------------------------------------

    def _step(self) -> float:
        """One step; how long to wait for mail before the next."""
        try:
            outputs = self._loop.step()
        except Exception as error:
            # A defect: the requests in hand are answered with it. If it comes again and again, nothing works.
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
        self._verbs.answer_due(self._loop.in_flight)
        if self._loop.in_flight or outputs:
            self._awaited_s = 0.0
            return 0.0
        if not self._scheduler.busy:
            return LOOK_S if self._verbs.compiling else IDLE_S
        if self._scheduler.paused is not None:
            return LOOK_S if self._verbs.compiling else PAUSED_S
        if self._scheduler.running:
            self._awaited_s = 0.0
            return 0.0  # a step without deltas, such as a part of a prompt
        # All wait: for their grammars, or for other engines, and then longer and longer.
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
        left = [(rid, frontend) for rid, frontend in sorted(self._live.items()) if rid not in ended]
        self._post(outputs + [failed(rid, frontend, fault) for rid, frontend in left])

    def _post(self, outputs: Sequence[TokenOutput]) -> None:
        if not outputs and not self._begun:
            return
        begun, self._begun = self._begun, []
        for output in outputs:
            if output.finish is not None:
                self._live.pop(output.rid, None)
        outputs, vectors = self._vectors.split(outputs)
        self._post_vectors(vectors)
        if outputs or begun:
            self._post_texts(outputs, begun)

    def _post_texts(self, outputs: Sequence[TokenOutput], begun: list[TextRequest]) -> None:
        """Each alone where all together cannot travel; one that cannot travel alone becomes an error."""
        try:
            self._outbox.send(batch(outputs, begun))
        except WireError as error:
            log.error("outputs cannot travel: %s", error)
            if begun or len(outputs) > 1:
                self._outbox.send(batch([], begun))
                for output in outputs:
                    self._post_texts([output], [])
                return
            [output] = outputs
            self._scheduler.abort(output.rid)
            self._live.pop(output.rid, None)
            self._outbox.send(batch([failed(output.rid, output.http_worker_ipc, error)], []))

    def _post_vectors(self, vectors: Sequence[EmbeddingOutput]) -> None:
        """The same of vectors."""
        if not vectors:
            return
        try:
            self._outbox.send(vector_batch(vectors))
        except WireError as error:
            if len(vectors) > 1:
                for vector in vectors:
                    self._post_vectors([vector])
                return
            alone = msgspec.structs.replace(vectors[0], embedding=[], meta={}, finish=failure(error))
            self._outbox.send(vector_batch([alone]))
