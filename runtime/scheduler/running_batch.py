"""Running batch: the running requests and their slots. Which requests are admitted, retracted or preempted,
and get slots for their next token. It sends no outputs: a request that cannot continue is passed to `fail`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from runtime.cache.manager import CacheManager, Lease
from runtime.config.scheduler import SchedulerConfig
from runtime.protocol.errors import InternalFault
from runtime.scheduler.admission import Fail, NewTokenRatio, PrefillAdder, Verdict, grow
from runtime.scheduler.queues import WaitingQueue
from runtime.scheduler.requests.adapters import AdapterRegistry
from runtime.scheduler.requests.request import Request
from runtime.scheduler.scheduler_base import Counters
from runtime.scheduler.stage import Stage

MAX_TAIL_AHEAD = 256  # slots reserved ahead of a growing tail, at most
RETRY_TICKS = 8  # after a refusal for lack of slots, how long admission waits if nothing changes
OTHERS = 8
"""The sequences of one group leave 1/OTHERS of the running requests and slots to others."""
log = logging.getLogger(__name__)


class _Groups:
    """How many requests of each group run (see TokenizedGenerateReqInput), of at most `limit` in all. Later
    requests need not wait until some of a large group have finished."""

    def __init__(self, running: Sequence[Request], waiting: Sequence[Request], limit: int) -> None:
        self._most = limit - max(1, limit // OTHERS) if limit > 1 else limit
        self._running: Counter[str | None] = Counter()
        if any(one.source.group is not None for one in waiting):
            self._running.update(one.source.group for one in running)

    def full(self, request: Request) -> bool:
        """No more of its group may run now."""
        return request.source.group is not None and self._running[request.source.group] >= self._most

    def runs(self, request: Request) -> bool:
        return request.source.group is not None and self._running[request.source.group] > 0

    def add(self, request: Request) -> None:
        self._running[request.source.group] += 1

    def close(self, request: Request) -> None:
        """No more of its group in this tick."""
        self._running[request.source.group] = self._most


class RunningBatch:
    """`running`: in the order of admission, each with a lease. `release_kept`: frees slots that are kept for
    later turns of sessions; False when there are none. `fail`: ends a request that gets no slots. `damaged`:
    whether the account of slots is wrong."""

    def __init__(
        self,
        config: SchedulerConfig,
        manager: CacheManager,
        waiting: WaitingQueue,
        counters: Counters,
        stage: Stage,
        clock: Callable[[], float],
        *,
        release_kept: Callable[[], bool],
        fail: Fail,
        adapters: AdapterRegistry,
    ) -> None:
        self._config, self._manager, self._waiting, self._counters = config, manager, waiting, counters
        self._stage, self._clock, self._release_kept, self._fail = stage, clock, release_kept, fail
        self._adapters = adapters
        self._preempts = config.policy == "priority" and config.preemption_threshold is not None
        self._blocked_until = 0  # admission waits for this tick, or for slots to come free
        self.running: list[Request] = []
        self.ratio = NewTokenRatio(config.conservativeness)
        self.damaged = False

    def configure(self, config: SchedulerConfig) -> None:
        """Use these numbers from now on."""
        self._config = config
        self.unblock()

    def unblock(self) -> None:
        """Something changed: admission is worth trying."""
        self._blocked_until = 0

    # -- slots for running requests --------------------------------------------------------------------------

    def extend_leases(self) -> bool:
        """Get slots for the next token of every running request. False if some had to be retracted for that:
        then no request is admitted. Not while a step is under way."""
        short = [
            request
            for request in self.running
            if request.lease is not None
            and request.lease.capacity < (request.goal if request.ending else len(request.tokens))
            and not request.waits
        ]
        retracted = False
        for request in short:
            if request.lease is not None:  # else it was retracted just now
                retracted |= self._grow(request)
        if retracted:
            self.ratio.retracted(self.running)
        return not retracted

    def _grow(self, request: Request) -> bool:
        """Get slots for its tokens; returns whether a request was retracted for that."""
        ahead = min(MAX_TAIL_AHEAD, max(16, request.produced))
        retracted = False
        while not grow(self._manager, request, ahead, self.running):
            if self._release_kept():
                continue
            if len(self.running) == 1 and not self._manager.transfers:
                self._fail(
                    request,
                    InternalFault(
                        f"Out of memory even after retracting all other requests: {request.until} tokens do "
                        f"not fit the KV pool of {self._manager.slots} slots now",
                        where=request.rid,
                        hint="try again, or start with a larger max_total_tokens",
                    ),
                )
                break
            victim = min(self.running, key=lambda other: (other.produced, -other.prompt_len, -other.arrival))
            self._leave(victim)
            self._waiting.put_back(victim)
            retracted = True
            if victim is request:
                break
        return retracted

    # -- admission -------------------------------------------------------------------------------------------

    def admit(self, tick: int, *, preempt: bool) -> None:
        """Admit the requests that may start now. `preempt`: others may be preempted; not during a step."""
        if not self._waiting:
            return
        free = self._config.max_running_requests - len(self.running)
        blocked = bool(self.running) and tick < self._blocked_until and not self._stage.delivered
        if free > 0 and not blocked:
            self._admit_waiting(tick, free)
        if preempt and self._preempts and self._waiting and self.running and not blocked:
            self._preempt(tick)

    def _admit_waiting(self, tick: int, free: int) -> None:
        adder = self._adder()
        deferred = admitted = full = False
        waiting = self._waiting.order(self._manager.cache, tick)
        adapters = self._adapters.for_round(self.running, waiting, tick) if self._adapters.active else None
        groups = _Groups(self.running, waiting, self._config.max_running_requests)
        for request in waiting:
            if free <= 0:
                break
            if not self._may_begin(request) or (full and request.lease is None):
                continue
            if groups.full(request):
                continue
            if adapters is not None and not adapters.allows(request):
                deferred = True
                continue
            spare = self._manager.slots // OTHERS if groups.runs(request) else 0
            verdict = adder.add(request, spare)
            while verdict is Verdict.FULL and self._release_kept():
                verdict = adder.add(request, spare)
            if verdict is Verdict.ADMITTED:
                free -= 1
                groups.add(request)
                admitted = True  # counted in full in this tick, as expected from the next on
                self._enter(request)
                if adapters is not None:
                    adapters.add(request)
            elif verdict is Verdict.LATER:
                deferred = True
            elif spare:
                groups.close(request)  # others may fit
            elif not self.running and not self._manager.transfers:
                # It was checked that it fits alone: a defect, but no request shall wait for ever.
                self._fail(
                    request,
                    InternalFault("a request that fits the pool found no slots", where=request.rid),
                )
            else:
                if not deferred and not admitted:
                    self._blocked_until = tick + RETRY_TICKS
                if not self._stage.delivered:
                    break
                full = True  # a request that has slots already needs none

    def _preempt(self, tick: int) -> None:
        """Waiting requests preempt running ones of clearly lower priority. A request is preempted at most
        max_preemptions times, and only by a higher priority: so it ends."""
        threshold = self._config.preemption_threshold or 0
        for request in self._waiting.by_priority():
            candidates = sorted(
                (
                    other
                    for other in self.running
                    if other.source.priority + threshold <= request.source.priority
                    and other.preemptions < self._config.max_preemptions
                ),
                key=lambda other: (other.source.priority, -other.arrival),
            )
            if not candidates:
                return
            adapters = self._adapters.for_round(self.running, (), tick) if self._adapters.active else None
            if not self._may_begin(request) or not (adapters is None or adapters.allows(request)):
                continue
            victims = self._adder().victims(request, candidates)
            if not victims:
                return
            for victim in victims:
                victim.preemptions += 1
                self._counters.preempted += 1
                self._leave(victim)
                self._waiting.add(victim)
                victim.timing.queued(tick)
            if self._adder().add(request) is not Verdict.ADMITTED:
                return
            self._enter(request)

    def _may_begin(self, request: Request) -> bool:
        return request.cached >= 0 or self._stage.before_first_decode(request)

    def _adder(self) -> PrefillAdder:
        return PrefillAdder(self._manager, self.running, self.ratio.value, self._config.max_prefill_tokens)

    def _enter(self, request: Request) -> None:
        fresh = request.cached < 0
        if fresh:
            request.cached = min(request.computed, request.prompt_len)
            self._waiting.flows.admitted(request, request.prompt_len - request.cached)
        self._waiting.remove(request)
        self.running.append(request)
        if fresh:
            self._stage.admitted(request, self._clock())
        else:
            self._stage.restore(request)

    # -- leaving ---------------------------------------------------------------------------------------------

    def retract_all(self) -> None:
        """All requests go back to the front of the queue, in order. Not while a step is under way."""
        for request in reversed(list(self.running)):
            self._leave(request)
            self._waiting.put_back(request)

    def remove(self, request: Request, *, keep: bool) -> None:
        """It has finished, running or not. `keep`: its KV is right and may stay in the cache."""
        if request.lease is None:
            return
        if request.lease in self._manager.transfers:
            self._manager.transfers.remove(request.lease)
        else:
            self.running.remove(request)
        self._close(request, request.computed if keep else 0)
        self.unblock()

    def park(self, request: Request) -> None:
        """It no longer runs, and keeps its slots until it is removed."""
        assert request.lease is not None
        self.running.remove(request)
        self._manager.transfers.append(request.lease)
        self.unblock()

    def publish(self, request: Request) -> None:
        """Give what it has computed so far to the cache."""
        assert request.lease is not None
        try:
            self._manager.publish(request.lease, request.tokens, request.settled)
        except InternalFault as fault:
            self._harm(fault)

    def restart(self, live: Iterable[Request]) -> None:
        """Start the account of slots anew; running requests go back to the front of the queue."""
        removed, self.running[:] = list(self.running), []
        for request in reversed(removed):
            self._lost(request)
            self._waiting.put_back(request)
        for request in live:
            request.lease = None  # of one that was about to be admitted
        self._manager.rebuild()
        self.damaged = False
        self.unblock()

    def check(self, kept: Sequence[Lease]) -> None:
        """Raise InternalFault unless every slot is accounted for. `kept`: leases of no running request."""
        leases = [request.lease for request in self.running if request.lease is not None]
        if len(leases) != len(self.running):
            raise InternalFault("a running request holds no lease", where="scheduler")
        self._manager.check([*leases, *kept])
        if not self.running:
            cache = self._manager.cache
            held = cache.held_by([lease.match for lease in [*kept, *self._manager.transfers]])
            if held != cache.protected:
                raise InternalFault(
                    f"{cache.protected} cached slots are locked, {held} of them by leases", where="cache"
                )

    def _leave(self, request: Request) -> None:
        """Stop it for now: its output stays, and its KV stays in the cache until it is evicted."""
        self._stage.offload(request)
        self._close(request, request.computed)
        self.running.remove(request)
        self._lost(request)
        self.unblock()

    def _lost(self, request: Request) -> None:
        if request.lease is not None:
            request.lease.clear()
        request.lease = None
        request.computed = 0
        request.retractions += 1
        self._counters.retracted += 1

    def _close(self, request: Request, computed: int) -> None:
        lease, request.lease = request.lease, None
        assert lease is not None
        try:
            self._manager.close(lease, request.tokens, computed)
        except InternalFault as fault:
            self._harm(fault)

    def _harm(self, fault: InternalFault) -> None:
        """No request is at fault: each continues, and the account is repaired before the next step."""
        log.error("the account of slots is damaged: %s", fault)
        self.damaged = True
