"""Admission: the checks of a new request (RequestValidator), and which waiting requests start now, within
budgets of slots and prompt tokens (PrefillAdder). It takes leases for requests that start; it knows no plans.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from enum import Enum

import msgspec

from runtime.cache.manager import CacheManager
from runtime.cache.node import Match
from runtime.config.scheduler import SchedulerConfig
from runtime.protocol.errors import BadRequest, PromptTooLong, QueueFull, RuntimeFault
from runtime.protocol.io_struct import TokenizedGenerateReqInput
from runtime.protocol.sampling import SamplingParams
from runtime.scheduler.queues import WaitingQueue
from runtime.scheduler.requests.adapters import AdapterRegistry
from runtime.scheduler.requests.images import ImageRegistry
from runtime.scheduler.requests.request import Request
from runtime.scheduler.requests.stop import search_of
from runtime.scheduler.sessions import Sessions

CLIP = 4096  # new tokens counted for one request at most: longer ones seldom need all they may have
SHARED = 32  # uncached tokens shared with a request under way that make it worth waiting for
TAIL_AHEAD = 32  # slots reserved behind a prompt, so that the tail grows in one piece

Fail = Callable[[Request, RuntimeFault], None]


@dataclass(slots=True, eq=False)
class RequestValidator:
    """Checks a new request's id, session, numbers and adapter, and the queue's length. `live`: all requests;
    `compiling`: those that wait for their grammar. `cancel`: ends a turn that is replaced. `fail`: ends a
    request that is dropped from a full queue. `verify_params`: see Scheduler."""

    manager: CacheManager
    vocab_size: int
    live: Mapping[str, Request]
    waiting: WaitingQueue
    compiling: Sized
    sessions: Sessions
    adapters: AdapterRegistry
    images: ImageRegistry
    cancel: Callable[[str], object]
    fail: Fail
    verify_params: Callable[[SamplingParams], None] | None

    def accept(
        self, req: TokenizedGenerateReqInput, config: SchedulerConfig, now: float
    ) -> TokenizedGenerateReqInput:
        """The request with its whole prompt, its adapter's number and the cache key of that. Raises
        BadRequest if it can never run, ModelNotFound for an adapter that is not loaded, and QueueFull."""
        if req.rid in self.live:
            raise BadRequest("a request with this id is already running", where="rid", hint="use a new id")
        if req.lora_path is not None:
            number, key = self.adapters.key_of(req.lora_path, req.extra_key)
            req = msgspec.structs.replace(req, adapter=number, extra_key=key)
        if req.images:
            if req.session_params is not None:
                raise BadRequest(
                    "a session's turns are text, this one has pictures",
                    where="session_params",
                    hint="send the whole conversation instead: what it begins with is in the cache",
                )
            req = msgspec.structs.replace(req, images=self.images.numbered(req.images, len(req.input_ids)))
        dropped: list[str] = []
        whole = req
        if req.session_params is not None:
            self.sessions.expire(now)
            limit = min(self.manager.slots, config.context_length or self.manager.slots)
            whole, dropped = self.sessions.compose(req, self.live, now, limit)
        verify(whole, config, self.manager.slots, self.vocab_size)
        if self.verify_params is not None:
            self.verify_params(whole.sampling_params)
        if len(self.waiting) + len(self.compiling) >= config.max_waiting_requests:
            self._drop_one(whole, config)
        if req.session_params is not None:
            for rid in dropped:
                self.cancel(rid)
            self.sessions.begin(whole, len(req.input_ids))
        return whole

    def _drop_one(self, req: TokenizedGenerateReqInput, config: SchedulerConfig) -> None:
        """The queue is full. With the policy `priority` a request of lower priority is dropped; else one of
        the flow that fills it, if that is not the request's. Raises QueueFull if there is none."""
        full = QueueFull(
            "The request queue is full.",
            where=f"max_waiting_requests = {config.max_waiting_requests}",
            hint="try again later",
        )
        if config.policy == "priority":
            chosen = self.waiting.lowest()
            if chosen is not None and chosen.source.priority >= req.priority:
                chosen = None
        else:
            chosen = self.waiting.crowding(req.flow)
        if chosen is None:
            raise full
        self.fail(chosen, full)


