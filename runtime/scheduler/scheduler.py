"""Scheduler: from requests to plans and from results to outputs, by continuous batching over a prefix cache.

    add() ... plan() -> [runner.launch] -> masks() -> [runner.finish] -> commit() -> add() ...

It works on ints: it knows no tensors, no text and no processes. One thread calls it. Each request is answered
exactly once with a finish reason. Every method except plan() may be called while a step is under way; a
request of that step is then changed at its commit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from runtime.cache.manager import CacheManager
from runtime.config.scheduler import SchedulerConfig
from runtime.grammar.manager import GrammarManager
from runtime.grammar.reasoner import Reasoning
from runtime.plan import StepPlan, StepResult, TokenMask
from runtime.protocol.control import PauseMode
from runtime.protocol.errors import InternalFault, RuntimeFault
from runtime.protocol.io_struct import FinishReason, TokenizedGenerateReqInput, TokenOutput
from runtime.protocol.sampling import SamplingParams
from runtime.protocol.vocabulary import Vocabulary
from runtime.scheduler.admission import RequestValidator
from runtime.scheduler.batching import NO_FLIGHT, Batcher, Commit, Flight
from runtime.scheduler.guided.decoding import Encode, GuidedDecoding, PassDone, ended
from runtime.scheduler.policies import POLICIES
from runtime.scheduler.queues import WaitingQueue
from runtime.scheduler.requests.adapters import AdapterRegistry
from runtime.scheduler.requests.images import ImageRegistry
from runtime.scheduler.requests.request import Request, defect, failure
from runtime.scheduler.running_batch import RunningBatch
from runtime.scheduler.scheduler_base import Rate, SchedulerBase
from runtime.scheduler.sessions import Sessions
from runtime.scheduler.speculation import Speculation
from runtime.scheduler.stage import SchedulerParts, Settled, Stage

MAX_FAULTS = 3  # plans in a row that may fail because of a wrong account of slots
AUDIT_TICKS = 512  # how often the account of slots is checked while busy
log = logging.getLogger(__name__)


class Scheduler(SchedulerBase[Request]):
    """`slots`: size of the KV pool. `encode`: text -> ids without special tokens, for jump-forward.
    `grammar`: compiles constraints; None refuses them. `clock`: seconds. `verify_params`: raises BadRequest
    for parameters that the runner does not support (Runner.verify). `reasoning`: how the model ends its
    reasoning; None if that is not known. `stage`: creates the stage. `adapters`, `images`: None refuses
    requests with adapters or images."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        slots: int,
        vocabulary: Vocabulary,
        encode: Encode,
        grammar: GrammarManager | None,
        clock: Callable[[], float] = time.monotonic,
        verify_params: Callable[[SamplingParams], None] | None = None,
        reasoning: Reasoning | None = None,
        stage: Callable[[SchedulerParts], Stage] = Stage,
        adapters: AdapterRegistry | None = None,
        images: ImageRegistry | None = None,
    ) -> None:
        super().__init__(config, clock)
        self.manager = CacheManager(
            slots, config.page_size, radix=config.radix_cache, eviction=config.eviction_policy
        )
        self._vocabulary = vocabulary
        self.guided = GuidedDecoding(config, self.manager, vocabulary, encode, grammar, reasoning)
        self._guided_live = 0  # live requests in which guided decoding has part
        speculates = config.speculation.algorithm is not None
        self._speculation = Speculation(config.speculation, self.manager) if speculates else None
        images = images or ImageRegistry()
        self._batcher = Batcher(self.manager, config, self._speculation, images)
        self._rate = Rate(clock())
        self.adapters = (adapters or AdapterRegistry()).following(self._live)
        self._waiting = WaitingQueue(POLICIES.load(config.policy), by_priority=config.policy == "priority")
        self._sessions = Sessions(self.manager, config.max_sessions, config.max_session_tokens)
        self._stage = stage(SchedulerParts(self.manager, self._counters, self._deadlines, self._sessions))
        self._batch = RunningBatch(
            config, self.manager, self._waiting, self._counters, self._stage, clock,
            release_kept=self._sessions.give_up, fail=self._fail, adapters=self.adapters,
        )  # fmt: skip
        self._commit = Commit(
            self._stage, self._batch, self.guided, self._outbox, len(vocabulary), self._finish
        )
        self._validator = RequestValidator(
            self.manager, len(vocabulary), self._live, self._waiting, self.guided.compiling,
            self._sessions, self.adapters, images,
            lambda rid: self.abort(rid, message="its turn was replaced"), self._fail, verify_params,
        )  # fmt: skip
        self._under_way: Flight | None = None
        self._doomed: dict[int, RuntimeFault] = {}  # rows of that plan to fail at its commit, by seq
        self._retracts = False  # pause("retract") waits for the step under way
        self._released: list[int] = []
        self._tick = self._arrivals = self._faults = 0  # faults: plans in a row that failed

    # -- requests --------------------------------------------------------------------------------------------

    def add(self, req: TokenizedGenerateReqInput) -> None:
        """Accept a request. One that can never run is answered at once (see drain)."""
        self._arrivals += 1
        self._counters.requests += 1
        now = self._clock()
        try:
            whole = self._validator.accept(req, self.config, now)
        except RuntimeFault as fault:
            self._counters.failed += 1
            self._stage.refused(req, fault)
            return self._outbox.refuse(req, failure(fault))
        request = Request(whole, self._arrivals, self._vocabulary, now, self._tick)
        self._live[request.rid] = request
        self._guided_live += request.guided
        if self._speculation is not None:
            self._speculation.begin(request)
        self._deadlines.came(request, now)
        try:
            self._stage.arrived(request)
        except RuntimeFault as fault:
            return self._fail(request, fault)
        if request.guided and self.guided.add(request):
            self._poll_grammars()
        else:
            self._enqueue(request)

    @property
    def waits_elsewhere(self) -> bool:
        """Whether it waits for other engines."""
        return self._stage.awaiting

    @property
    def running(self) -> int:
        """Requests that run. 0, though busy: all wait (for a grammar, or for resume())."""
        return len(self._batch.running)

    # -- control ---------------------------------------------------------------------------------------------

    def flush_cache(self) -> bool:
        """Drop every prefix that no running request reads, those of sessions too; True if nothing is left."""
        self._sessions.let_go()
        return self.manager.flush()

    def pause(self, mode: PauseMode) -> None:
        """Return no plans until resume(). Requests that are live:
        "abort"     all are cancelled
        "in_place"  they keep their slots
        "retract"   running ones go back to the front of the queue, and the cache is flushed: they are
                    computed again, with the same outputs
        A step under way is committed as usual, and a retraction follows it. Pausing again changes the mode.
        """
        super().pause(mode)
        self._retracts = mode == "retract"
        self._retract_for_pause()

    def open_session(
        self,
        session_id: str | None = None,
        capacity: int = 0,
        timeout_s: float | None = None,
        *,
        streaming: bool = False,
        owner: str = "",
    ) -> str:
        """Open a session and return its id (None: a new one). `capacity`: prompt + new tokens of one turn,
        all earlier ones included, at most; 0: no limit. `timeout_s`: closed after so long without use; None:
        never. `streaming`: turns only append to the last one, whose KV is kept between turns until its slots
        are needed. `owner`: the client whose requests its turns are. Raises BadRequest: the id is in use, a
        number out of range, too many."""
        now = self._clock()
        self._sessions.expire(now)
        return self._sessions.open(session_id, capacity, timeout_s, streaming, now, owner)

    def close_session(self, session_id: str, owner: str = "") -> None:
        """Forget a session and cancel its turns that still run. Raises BadRequest if there is none."""
        for rid in self._sessions.close(session_id, owner):
            self.abort(rid, message="its session was closed")

    def tune(self, values: Mapping[str, Any]) -> dict[str, Any]:
        changed = super().tune(values)
        self._batch.configure(self.config)
        self._batcher.chunk = self.config.chunked_prefill_size
        return changed

    def state(self) -> dict[str, Any]:
        """Counters since the start (*_total, and the old short names), current numbers, and rates."""
        running, waiting, compiling = len(self._batch.running), len(self._waiting), len(self.guided.compiling)
        produced = sum([one.produced for one in self._live.values()])
        jumped = sum([one.jumped for one in self._live.values()])
        self._rate.look(self._counters.generated, self._live.values(), self._clock())
        return {
            "running": running,
            "waiting": waiting,
            "compiling": compiling,
            "num_running_reqs": running,
            "num_queue_reqs": waiting,
            "num_grammar_queue_reqs": compiling,
            "num_retracted_reqs": self._waiting.retracted,
            "num_sessions": len(self._sessions),
            "num_session_tokens": self._sessions.tokens,
            "num_paused_reqs": len(self._live) if self.paused else 0,
            "paused": self.paused,
            "policy": self.config.policy,
            "new_token_ratio": self._batch.ratio.value,
            "gen_throughput": self._rate.value if running else 0.0,
            **self.manager.state(),
            **self.guided.state(),
            **self._stage.state(),
            **(self._speculation.state(self._live.values()) if self._speculation is not None else {}),
            **self.adapters.state(),
            **self._counters.state(produced, jumped),
        }

    def check(self) -> None:
        """Raise InternalFault, with the numbers, unless every slot is accounted for."""
        self._batch.check(self._sessions.leases() if self._sessions.by_key else ())

    # -- the step --------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step; None if nothing can run now. To be committed, or failed, before the next."""
        if self._under_way is not None:
            raise InternalFault("plan() before the last plan was committed", where="scheduler")
        self._tick += 1
        if self.adapters.leaving:
            self.adapters.sweep()
        # A grammar that became ready since prepare() waits a step: its first tokens would delay the others.
        self._poll(begin=not (self.guided.overlapped and self._batch.running))
        if self._batch.damaged or not self._live or self._tick % AUDIT_TICKS == 0:
            self._audit()
        if self.paused is not None:
            return None
        try:
            return self._decide()
        except InternalFault as fault:
            # Nothing of this plan has run; the account of slots may be what was wrong.
            self._faults += 1
            if self._faults > MAX_FAULTS:
                raise
            log.error("no plan could be made: %s", fault)
            self._batch.damaged = True
            return None

    def _decide(self) -> StepPlan | None:
        batch = self._batch
        if batch.extend_leases() and self._admit(preempt=True):
            batch.extend_leases()  # text that a first token forces may need slots
        if not batch.running:
            if self.guided.overlapped:
                self.guided.idle()
            return None
        running, only_free = batch.running, self._guided_live > 0 and self.guided.skips(batch.running)
        plan, requests = self._batcher.build(running, tuple(self._released), only_free=only_free)
        if not requests:
            return None
        self._released, self._under_way = [], Flight(requests, plan.rows, len(running))
        return plan

    def _admit(self, *, preempt: bool) -> bool:
        """Admit requests; returns whether some began with a token from another engine."""
        self._batch.admit(self._tick, preempt=preempt)
        began = False
        for request, sample in self._stage.first_tokens():
            began = True
            try:
                if sample is not None:
                    self._commit.accept(request, sample, self._clock())
                self._commit.after(request)
            except RuntimeFault as fault:
                self._fail(request, fault)
            except Exception as error:  # noqa: BLE001 - it is this request's answer
                self._fail(request, defect("the first token could not be used", error))
        return began

    def prepare(self) -> None:
        """Work for the next plan that can be done while a step is under way: deadlines, grammars, and
        admission of requests that fit already. Changes no result; plan() does the rest."""
        self._poll()
        if self.paused is None and not self._batch.damaged:
            self._admit(preempt=False)

    def run_deferred(self, pass_done: PassDone | None = None) -> None:
        """Deferred work of constrained decoding. `pass_done`: whether the pass under way has ended."""
        under_way = {request.seq for request in (self._under_way or NO_FLIGHT).requests}
        for request, fault in self.guided.run_deferred(self._live, under_way, pass_done):
            if fault is not None:
                self._fail(request, fault, keep=request.intact)
            elif request.intact and request.ready:
                self._finish(request)

    def masks(self, pass_done: PassDone | None = None) -> dict[int, TokenMask]:
        """Masks for the rows of the last plan, by row index; a row without one may sample anything. The
        output of a request whose grammar is at a dead end is taken back at the commit, or that request fails.
        Beside free requests no more is done once the pass has ended."""
        if not self._guided_live:
            return {}
        flight = self._under_way or NO_FLIGHT
        masks, faults = self.guided.masks(flight.requests, flight.rows, pass_done)
        self._doomed |= faults
        return masks

    def commit(self, result: StepResult) -> list[TokenOutput]:
        """settle(), then drain()."""
        self.settle(result)
        return self.drain()

    def settle(self, result: StepResult) -> None:
        """Apply the results of the plan's rows. plan() may follow at once; drain() returns the outputs."""
        flight = self._under_way or NO_FLIGHT
        requests, rows = flight.requests, flight.rows
        if len(result.rows) != len(rows):
            self.fail_step(ValueError(f"{len(result.rows)} results for {len(rows)} rows"))
            return
        self._under_way = None
        now = self._clock()
        self._counters.steps += 1
        self._faults = 0
        self._batch.ratio.decay()
        if self._guided_live or self.guided.overlapped:
            self.guided.landed(requests, rows, flight.present, self._batch.running, result, now)
        if self._speculation is not None:
            self._speculation.landed(rows, result)
        pieces = self._outbox.pieces
        computed, size, doomed = 0, len(self._vocabulary.tokens), bool(self._doomed)
        for request, row, answer in zip(requests, rows, result.rows):
            computed += len(row.tokens)
            token = answer.samples[0].token if answer.samples else -1
            if (
                request.plain
                and not row.drafts
                and 0 <= token < size
                and row.position >= request.publish_to
                and answer.error is None
                and not doomed
            ):
                # The usual row, written out: one more token of a plain request.
                request.lease.settle()  # type: ignore[union-attr]
                request.computed += 1
                request.decode_steps += 1
                tokens = request.tokens
                tokens.append(token)
                if token not in request.rule.ids and len(tokens) < request.limit:
                    if request.stream:
                        pieces.append(request)
                    continue
                reason = request.rule.finish(token, None, request.produced, False)
                assert reason is not None
                request.end(reason)
                self._finish(request)
                continue
            fault = self._doomed.pop(request.seq, None) if doomed else None
            try:
                if fault is None:
                    self._commit.row(request, row, answer, now)
            except RuntimeFault as raised:
                fault = raised
            except Exception as error:  # noqa: BLE001
                fault = defect("the step's result could not be used", error)
            if fault is not None:
                keep = answer.error is None and request.intact and not isinstance(fault, InternalFault)
                self._fail(request, fault, keep=keep)
        self._counters.computed += computed
        self._rate.look(self._counters.generated, self._live.values(), now)
        self._retract_for_pause()

    def fail(self, error: BaseException) -> list[TokenOutput]:
        """The plan under way failed: its requests fail with the cause; all others continue."""
        self.fail_step(error)
        return self.drain()

    def fail_step(self, error: BaseException) -> None:
        """fail() without the outputs."""
        requests, self._under_way = (self._under_way or NO_FLIGHT).requests, None
        for request in requests:
            fault = self._doomed.pop(request.seq, None)
            self._fail(request, fault or defect("the model step failed", error), keep=False)
        self._doomed.clear()
        self._retract_for_pause()

    def give_up(self, fault: RuntimeFault) -> list[TokenOutput]:
        """Also those of the step under way."""
        self._under_way = None
        self._doomed.clear()
        return super().give_up(fault)

    # -- waiting ---------------------------------------------------------------------------------------------

    def _enqueue(self, request: Request) -> None:
        """The request could run now."""
        request.timing.queued(self._tick)
        request.plain = request.is_plain
        self._waiting.add(request)
        self._batch.unblock()

    def _poll(self, *, begin: bool = True) -> None:
        """Look at deadlines, other engines and (`begin`) grammars."""
        for request, fault in self._deadlines.due(self._clock(), self._live):
            self._fail(request, fault)
        self._settle_stage(self._stage.poll(self._clock()))
        if begin and self.guided.compiling:
            self._poll_grammars()

    def _poll_grammars(self) -> None:
        for request, fault in self.guided.ready():
            if fault is not None:
                self._fail(request, fault)
            elif request.ready and request.source.bootstrap is None:
                self._finish(request)
            else:
                if request.ending is not None:  # the other engine waits for its prompt
                    request.end(request.ending, request.prompt_len)
                self._enqueue(request)

    def _retract_for_pause(self) -> None:
        if self._retracts and self._under_way is None:
            self._retracts = False
            self._batch.retract_all()
            self.flush_cache()

    def _settle_stage(self, settled: Iterable[Settled]) -> None:
        for request, fault in settled:
            if fault is None:
                self._finish(request)
            else:
                self._fail(request, fault)

    # -- the account -----------------------------------------------------------------------------------------

    def _audit(self) -> None:
        """Check the account of slots; if it is wrong, start it anew: nothing is cached any more, and running
        requests are computed again. None fails, and no output changes."""
        if self._sessions.by_key:
            self._sessions.expire(self._clock())
        try:
            if self._batch.damaged:
                raise InternalFault("a lease could not be closed", where="cache")
            self.check()
        except InternalFault as fault:
            log.error("the account of slots is wrong and starts anew: %s", fault)
            self._counters.repairs += 1
            self._sessions.void()
            self._settle_stage(self._stage.void())
            self._batch.restart(self._live.values())

    # -- the end ---------------------------------------------------------------------------------------------

    def _finish(self, request: Request) -> None:
        assert request.ending is not None
        self._counters.finished += 1
        reason = request.ending if request.guide is None else ended(request, request.ending)
        self._close(request, reason, keep=True)

    def _fail(self, request: Request, fault: RuntimeFault, *, keep: bool = True) -> None:
        """At once, or at the commit if a row of it is under way."""
        if self._under_way is not None and request in self._under_way.requests:
            self._doomed.setdefault(request.seq, fault)
        else:
            super()._fail(request, fault, keep=keep)

    def _close(self, request: Request, reason: FinishReason, *, keep: bool) -> None:
        self._stage.closing(request, reason)
        self._batch.remove(request, keep=keep)
        self._waiting.forget(request)
        if request.guided:
            self._guided_live -= 1
            self.guided.remove(request)
        self._stage.finished(request, self._clock())
        if self._speculation is not None:
            self._speculation.ended(request)
        if request.cached >= 0:
            self._released.append(request.seq)
        del self._live[request.rid]
        self._outbox.add(request, reason)
