"""What the scheduler tells of itself: counters since the start, and what is held now. Decides nothing."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from runtime.cache.manager import CacheManager
from runtime.scheduler.queues import WaitingQueue
from runtime.scheduler.requests.request import Request

RATE_S = 1.0  # seconds a rate is measured over, at least


@dataclass(slots=True)
class Counters:
    """Totals since the start. Tokens and jumps of live requests are added when they end."""

    requests: int = 0
    steps: int = 0
    computed: int = 0
    prompt_tokens: int = 0
    cached: int = 0
    generated: int = 0
    jumped: int = 0
    rolled_back: int = 0
    retracted: int = 0
    preempted: int = 0
    finished: int = 0
    failed: int = 0
    aborted: int = 0
    timed_out: int = 0
    repairs: int = 0


class Rate:
    """Tokens per second, measured anew whenever RATE_S have gone by."""

    def __init__(self, now: float) -> None:
        self.value = 0.0
        self._at, self._total = now, 0

    def look(self, generated: int, live: Collection[Request], now: float) -> None:
        """`generated`: tokens of requests that are over; `live`: the others."""
        passed = now - self._at
        if passed >= RATE_S:
            total = generated + sum([request.produced for request in live])
            self.value = (total - self._total) / passed
            self._at, self._total = now, total


def overview(running: int, waiting: WaitingQueue, compiling: int, sessions: int) -> dict[str, Any]:
    """How many requests are where."""
    return {
        "running": running,
        "waiting": len(waiting),
        "compiling": compiling,
        "num_running_reqs": running,
        "num_queue_reqs": len(waiting),
        "num_grammar_queue_reqs": compiling,
        "num_retracted_reqs": waiting.retracted,
        "num_sessions": sessions,
    }


def usage(manager: CacheManager) -> dict[str, Any]:
    """Slots now. What is only kept for later requests does not count as used."""
    used = manager.slots - manager.available
    return {
        "slots": manager.slots,
        "free": manager.allocator.free,
        "evictable": manager.cache.evictable,
        "protected": manager.cache.protected,
        "max_total_num_tokens": manager.slots,
        "num_used_tokens": used,
        "token_usage": used / manager.slots,
    }


def totals(counters: Counters, generated: int, jumped: int) -> dict[str, Any]:
    """`generated`, `jumped`: of live requests, to be added."""
    return {
        "steps": counters.steps,
        "computed": counters.computed,
        "cached": counters.cached,
        "generated": counters.generated + generated,
        "jumped": counters.jumped + jumped,
        "retractions": counters.retracted,
        "preemptions": counters.preempted,
        "finished": counters.finished,
        "failed": counters.failed,
        "repairs": counters.repairs,
        "num_requests_total": counters.requests,
        "num_aborted_requests_total": counters.aborted,
        "num_timed_out_requests_total": counters.timed_out,
        "num_retractions_total": counters.retracted,
        "num_preemptions_total": counters.preempted,
        "num_repairs_total": counters.repairs,
        "prompt_tokens_total": counters.prompt_tokens,
        "generation_tokens_total": counters.generated + generated,
        "cached_tokens_total": counters.cached,
        "computed_tokens_total": counters.computed,
        "jumped_tokens_total": counters.jumped + jumped,
        "num_grammar_rollbacks_total": counters.rolled_back,
        "cache_hit_rate": counters.cached / counters.prompt_tokens if counters.prompt_tokens else 0.0,
    }