def verify(req: TokenizedGenerateReqInput, config: SchedulerConfig, slots: int, vocab_size: int) -> None:
    """Raise BadRequest, naming the field, if the request can never run. `slots`: of the KV pool."""
    if not req.input_ids:
        raise BadRequest("the prompt has no tokens", where="input_ids")
    req.sampling_params.verify()
    for field, ids in (
        ("input_ids", req.input_ids),
        ("sampling_params.logit_bias", req.sampling_params.logit_bias),
        ("token_ids_logprob", req.token_ids_logprob),
    ):
        if ids and (min(ids) < 0 or max(ids) >= vocab_size):
            raise BadRequest(f"ids must be in [0, {vocab_size})", where=field)
    prompt, new = len(req.input_ids), req.sampling_params.max_new_tokens
    if not -1 <= req.logprob_start_len <= prompt:
        raise BadRequest(
            f"must be -1 (none) or in the prompt of {prompt} tokens, got {req.logprob_start_len}",
            where="logprob_start_len",
        )
    if req.top_logprobs_num < 0:
        raise BadRequest(f"must be at least 0, got {req.top_logprobs_num}", where="top_logprobs_num")
    if req.sampling_params.stop_regex:
        search_of(req.sampling_params.stop_regex)
    for limit, what in ((config.context_length, "the context length"), (slots, "the KV pool")):
        if limit is not None and prompt + new > limit:
            raise PromptTooLong(
                f"{prompt} prompt tokens + max_new_tokens {new} = {prompt + new},"
                f" but {what} is {limit} tokens",
                where="input_ids",
                hint="shorten the prompt or lower max_new_tokens",
            )


class Verdict(Enum):
    ADMITTED = "admitted"
    LATER = "later"  # a sibling is computing what it needs: try again, go on with the next
    FULL = "full"  # no budget left: no later request is tried


class NewTokenRatio:
    """The share of their remaining max_new_tokens that running requests are expected to need. Falls step by
    step, jumps up when requests had to be retracted."""

    START, FLOOR, STEPS = 0.7, 0.14, 600

    def __init__(self, conservativeness: float = 1.0) -> None:
        self._start = min(1.0, self.START * conservativeness)
        self._floor = min(1.0, self._start * self.FLOOR)
        self.value = self._start

    def decay(self) -> None:
        self.value = max(self._floor, self.value - (self._start - self._floor) / self.STEPS)

    def retracted(self, running: Iterable[Request]) -> None:
        """Set it to what the remaining requests have needed, with 20 steps more."""
        produced = allowed = 0
        for request in running:
            produced += request.produced + 20
            allowed += request.params.max_new_tokens
        self.value = min(1.0, max(self.value, produced / max(allowed, 1)))


def reclaim(manager: CacheManager, running: Iterable[Request]) -> int:
    """Take the slots reserved ahead back from `running`; returns how many that were."""
    return sum(manager.trim(request.lease, request.until) for request in running if request.lease)


def grow(manager: CacheManager, request: Request, ahead: int, running: Iterable[Request]) -> bool:
    """Slots for all of the request's tokens, and up to `ahead` more. Evicts, then takes back reserves;
    False, and no slots, when that is not enough."""
    lease = request.lease
    assert lease is not None
    need = request.until - lease.capacity
    if need <= 0:
        return True
    wish = need + max(0, min(ahead, request.most - request.until))
    return manager.grow(lease, need, wish) or (reclaim(manager, running) > 0 and manager.grow(lease, need))


