"""EmbeddingScheduler: whole texts for an encoder, batched by length. The encoder's counterpart of Scheduler.

Ints only. A text is computed once, in one step, so there is no cache: a request waits or is answered. One
thread calls it; each request is answered exactly once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from runtime.config.scheduler import SchedulerConfig
from runtime.plan import Text, TextResult, TextRunner
from runtime.protocol.errors import BadRequest, InternalFault, PromptTooLong, QueueFull, RuntimeFault
from runtime.protocol.io_struct import (
    FinishReason,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
    TokenOutput,
)
from runtime.scheduler.queues import Flows
from runtime.scheduler.requests.request import LiveRequest, Timing, defect, failure
from runtime.scheduler.scheduler_base import SchedulerBase

ONLY_VECTORS = "this model gives embeddings only"
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TextLimits:
    """Limits of the model. positions: tokens of one text. kinds: token types. width: numbers in an answer.
    scores: answers are a classifier's."""

    vocab_size: int
    positions: int
    kinds: int
    width: int
    scores: bool


class TextRequest(LiveRequest[TokenizedEmbeddingReqInput]):
    """A text that waits. cost: its tokens."""

    __slots__ = ("cost", "flow", "priority", "text")

    def __init__(self, source: TokenizedEmbeddingReqInput, text: Text, seq: int, now: float) -> None:
        super().__init__(source, seq, Timing(now, 0))
        self.text, self.cost = text, len(text.tokens)
        self.flow, self.priority = source.flow, source.priority


