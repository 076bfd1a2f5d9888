"""Admission: which waiting requests start now, within budgets of slots and of prompt tokens. It takes the
leases of those that start; it knows no plans and no tokens' meaning.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from enum import Enum

from runtime.cache.base import Match
from runtime.cache.manager import CacheManager
from runtime.scheduler.request import Request

CLIP = 4096  # new tokens counted for one request at most: longer ones seldom need all they may have
SHARED = 32  # uncached tokens shared with a request under way that make it worth waiting for
TAIL_AHEAD = 32  # slots reserved behind a prompt, so that the tail grows in one piece


class Verdict(Enum):
    ADMITTED = "admitted"
    LATER = "later"  # a sibling is computing what it needs: try again, go on with the next
    FULL = "full"  # no budget left: nobody behind it is tried


class NewTokenRatio:
    """Which share of the tokens they may still generate running requests are expected to need. Falls while
    all goes well, jumps up when requests had to be retracted."""

    START, FLOOR, STEPS = 0.7, 0.14, 600

    def __init__(self, conservativeness: float = 1.0) -> None:
        self._start = min(1.0, self.START * conservativeness)
        self._floor = min(1.0, self._start * self.FLOOR)
        self.value = self._start

    def decay(self) -> None:
        self.value = max(self._floor, self.value - (self._start - self._floor) / self.STEPS)

    def retracted(self, running: Iterable[Request]) -> None:
        """Set it to what the requests that are left have needed, with 20 steps' room."""
        produced = allowed = 0
        for request in running:
            produced += request.produced + 20
            allowed += request.params.max_new_tokens
        self.value = min(1.0, max(self.value, produced / max(allowed, 1)))


def reclaim(manager: CacheManager, running: Iterable[Request]) -> int:
    """Take the slots reserved ahead back from `running`; returns how many that were. Costs contiguity
    only."""
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


class PrefillAdder:
    """The budgets of one tick; add() spends them.

    slots     available ones, less what running requests are expected to need (a request alone is always let
              in)
    prompts   max_prefill_tokens, less prompt tokens admitted and not computed yet (a longer prompt goes
              alone)
    siblings  a request whose uncached part begins with SHARED tokens (a page, if that is longer) which
              another one is computing right now waits for that one, and finds them in the cache
    """

    def __init__(
        self, manager: CacheManager, running: Sequence[Request], ratio: float, max_prefill_tokens: int
    ) -> None:
        self._manager = manager
        self._running = running
        self._shared = max(SHARED, manager.page_size)
        self._computing: set[tuple[str | None, int, bytes]] = set()
        self._expected = 0.0
        self.prompts = max_prefill_tokens
        for request in running:
            left = request.until - request.computed
            self._expected += min(request.remaining, CLIP) * ratio
            self.prompts -= left if left > 1 else 0
            self._note(request)

    @property
    def slots(self) -> float:
        """Slots that nobody has or is expected to need."""
        ceil = self._manager.allocator.ceil
        reserved = 0
        for request in self._running:
            lease = request.lease
            if lease is not None:
                reserved += max(0, lease.own - ceil(request.until - lease.covered))
        return self._manager.available + reserved - self._expected

    def add(self, request: Request) -> Verdict:
        """Try to start `request`. ADMITTED: it holds a lease with slots for all its tokens; the caller puts
        it into the list of running ones, which the adder goes on reading."""
        manager = self._manager
        limit = request.matchable
        request.lease = lease = manager.open(request.tokens[:limit], request.source.extra_key)
        if self._waits(request, lease.match, limit):
            self._refuse(request)
            return Verdict.LATER
        extend = request.until - lease.covered
        need = manager.allocator.ceil(extend) + min(request.remaining, CLIP)
        fits = not self._running or (extend <= self.prompts and self._have(need))
        if not fits or not grow(manager, request, TAIL_AHEAD, self._running):
            self._refuse(request)
            return Verdict.FULL
        request.computed = lease.covered
        request.publish_to = request.until
        self.prompts -= extend
        self._expected += min(request.remaining, CLIP)
        self._note(request)
        return Verdict.ADMITTED

    def _have(self, need: int) -> bool:
        # The reserves are counted only when they decide.
        return self._manager.available - self._expected >= need or self.slots >= need

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
        """Where in the tree a sequence leaves the cache, and the tokens it goes on with; None when too
        few."""
        ahead = tokens[match.length : match.length + self._shared]
        if len(ahead) < self._shared:
            return None
        return key, match.nodes[-1].id if match.nodes else 0, ahead.tobytes()