def shrink(manager: CacheManager, request: Request, keep: int) -> None:
    """Keep only the KV of its first `keep` tokens. Not while a step of it is under way."""
    if keep < request.computed and request.lease is not None:
        request.computed = manager.cut(request.lease, request.tokens, request.computed, keep)
        request.publish_to = min(request.publish_to, request.computed)


class PrefillAdder:
    """The budgets of one tick; add() spends them.

    slots     available ones, less what running requests are expected to need (a single request is always
              admitted). A request that ignores end-of-text needs all it may generate; if the sum of these
              does not fit, the coming steps are simulated: a request that ends early frees slots in time.
    prompts   max_prefill_tokens, less prompt tokens admitted and not computed yet (a longer prompt goes
              alone)

    A request whose uncached part begins with SHARED tokens (a page, if that is longer) that another one is
    computing now waits for that one, and then gets them from the cache.
    """

    def __init__(
        self, manager: CacheManager, running: Sequence[Request], ratio: float, max_prefill_tokens: int
    ) -> None:
        self._manager = manager
        self._running = running
        self._ratio = ratio
        self._shared = max(SHARED, manager.page_size)
        self._computing: set[tuple[str | None, int, bytes]] = set()
        self._courses: list[tuple[float, int]] | None = None  # (tokens to come, slots it gives back)
        self.prompts = max_prefill_tokens
        estimated = exact = 0
        for request in running:
            if request.ending is None:
                left = request.to_come
                if request.params.ignore_eos:
                    exact += left
                else:
                    estimated += min(left, CLIP)
            if request.computed < request.publish_to:
                self.prompts -= request.until - request.computed
                self._note(request)
        self._expected = estimated * ratio + exact
        self._exact = exact > 0

    @property
    def slots(self) -> float:
        """Slots that no request has or is expected to need."""
        return self._manager.available + self._reserved(self._running) - self._expected

    def add(self, request: Request, spare: int = 0) -> Verdict:
        """Try to start `request`. ADMITTED: it holds a lease with slots for all its tokens; the caller
        appends it to the running requests, which the adder keeps reading. spare: slots that must be left."""
        manager = self._manager
        if request.lease is not None:  # its prompt's KV came from another engine, into slots that it has
            manager.transfers.remove(request.lease)
            self._count_in(request)
            return Verdict.ADMITTED
        limit = request.matchable
        request.lease = lease = manager.open(
            request.tokens[:limit], request.source.extra_key, request.source.priority
        )
        if self._waits(request, lease.match, limit):
            self._refuse(request)
            return Verdict.LATER
        extend = request.until - lease.covered
        fits = not self._running or (extend <= self.prompts and self._have(request, extend, spare))
        if not fits or not grow(manager, request, TAIL_AHEAD, self._running):
            self._refuse(request)
            return Verdict.FULL
        manager.cache.reuse(lease.match, request.source.priority)
        request.computed = lease.covered
        self._count_in(request)
        self.prompts -= extend
        self._note(request)
        return Verdict.ADMITTED

    def _count_in(self, request: Request) -> None:
        request.publish_to = request.until
        self._expected += self._needs(request)
        self._exact = self._exact or request.params.ignore_eos
        self._courses = None

    def victims(self, request: Request, candidates: Sequence[Request]) -> list[Request]:
        """The fewest of the running `candidates`, from the first on, that must be preempted for `request` to
        start; none if even all are not enough, or if it waits for a sibling anyway. Changes nothing."""
        manager = self._manager
        limit = request.matchable
        lease = manager.open(request.tokens[:limit], request.source.extra_key)
        try:
            if self._waits(request, lease.match, limit):
                return []
            extend = request.until - lease.covered
            need = manager.allocator.ceil(extend) + self._needs(request)
            low, high = 1, len(candidates)
            while low < high:
                middle = (low + high) // 2
                enough = self._enough(candidates[:middle], extend, need)
                low, high = (low, middle) if enough else (middle + 1, high)
            return list(candidates[:low]) if self._enough(candidates[:low], extend, need) else []
        finally:
            manager.close(lease, (), 0)

    def _enough(self, victims: Sequence[Request], extend: int, need: float) -> bool:
        """Whether `need` slots and a prompt of `extend` tokens fit without `victims`."""
        if len(victims) == len(self._running):
            return True
        leases = [one.lease for one in victims if one.lease is not None]
        preempted = {one.seq for one in victims}
        stay = [one for one in self._running if one.seq not in preempted]
        expected, prompts = self._expected, self.prompts
        for one in victims:
            expected -= self._needs(one) * (1.0 if one.params.ignore_eos else self._ratio)
            prompts += max(0, one.until - one.computed) if one.computed < one.publish_to else 0
        slots = self._manager.available + self._reserved(stay) + self._manager.gain(leases) - expected
        return extend <= prompts and slots >= need

    def _needs(self, request: Request) -> int:
        """The tokens that a new request is counted with: all that it may generate."""
        return request.to_come if request.params.ignore_eos else min(request.to_come, CLIP)

    def _have(self, request: Request, extend: int, spare: int) -> bool:
        manager = self._manager
        need = manager.allocator.ceil(extend) + self._needs(request) + spare
        # Reserves are counted only if they matter, and the coming steps only if these are not enough.
        if manager.available - self._expected >= need or self.slots >= need:
            return True
        return (self._exact or request.params.ignore_eos) and self._lasts(request, extend + spare)

    def _lasts(self, request: Request, extend: int) -> bool:
        """Whether the slots last at every end of a request from now on. Counts last pages as full."""
        manager = self._manager
        if self._courses is None:
            self._courses = [self._course(one, self._ratio) for one in self._running]
        courses = sorted([*self._courses, self._course(request, 1.0)])
        free: float = manager.available + self._reserved(self._running) - manager.allocator.ceil(extend)
        spare_pages = manager.page_size - 1
        for index, (left, slots) in enumerate(courses):
            if free < (left + spare_pages) * (len(courses) - index):
                return False
            free += slots
        return True

    def _course(self, request: Request, ratio: float) -> tuple[float, int]:
        lease = request.lease
        assert lease is not None
        left = self._needs(request) * (1.0 if request.params.ignore_eos else ratio)
        private = self._manager.allocator.ceil(max(0, request.until - lease.covered))
        return left, private + self._manager.cache.held_by([lease.match])

    def _reserved(self, running: Iterable[Request]) -> int:
        """Slots that these hold ahead of need."""
        ceil = self._manager.allocator.ceil
        reserved = 0
        for request in running:
            lease = request.lease
            if lease is not None:
                reserved += max(0, lease.private - ceil(request.until - lease.covered))
        return reserved

    def _refuse(self, request: Request) -> None:
        assert request.lease is not None
        self._manager.close(request.lease, request.tokens, 0)
        request.lease = None

    def _note(self, request: Request) -> None:
        """Remember what `request` computes next, to compare others with."""
        if not self._manager.shares or request.publish_to - request.computed < self._shared:
            return
        tokens, key = request.tokens[: request.publish_to], request.source.extra_key
        mark = self._mark(tokens, self._manager.cache.match(tokens, key), key)
        if mark:
            self._computing.add(mark)

    def _waits(self, request: Request, match: Match, limit: int) -> bool:
        if not self._computing:
            return False
        return self._mark(request.tokens[:limit], match, request.source.extra_key) in self._computing

    def _mark(
        self, tokens: array[int], match: Match, key: str | None
    ) -> tuple[str | None, int, bytes] | None:
        """The node at which a sequence leaves the tree, and its next tokens; None if they are too few."""
        ahead = tokens[match.length : match.length + self._shared]
        if len(ahead) < self._shared:
            return None
        return key, match.nodes[-1].id if match.nodes else 0, ahead.tobytes()
