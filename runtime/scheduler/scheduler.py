"""Scheduler: from requests to plans and from results to news, by continuous batching over a prefix cache.

    add() ... plan() -> [runner.launch] -> masks() -> [runner.finish] -> commit() -> add() ...

It works on ints: it knows no tensors, no text and no processes. One thread calls it. Each request is
answered exactly once with a finish reason, whatever happens to it.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from typing import Any

from runtime.cache.manager import CacheManager
from runtime.config.scheduler import SchedulerConfig
from runtime.plan import Row, RowResult, StepPlan, StepResult, TokenMask
from runtime.protocol.errors import (
    Aborted,
    BadConstraint,
    BadRequest,
    DeadlineExceeded,
    InternalFault,
    PromptTooLong,
    QueueFull,
    RuntimeFault,
)
from runtime.protocol.io_struct import FinishReason, TokenizedGenerateReqInput, TokenOutput
from runtime.protocol.vocabulary import Vocabulary
from runtime.scheduler.admission import NewTokenRatio, PrefillAdder, Verdict, grow
from runtime.scheduler.batching import Batcher
from runtime.scheduler.masks import full, is_empty, mask_of
from runtime.scheduler.policies import POLICIES
from runtime.scheduler.progress import Encode, Progress
from runtime.scheduler.queues import GrammarQueue, Grammars, WaitingQueue
from runtime.scheduler.request import Request, failure

MAX_TAIL_AHEAD = 256  # slots reserved ahead of a growing tail, at most
RETRY_TICKS = (
    8  # after a refusal for lack of slots, admission is tried again this often even if nothing changed
)


class Scheduler:
    """`slots`: size of the KV pool. `encode`: text -> ids without special tokens, for jump-forward.
    `grammar`: compiles constraints; None refuses them. `clock`: seconds, the one deadlines are given in."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        slots: int,
        vocabulary: Vocabulary,
        encode: Encode,
        grammar: Grammars | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.manager = CacheManager(slots, config.page_size, radix=config.radix_cache)
        self._vocabulary = vocabulary
        self._clock = clock
        self._progress = Progress(vocabulary, encode, jump_forward=config.jump_forward)
        self._batcher = Batcher(self.manager, config.chunked_prefill_size)
        self._ratio = NewTokenRatio(config.conservativeness)
        self._everything = full(len(vocabulary))
        self._live: dict[str, Request] = {}
        self._grammar = GrammarQueue(grammar)
        self._waiting = WaitingQueue(POLICIES.load(config.policy))
        self._running: list[Request] = []
        self._under_way: list[tuple[Request, Row]] | None = None  # the plan given and not committed
        self._doomed: dict[int, RuntimeFault] = {}  # rows of that plan to fail at its commit, by seq
        self._outbox: list[TokenOutput] = []
        self._released: list[int] = []
        self._deadlines: list[tuple[float, int, str]] = []  # (deadline, seq, rid), a heap
        self._tick = self._arrivals = 0
        self._blocked_until = 0  # admission waits for this tick, or for slots to come free
        self._counters = dict.fromkeys(
            ("steps", "computed", "cached", "generated", "jumped", "retractions", "finished", "failed"), 0
        )

    # -- requests come and go --------------------------------------------------------------------------------

    def add(self, req: TokenizedGenerateReqInput) -> None:
        """Take a request in. One that can never run is answered at once (see drain)."""
        self._arrivals += 1
        now = self._clock()
        try:
            self._verify(req)
        except RuntimeFault as fault:
            self._outbox.append(
                TokenOutput(
                    rid=req.rid,
                    new_ids=[],
                    finish=failure(fault),
                    prompt_tokens=len(req.input_ids),
                    http_worker_ipc=req.http_worker_ipc,
                )
            )
            self._counters["failed"] += 1
            return
        request = Request(req, self._arrivals, self._vocabulary, now, self._tick)
        self._live[request.rid] = request
        if req.deadline is not None:
            heapq.heappush(self._deadlines, (req.deadline, request.seq, request.rid))
        if req.constraint is None:
            self._enqueue(request)
        else:
            self._grammar.add(request, req.constraint)
            self._poll_grammars()

    def abort(self, rid: str | None) -> None:
        """Cancel the request `rid`, or all of them; an unknown one is finished already. What it held is
        freed at once, or at the commit of the step it is part of."""
        for request in list(self._live.values()) if rid is None else [self._live.get(rid)]:
            if request is not None:
                self._fail(request, Aborted("the request was cancelled", where=request.rid))

    def drain(self) -> list[TokenOutput]:
        """Outputs made outside a step: rejected, aborted, timed out, ended without a step. Each comes
        once."""
        outputs, self._outbox = self._outbox, []
        return outputs

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished, or any output not fetched."""
        return bool(self._live or self._outbox)

    def flush_cache(self) -> bool:
        """Drop every prefix that no running request reads; True when nothing is left."""
        return self.manager.flush()

    def state(self) -> dict[str, Any]:
        """Counters since the start, and what is held now (slots, requests)."""
        cache = self.manager.cache
        return {
            "waiting": len(self._waiting),
            "compiling": len(self._grammar),
            "running": len(self._running),
            "slots": self.manager.slots,
            "free": self.manager.allocator.free,
            "evictable": cache.evictable,
            "protected": cache.protected,
            "new_token_ratio": self._ratio.value,
            **self._counters,
            "generated": self._counters["generated"] + sum(one.produced for one in self._live.values()),
            "jumped": self._counters["jumped"] + sum(one.jumped for one in self._live.values()),
        }

    def check(self) -> None:
        """Raise InternalFault, with the numbers, unless every slot is accounted for."""
        leases = [request.lease for request in self._running if request.lease is not None]
        if len(leases) != len(self._running):
            raise InternalFault("a running request holds no lease", where="scheduler")
        self.manager.check(leases)

    # -- the step --------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """Decide the next step; None when nothing can run now. A plan must be committed (or failed) before
        the next."""
        if self._under_way is not None:
            raise InternalFault("plan() before the last plan was committed", where="scheduler")
        self._tick += 1
        self._expire()
        self._poll_grammars()
        if self._make_room():
            self._admit()
        if not self._running:
            return None
        released, self._released = tuple(self._released), []
        plan, requests = self._batcher.build(self._running, released)
        self._under_way = list(zip(requests, plan.rows, strict=True))
        return plan

    def masks(self) -> dict[int, TokenMask]:
        """Masks for the rows of the plan just given, by row index; a row without one may sample anything. A
        request whose grammar is at a dead end fails at the commit, alone."""
        masks: dict[int, TokenMask] = {}
        for index, (request, row) in enumerate(self._under_way or ()):
            if not row.sample or (request.matcher is None and not request.rule.min_new_tokens):
                continue
            try:
                mask = mask_of(request, self._everything)
            except Exception as error:  # noqa: BLE001
                self._doomed[request.seq] = _defect("the grammar failed", error)
                continue
            if mask is None:
                continue
            if is_empty(mask):
                self._doomed[request.seq] = BadConstraint(
                    f"no token of the vocabulary can follow after {request.produced} generated ones",
                    where=request.source.constraint.kind if request.source.constraint else "constraint",
                    hint="the constraint leads to a dead end for this tokenizer",
                )
                continue
            masks[index] = mask
        return masks

    def commit(self, result: StepResult) -> list[TokenOutput]:
        """Take the results of the plan's rows; what is new of their requests, and everything drain() would
        give."""
        under_way, self._under_way = self._under_way or [], None
        if len(result.rows) != len(under_way):
            self._under_way = under_way
            return self.fail(ValueError(f"{len(result.rows)} results for {len(under_way)} rows"))
        now = self._clock()
        self._counters["steps"] += 1
        self._counters["computed"] += sum([len(row.tokens) for _, row in under_way])
        self._ratio.decay()
        for (request, row), row_result in zip(under_way, result.rows, strict=True):
            fault = self._doomed.pop(request.seq, None) if self._doomed else None
            try:
                if fault is None:
                    self._commit_row(request, row, row_result, now)
            except RuntimeFault as raised:
                fault = raised
            except Exception as error:  # noqa: BLE001
                fault = _defect("the step's result could not be used", error)
            if fault is not None:
                self._fail(
                    request, fault, keep=row_result.error is None and not isinstance(fault, InternalFault)
                )
        return self.drain()

    def fail(self, error: BaseException) -> list[TokenOutput]:
        """The plan under way came to nothing: its requests fail, naming the cause; everybody else goes on."""
        under_way, self._under_way = self._under_way or [], None
        for request, _ in under_way:
            fault = self._doomed.pop(request.seq, None)
            self._fail(request, fault or _defect("the model step failed", error), keep=False)
        self._doomed.clear()
        return self.drain()

    def _commit_row(self, request: Request, row: Row, result: RowResult, now: float) -> None:
        if result.error is not None:
            raise InternalFault(f"the model step failed: {result.error}", where=f"position {row.position}")
        if len(result.scores) != len(row.scores) or (row.sample and result.token is None):
            raise InternalFault(
                "the step's result lacks what its row asked for", where=f"position {row.position}"
            )
        lease = request.lease
        assert lease is not None
        lease.settle()
        request.computed += len(row.tokens)
        if row.scores:
            request.score(result.scores)
        if row.position < request.publish_to:
            self.manager.publish(lease, request.tokens, request.settled)
        if row.sample and result.token is not None:
            if request.first_at < 0:
                request.first_at = now
            reason = self._progress.accept(request, result.token, result.logprob, result.top)
            if reason is not None:
                request.end(reason)
        if request.ending is not None and request.ready:
            self._finish(request, now)
        elif request.stream and (news := request.news(now)) is not None:
            self._outbox.append(news)

    # -- waiting ---------------------------------------------------------------------------------------------

    def _verify(self, req: TokenizedGenerateReqInput) -> None:
        """Raise what makes the request impossible, whatever else runs."""
        if req.rid in self._live:
            raise BadRequest("a request with this id is live already", where="rid", hint="use a new id")
        if not req.input_ids:
            raise BadRequest("the prompt has no tokens", where="input_ids")
        req.sampling_params.verify()
        size = len(self._vocabulary)
        if not (min(req.input_ids) >= 0 and max(req.input_ids) < size):
            raise BadRequest(f"ids must be in [0, {size})", where="input_ids")
        prompt, new = len(req.input_ids), req.sampling_params.max_new_tokens
        if not -1 <= req.logprob_start_len <= prompt:
            raise BadRequest(
                f"must be -1 (none) or in the prompt of {prompt} tokens, got {req.logprob_start_len}",
                where="logprob_start_len",
            )
        if req.top_logprobs_num < 0:
            raise BadRequest(f"must be at least 0, got {req.top_logprobs_num}", where="top_logprobs_num")
        for limit, what in (
            (self.config.context_length, "the context length"),
            (self.manager.slots, "the KV pool"),
        ):
            if limit is not None and prompt + new > limit:
                raise PromptTooLong(
                    f"{prompt} prompt tokens + max_new_tokens {new} = {prompt + new},"
                    f" but {what} is {limit} tokens",
                    where="input_ids",
                    hint="shorten the prompt or lower max_new_tokens",
                )
        if len(self._waiting) + len(self._grammar) >= self.config.max_waiting_requests:
            raise QueueFull(
                f"the request queue is full ({self.config.max_waiting_requests} waiting)",
                hint="try again later",
            )

    def _enqueue(self, request: Request) -> None:
        """The request could run now."""
        request.added_tick = self._tick
        self._waiting.add(request)
        self._blocked_until = 0

    def _poll_grammars(self) -> None:
        for request, outcome in self._grammar.ready():
            if isinstance(outcome, RuntimeFault):
                self._fail(request, outcome)
                continue
            request.matcher = outcome
            try:
                reason = self._progress.begin(request)
            except Exception as error:  # noqa: BLE001
                self._fail(request, _defect("the grammar failed", error))
                continue
            if reason is not None:
                request.end(reason)
            if request.ready:
                self._finish(request, self._clock())
            else:
                self._enqueue(request)

    def _expire(self) -> None:
        if not self._deadlines or self._deadlines[0][0] > (now := self._clock()):
            return
        while self._deadlines and self._deadlines[0][0] <= now:
            _, seq, rid = heapq.heappop(self._deadlines)
            request = self._live.get(rid)
            if request is not None and request.seq == seq:
                waited = now - request.added_at
                self._fail(
                    request,
                    DeadlineExceeded(
                        f"not finished {waited:.1f} s after it came ({request.produced} tokens generated)",
                        where=request.rid,
                        hint="allow more time, or ask for fewer tokens",
                    ),
                )

    # -- slots -----------------------------------------------------------------------------------------------

    def _make_room(self) -> bool:
        """Slots for the next token of every running request. False when some had to be retracted for that:
        then nobody new is let in."""
        retracted = False
        for request in list(self._running):
            lease = request.lease
            if lease is None or lease.capacity >= request.until:
                continue  # retracted just now, or it has slots
            ahead = min(MAX_TAIL_AHEAD, max(16, request.produced))
            while not grow(self.manager, request, ahead, self._running):
                if len(self._running) == 1:
                    self._fail(
                        request,
                        InternalFault(
                            f"out of KV slots at {request.computed} tokens with nothing left to retract "
                            f"(pool of {self.manager.slots})",
                            where=request.rid,
                            hint="a larger max_total_tokens is needed",
                        ),
                    )
                    break
                victim = min(
                    self._running, key=lambda other: (other.produced, -other.prompt_len, -other.arrival)
                )
                self._retract(victim)
                retracted = True
                if victim is request:
                    break
        if retracted:
            self._ratio.retracted(self._running)
        return not retracted

    def _retract(self, request: Request) -> None:
        """Back to the front of the queue; its output stays, what it computed stays in the cache while there
        is room."""
        assert request.lease is not None
        self.manager.close(request.lease, request.tokens, request.computed)
        request.lease = None
        request.computed = 0
        request.retractions += 1
        self._counters["retractions"] += 1
        self._running.remove(request)
        self._waiting.put_back(request)

    def _admit(self) -> None:
        room = self.config.max_running_requests - len(self._running)
        if room <= 0 or not self._waiting or (self._running and self._tick < self._blocked_until):
            return
        adder = PrefillAdder(self.manager, self._running, self._ratio.value, self.config.max_prefill_tokens)
        now = self._clock()
        deferred = admitted = False
        for request in self._waiting.order(self.manager.cache, self._tick):
            if room <= 0:
                break
            verdict = adder.add(request)
            if verdict is Verdict.FULL:
                if (
                    not self._running
                ):  # it fits alone, _verify saw to that: a defect, but nobody shall wait for ever
                    self._fail(
                        request,
                        InternalFault("a request that fits the pool found no slots", where=request.rid),
                    )
                    continue
                if not deferred and not admitted:
                    self._blocked_until = self._tick + RETRY_TICKS
                break
            if verdict is Verdict.LATER:
                deferred = True
                continue
            room -= 1
            admitted = True  # counted in full in this tick, as expected from the next on
            self._waiting.remove(request)
            self._running.append(request)
            if request.cached < 0:
                request.cached = min(request.computed, request.prompt_len)
                request.admitted_at = now
                self._counters["cached"] += request.cached

    # -- the end ---------------------------------------------------------------------------------------------

    def _finish(self, request: Request, now: float) -> None:
        assert request.ending is not None
        self._counters["finished"] += 1
        self._close(request, request.ending, now, keep=True)

    def _fail(self, request: Request, fault: RuntimeFault, *, keep: bool = True) -> None:
        """Answer with an error and free everything; for a row under way, at its commit. `keep`: what was
        computed is sound and may stay in the cache."""
        if self._under_way is not None and any(request is other for other, _ in self._under_way):
            self._doomed.setdefault(request.seq, fault)
            return
        self._counters["failed"] += 1
        self._close(request, failure(fault), self._clock(), keep=keep)

    def _close(self, request: Request, reason: FinishReason, now: float, *, keep: bool) -> None:
        if request.lease is not None:
            self.manager.close(request.lease, request.tokens, request.computed if keep else 0)
            request.lease = None
            self._running.remove(request)
            self._blocked_until = 0
        self._waiting.remove(request)
        self._grammar.remove(request)
        if request.cached >= 0:
            self._released.append(request.seq)
        self._counters["generated"] += request.produced
        self._counters["jumped"] += request.jumped
        del self._live[request.rid]
        news = request.news(now, reason)
        assert news is not None
        self._outbox.append(news)


def _defect(what: str, error: BaseException) -> InternalFault:
    return InternalFault(f"{what}: {type(error).__name__}: {error}", hint="the engine goes on; see its log")
