"""EmbeddingScheduler: whole texts for an encoder, batched by length. The encoder's counterpart of Scheduler.

Ints only. A text is computed once, in one step, so there is no cache, and nothing can be taken back: a
request waits or is answered. One thread calls it; each request is answered exactly once.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from runtime.config.scheduler import SchedulerConfig
from runtime.plan import Text, TextResult, TextRunner
from runtime.protocol.control import PauseMode
from runtime.protocol.errors import (
    Aborted,
    BadRequest,
    DeadlineExceeded,
    InternalFault,
    PromptTooLong,
    QueueFull,
    RuntimeFault,
)
from runtime.protocol.io_struct import (
    FinishReason,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
    TokenOutput,
)
from runtime.scheduler.flows import Flows
from runtime.scheduler.report import Counters, totals
from runtime.scheduler.requests.request import failure

TUNABLE = ("max_prefill_tokens", "max_running_requests", "max_waiting_requests")
ONLY_VECTORS = "this model gives embeddings only"
log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class TextLimits:
    """What the model can take. positions: tokens of one text. kinds: token types it tells apart. width:
    numbers in an answer. scores: answers are a classifier's."""

    vocab_size: int
    positions: int
    kinds: int
    width: int
    scores: bool


class _Item:
    """A request that waits. Times are seconds of the scheduler's clock."""

    __slots__ = ("added_at", "queue_until", "source", "text", "until")

    def __init__(
        self, source: TokenizedEmbeddingReqInput, text: Text, now: float, queue_s: float | None
    ) -> None:
        self.source, self.text, self.added_at = source, text, now
        self.queue_until = None if queue_s is None else now + queue_s
        self.until = None if source.time_left_s is None else now + source.time_left_s

    @property
    def flow(self) -> str | None:
        return self.source.flow

    @property
    def priority(self) -> int:
        return self.source.priority

    @property
    def cost(self) -> int:
        return self.size

    @property
    def size(self) -> int:
        return len(self.text.tokens)


