"""Admission: which waiting requests start now, within budgets of slots and of prompt tokens. It takes the
leases of those that start; it knows no plans and no tokens' meaning.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from enum import Enum

from runtime.cache.manager import CacheManager, Lease
from runtime.cache.node import Match
from runtime.scheduler.requests.request import Request

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


def shrink(manager: CacheManager, request: Request, keep: int) -> None:
    """Only the KV of its first `keep` tokens; nothing happens where there is no more. Not while a step of it
    is under way."""
    if keep < request.computed and request.lease is not None:
        request.computed = manager.cut(request.lease, request.tokens, request.computed, keep)
        request.publish_to = min(request.publish_to, request.computed)


class PrefillAdder:
    """The budgets of one tick; add() spends them.

    slots     available ones, less what running requests are expected to need (a request alone is always let
              in). Who ignores end-of-text needs all it may generate; where that does not fit as a sum, the
              steps to come are gone through: who ends early gives slots back in time.
    prompts   max_prefill_tokens, less prompt tokens admitted and not computed yet (a longer prompt goes
              alone)

    A request whose uncached part begins with SHARED tokens (a page, if that is longer) which another one is
    computing right now waits for that one, and finds them in the cache.
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
        """Slots that nobody has or is expected to need."""
        return self._manager.available + self._reserved(self._running) - self._expected

    def add(self, request: Request, spare: int = 0) -> Verdict:
        """Try to start `request`. ADMITTED: it holds a lease with slots for all its tokens; the caller puts
        it into the list of running ones, which the adder goes on reading. spare: slots that must be left."""
        manager = self._manager
        if request.lease is not None:
            return self._add_transferred(request, request.lease)
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
        request.publish_to = request.until
        self.prompts -= extend
        self._expected += self._needs(request)
        self._exact = self._exact or request.params.ignore_eos
        self._courses = None
        self._note(request)
        return Verdict.ADMITTED

    def _add_transferred(self, request: Request, lease: Lease) -> Verdict:
        """Its prompt's KV came from elsewhere, into slots that it has already."""
        self._manager.transfers.remove(lease)
        request.publish_to = request.until
        self._expected += self._needs(request)
        self._exact = self._exact or request.params.ignore_eos
        self._courses = None
        return Verdict.ADMITTED

    def places(self, request: Request, candidates: Sequence[Request]) -> list[Request]:
        """The fewest of the running `candidates`, from the first on, that must go for `request` to start;
        none when even all are not enough, or when it has to wait for a sibling anyway. Changes nothing."""
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
        """Whether `need` slots and a prompt of `extend` tokens fit once `victims` are gone."""
        if len(victims) == len(self._running):
            return True
        leases = [one.lease for one in victims if one.lease is not None]
        gone = {one.seq for one in victims}
        stay = [one for one in self._running if one.seq not in gone]
        expected, prompts = self._expected, self.prompts
        for one in victims:
            expected -= one.to_come if one.params.ignore_eos else min(one.to_come, CLIP) * self._ratio
            prompts += max(0, one.until - one.computed) if one.computed < one.publish_to else 0
        slots = self._manager.available + self._reserved(stay) + self._manager.gain(leases) - expected
        return extend <= prompts and slots >= need

    def _needs(self, request: Request) -> int:
        """What a new request is counted with: in full."""
        return request.to_come if request.params.ignore_eos else min(request.to_come, CLIP)

    def _have(self, request: Request, extend: int, spare: int) -> bool:
        manager = self._manager
        need = manager.allocator.ceil(extend) + self._needs(request) + spare
        # The reserves are counted only when they decide, the steps to come only when these do not.
        if manager.available - self._expected >= need or self.slots >= need:
            return True
        return (self._exact or request.params.ignore_eos) and self._lasts(request, extend + spare)

    def _lasts(self, request: Request, extend: int) -> bool:
        """Whether the slots last at every end of a request from now on, `request` running too. Counts every
        sequence's last page as full."""
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
        left = self._needs(request) if request.params.ignore_eos else self._needs(request) * ratio
        own = self._manager.allocator.ceil(max(0, request.until - lease.covered))
        return left, own + self._manager.cache.held_by([lease.match])

    def _reserved(self, running: Iterable[Request]) -> int:
        """Slots that these hold ahead of their need."""
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
        """Where in the tree a sequence leaves the cache, and the tokens it goes on with; None when too
        few."""
        ahead = tokens[match.length : match.length + self._shared]
        if len(ahead) < self._shared:
            return None
        return key, match.nodes[-1].id if match.nodes else 0, ahead.tobytes()