class EmbeddingScheduler(SchedulerBase[TextRequest]):
    """Of the config it reads max_running_requests (texts in one step), max_prefill_tokens (tokens in one
    step, padding counted; a longer text goes alone), max_waiting_requests, queue_timeout_s and, with the
    policy `priority`, who goes first."""

    tunable = ("max_prefill_tokens", "max_running_requests", "max_waiting_requests")

    def __init__(
        self, config: SchedulerConfig, limits: TextLimits, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(config, clock)
        self._limits, self._flows, self._arrivals = limits, Flows(), 0

    # -- requests --------------------------------------------------------------------------------------------

    def embed(self, req: TokenizedEmbeddingReqInput) -> None:
        """Accept a request. One that can never run is answered at once (see drain)."""
        self._arrivals += 1
        self._counters.requests += 1
        now = self._clock()
        try:
            text = self._accept(req)
        except RuntimeFault as fault:
            self._counters.failed += 1
            self._outbox.refuse(req, failure(fault))
            return
        request = TextRequest(req, text, self._arrivals, now)
        self._live[req.rid] = request
        self._deadlines.came(request, now)
        self._flows.came(req.flow)

    def add(self, req: TokenizedGenerateReqInput) -> None:
        """Refuse it: nothing is generated here."""
        _refuse("generation")

    @property
    def waits_elsewhere(self) -> bool:
        return False

    @property
    def running(self) -> int:
        """Requests that a step could compute now."""
        return 0 if self.paused else len(self._live)

    # -- the step --------------------------------------------------------------------------------------------

    def step(self, runner: TextRunner) -> list[TokenOutput]:
        """Compute one batch and return all outputs, hidden_states being the vector. An exception of the
        runner is the answer to the requests of the batch."""
        if batch := self.plan():
            self._compute(batch, runner)
        return self.drain()

    def plan(self) -> list[TextRequest]:
        """The next batch: the first text, by flows and arrival, and the waiting texts closest to its length
        that fit the budget of tokens, so that there is little padding."""
        for late, fault in self._deadlines.due(self._clock(), self._live):
            self._fail(late, fault)
        if self.paused is not None or not self._live:
            return []
        order, by_priority = list(self._live.values()), self.config.policy == "priority"
        if by_priority:
            order.sort(key=lambda request: -request.priority)
        first, *others = self._flows.in_turn(order, by_priority=by_priority)
        batch, longest = [first], first.cost
        for request in sorted(others, key=lambda one: abs(one.cost - first.cost)):  # stable
            longest = max(longest, request.cost)
            full = len(batch) >= self.config.max_running_requests
            if full or longest * (len(batch) + 1) > self.config.max_prefill_tokens:
                break
            batch.append(request)
        for request in batch:
            self._flows.spend(request.flow, request.cost)
        return batch

    def _compute(self, batch: Sequence[TextRequest], runner: TextRunner) -> None:
        begun = self._clock()
        try:
            results = runner.encode([request.text for request in batch])
            if len(results) != len(batch):
                raise InternalFault(f"{len(results)} results for {len(batch)} texts", where="runner")
        except Exception as error:
            log.exception("a batch of texts failed")
            fault = error if isinstance(error, RuntimeFault) else defect("the model step failed", error)
            for request in batch:
                self._fail(request, fault)
            return
        self._counters.steps += 1
        for request, result in zip(batch, results, strict=True):
            self._counters.computed += request.cost
            self._counters.prompt_tokens += request.cost
            if result.error is None:
                self._finish(request, result, begun)
            else:
                self._fail(request, InternalFault(result.error, where="runner"))

    def _finish(self, request: TextRequest, result: TextResult, begun: float) -> None:
        self._counters.finished += 1
        self._leave(request)
        self._outbox.answer(
            TokenOutput(
                rid=request.rid,
                new_ids=[],
                finish=FinishReason(type="length"),
                prompt_tokens=request.cost,
                hidden_states=[list(result.vector)],
                queue_s=max(0.0, begun - request.timing.added_at),
                http_worker_ipc=request.source.http_worker_ipc,
            )
        )

    def _close(self, request: TextRequest, reason: FinishReason, *, keep: bool) -> None:
        self._leave(request)
        self._outbox.refuse(request.source, reason)

    def _leave(self, request: TextRequest) -> None:
        del self._live[request.rid]
        self._flows.left(request.flow)

    # -- control ---------------------------------------------------------------------------------------------

    def flush_cache(self) -> bool:
        """There is none."""
        return True

    def open_session(self, *values: Any, **options: Any) -> str:
        _refuse("sessions")

    def close_session(self, *values: Any) -> None:
        _refuse("sessions")

    def state(self) -> dict[str, Any]:
        """The keys of Scheduler.state(), those about slots and grammars aside."""
        waiting = len(self._live)
        return {
            "waiting": waiting,
            "running": 0,
            "num_running_reqs": 0,
            "num_queue_reqs": waiting,
            "num_paused_reqs": waiting if self.paused else 0,
            "paused": self.paused,
            "policy": self.config.policy,
            **self._counters.state(),
        }

    # -- checks ----------------------------------------------------------------------------------------------

    def _accept(self, req: TokenizedEmbeddingReqInput) -> Text:
        """The text to compute. Raises BadRequest if it can never run, and QueueFull."""
        limits, ids = self._limits, req.input_ids
        if req.rid in self._live:
            raise BadRequest("a request with this id is already running", where="rid", hint="use a new id")
        if not ids:
            raise BadRequest("the text has no tokens", where="input_ids")
        if min(ids) < 0 or max(ids) >= limits.vocab_size:
            raise BadRequest(f"ids must be in [0, {limits.vocab_size})", where="input_ids")
        most = min(limits.positions, self.config.context_length or limits.positions)
        if len(ids) > most:
            raise PromptTooLong(
                f"the text has {len(ids)} tokens; the model has {limits.positions} positions, and {most} may "
                "be used",
                where="input_ids",
                hint="shorten it",
            )
        if req.cross_encoder and not limits.scores:
            raise BadRequest(
                "this checkpoint has no classifier to score pairs with", where="is_cross_encoder_request"
            )
        if req.dimensions is not None and limits.scores:
            raise BadRequest("the answers of this model are scores, not vectors", where="dimensions")
        if req.dimensions is not None:
            check_dimensions(req.dimensions, limits.width)
        if len(self._live) >= self.config.max_waiting_requests:
            raise QueueFull(
                "The request queue is full.",
                where=f"max_waiting_requests = {self.config.max_waiting_requests}",
                hint="try again later",
            )
        return Text(tuple(ids), self._kinds(req))

    def _kinds(self, req: TokenizedEmbeddingReqInput) -> tuple[int, ...]:
        """Token types, if the model has them."""
        kinds, limits = req.token_type_ids, self._limits
        if kinds is None or limits.kinds < 2:
            return ()
        if len(kinds) != len(req.input_ids) or min(kinds) < 0 or max(kinds) >= limits.kinds:
            raise BadRequest(
                f"must be one of 0 to {limits.kinds - 1} for each of the {len(req.input_ids)} ids",
                where="token_type_ids",
            )
        return tuple(kinds)


class EmbeddingLoop:
    """One batch per tick, computed before the tick ends."""

    in_flight = False

    def __init__(self, scheduler: EmbeddingScheduler, runner: TextRunner) -> None:
        self._scheduler, self._runner = scheduler, runner

    def step(self) -> list[TokenOutput]:
        return self._scheduler.step(self._runner)

    def stop(self, fault: RuntimeFault) -> list[TokenOutput]:
        return self._scheduler.give_up(fault)


def check_dimensions(dimensions: int, width: int) -> None:
    """Raise BadRequest for more numbers than a vector has."""
    if not 1 <= dimensions <= width:
        raise BadRequest(
            f"must be from 1 to {width}, the vector's size, got {dimensions}", where="dimensions"
        )


def _refuse(what: str) -> NoReturn:
    raise BadRequest(f"{ONLY_VECTORS}: there is no {what}", where="model", hint="use /v1/embeddings")