class EmbeddingScheduler:
    """`clock`: seconds. Of the config it reads max_running_requests (texts in
    one step), max_prefill_tokens (tokens in one step, padding counted; a longer text goes alone),
    max_waiting_requests, queue_timeout_s and, with the policy `priority`, who goes first."""

    def __init__(
        self, config: SchedulerConfig, limits: TextLimits, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.config, self._limits, self._clock = config, limits, clock
        self._waiting: dict[str, _Item] = {}
        self._flows = Flows()
        self._answers: list[TokenOutput] = []
        self._counters = Counters()
        self._paused: PauseMode | None = None
        self._paused_at = 0.0

    # -- requests come and go --------------------------------------------------------------------------------

    def embed(self, req: TokenizedEmbeddingReqInput) -> None:
        """Take a request in; one that can never run is answered at once (see drain)."""
        self._counters.requests += 1
        now = self._clock()
        try:
            text = self._accept(req)
        except RuntimeFault as fault:
            self._counters.failed += 1
            self._answers.append(_failed(req, fault))
            return
        self._waiting[req.rid] = _Item(req, text, now, self.config.queue_timeout_s)
        self._flows.came(req.flow)

    def add(self, req: TokenizedGenerateReqInput) -> None:
        """Refuse it: nothing is generated here."""
        _refuse("generation")

    def abort(self, rid: str | None, *, prefix: bool = False, message: str | None = None) -> int:
        """Cancel the waiting request `rid`, those whose ids begin with it, or all (None); how many that
        are."""
        found = [
            item
            for own, item in self._waiting.items()
            if rid is None or (bool(rid) and own.startswith(rid) if prefix else own == rid)
        ]
        for item in found:
            self._counters.aborted += 1
            self._fail(item, Aborted(message or "the request was cancelled", where=item.source.rid))
        return len(found)

    def drain(self) -> list[TokenOutput]:
        """What there is to tell, each thing once. A vector stands in hidden_states."""
        answers, self._answers = self._answers, []
        return answers

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._answers)

    @property
    def waits_elsewhere(self) -> bool:
        return False

    @property
    def running(self) -> int:
        """Requests that a step could take up now."""
        return 0 if self._paused else len(self._waiting)

    @property
    def paused(self) -> PauseMode | None:
        return self._paused

    # -- the step --------------------------------------------------------------------------------------------

    def step(self, runner: TextRunner) -> list[TokenOutput]:
        """Compute one batch; the news. What the runner raises is the answer to the batch's requests."""
        batch = self.plan()
        if not batch:
            return self.drain()
        begun = self._clock()
        try:
            results = runner.encode([item.text for item in batch])
            if len(results) != len(batch):
                raise InternalFault(f"{len(results)} results for {len(batch)} texts", where="runner")
        except Exception as error:
            log.exception("a batch of texts failed")
            self._fail_batch(batch, error)
            return self.drain()
        self._counters.steps += 1
        for item, result in zip(batch, results, strict=True):
            self._finish(item, result, begun)
        return self.drain()

    def plan(self) -> list[_Item]:
        """The next batch: the first in line, by flows and arrival, and the waiting texts nearest to its
        length that fit the budget of tokens, so that little of it is padding. Who is in it waits no more."""
        self._expire()
        if self._paused is not None or not self._waiting:
            return []
        order, by_priority = list(self._waiting.values()), self.config.policy == "priority"
        if by_priority:
            order.sort(key=lambda item: -item.priority)
        order = self._flows.in_turn(order, by_priority=by_priority)
        first = order[0]
        # Equally near ones in that order.
        near = sorted(order[1:], key=lambda item: abs(item.size - first.size))
        batch, longest = [first], first.size
        for item in near:
            if len(batch) >= self.config.max_running_requests:
                break
            longest = max(longest, item.size)
            if longest * (len(batch) + 1) > self.config.max_prefill_tokens:
                break
            batch.append(item)
        for item in batch:
            self._flows.spend(item.flow, item.size)
            self._leave(item)
        return batch

    def give_up(self, fault: RuntimeFault) -> list[TokenOutput]:
        """Every request ends with `fault`."""
        for item in list(self._waiting.values()):
            self._fail(item, fault)
        return self.drain()

    # -- control ---------------------------------------------------------------------------------------------

    def pause(self, mode: PauseMode) -> None:
        """Give no more batches until resume(). "abort" cancels who waits; otherwise they go on waiting, and
        the clock of queue_timeout_s stands still."""
        if self._paused is None:
            self._paused_at = self._clock()
        self._paused = mode
        if mode == "abort":
            self.abort(None, message="generation was paused")

    def resume(self) -> None:
        if self._paused is None:
            return
        self._paused = None
        now = self._clock()
        for item in self._waiting.values():
            if item.queue_until is not None:
                item.queue_until += now - max(self._paused_at, item.added_at)

    def flush_cache(self) -> bool:
        """There is none."""
        return True

    def open_session(
        self,
        session_id: str | None = None,
        capacity: int = 0,
        timeout_s: float | None = None,
        *,
        streaming: bool = False,
        owner: str = "",
    ) -> str:
        _refuse("sessions")

    def close_session(self, session_id: str, owner: str = "") -> None:
        _refuse("sessions")

    def tune(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Change settings of TUNABLE; their values now. Raises BadRequest, and changes nothing."""
        for name, value in values.items():
            if name not in TUNABLE:
                raise BadRequest(
                    f"cannot be changed at run time; these can: {', '.join(TUNABLE)}", where=name
                )
            if type(value) is not int:
                raise BadRequest(f"must be an integer, got {value!r}", where=name)
        self.config = dataclasses.replace(self.config, **values)
        return {name: getattr(self.config, name) for name in TUNABLE}

    def state(self) -> dict[str, Any]:
        """The same words as Scheduler.state(), those about slots and grammars aside."""
        waiting = len(self._waiting)
        return {
            "waiting": waiting,
            "running": 0,
            "num_running_reqs": 0,
            "num_queue_reqs": waiting,
            "num_paused_reqs": waiting if self._paused else 0,
            "paused": self._paused,
            "policy": self.config.policy,
            **totals(self._counters, 0, 0),
        }

    # -- within ----------------------------------------------------------------------------------------------

    def _accept(self, req: TokenizedEmbeddingReqInput) -> Text:
        """The text to compute. Raises what makes the request impossible, and QueueFull."""
        limits, ids = self._limits, req.input_ids
        if req.rid in self._waiting:
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
        if req.dimensions is not None and not 1 <= req.dimensions <= limits.width:
            raise BadRequest(
                f"must be from 1 to {limits.width}, the vector's size, got {req.dimensions}",
                where="dimensions",
            )
        if len(self._waiting) >= self.config.max_waiting_requests:
            raise QueueFull(
                "The request queue is full.",
                where=f"max_waiting_requests = {self.config.max_waiting_requests}",
                hint="try again later",
            )
        return Text(tuple(ids), self._kinds(req))

    def _kinds(self, req: TokenizedEmbeddingReqInput) -> tuple[int, ...]:
        """Token types, where the model reads them."""
        kinds, limits = req.token_type_ids, self._limits
        if kinds is None or limits.kinds < 2:
            return ()
        if len(kinds) != len(req.input_ids) or min(kinds) < 0 or max(kinds) >= limits.kinds:
            raise BadRequest(
                f"must be one of 0 to {limits.kinds - 1} for each of the {len(req.input_ids)} ids",
                where="token_type_ids",
            )
        return tuple(kinds)

    def _expire(self) -> None:
        """Answer those whose time is over."""
        now = self._clock()
        for item in list(self._waiting.values()):
            own = item.until is not None and item.until <= now
            queued = self._paused is None and item.queue_until is not None and item.queue_until <= now
            if own or queued:
                what = (
                    "not finished in the time it was given"
                    if own
                    else f"not let in within {self.config.queue_timeout_s} s"
                )
                self._counters.timed_out += 1
                self._fail(
                    item,
                    DeadlineExceeded(
                        f"{what}: {now - item.added_at:.1f} s after it came",
                        where=item.source.rid,
                        hint="try again later",
                    ),
                )

    def _finish(self, item: _Item, result: TextResult, begun: float) -> None:
        self._counters.computed += item.size
        self._counters.prompt_tokens += item.size
        if result.error is not None:
            self._counters.failed += 1
            self._answers.append(_failed(item.source, InternalFault(result.error, where="runner")))
            return
        self._counters.finished += 1
        self._answers.append(
            TokenOutput(
                rid=item.source.rid,
                new_ids=[],
                finish=FinishReason(type="length"),
                prompt_tokens=item.size,
                hidden_states=[list(result.vector)],
                queue_s=max(0.0, begun - item.added_at),
                http_worker_ipc=item.source.http_worker_ipc,
            )
        )

    def _leave(self, item: _Item) -> None:
        """It waits no more."""
        if self._waiting.pop(item.source.rid, None) is not None:
            self._flows.left(item.flow)

    def _fail(self, item: _Item, fault: RuntimeFault) -> None:
        self._leave(item)
        self._counters.failed += 1
        self._answers.append(_failed(item.source, fault))

    def _fail_batch(self, batch: Sequence[_Item], error: Exception) -> None:
        fault = error if isinstance(error, RuntimeFault) else None
        for item in batch:
            made = fault or InternalFault(
                f"the model step failed: {type(error).__name__}: {error}",
                hint="the engine goes on; see its log",
            )
            self._fail(item, made)


class EmbeddingLoop:
    """The loop around it: one batch per tick, computed before the tick ends."""

    in_flight = False

    def __init__(self, scheduler: EmbeddingScheduler, runner: TextRunner) -> None:
        self._scheduler, self._runner = scheduler, runner

    def step(self) -> list[TokenOutput]:
        return self._scheduler.step(self._runner)

    def stop(self, fault: RuntimeFault) -> list[TokenOutput]:
        return self._scheduler.give_up(fault)


def _failed(req: TokenizedEmbeddingReqInput, fault: RuntimeFault) -> TokenOutput:
    return TokenOutput(
        rid=req.rid,
        new_ids=[],
        finish=failure(fault),
        prompt_tokens=len(req.input_ids),
        http_worker_ipc=req.http_worker_ipc,
    )


def _refuse(what: str) -> NoReturn:
    raise BadRequest(f"{ONLY_VECTORS}: there is no {what}", where="model", hint="use /v1/embeddings")
