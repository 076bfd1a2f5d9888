"""KV of retracted requests in host memory, so that it need not be computed again. One copy per request, gone
with it: no more than what the requests there are had at once."""

from __future__ import annotations

from runtime.cache.manager import CacheManager
from runtime.disagg.peers import runs_of
from runtime.disagg.transfer.memory import KVMemory
from runtime.scheduler.requests.request import Request


class HostCopies:
    """By request. Its length: how many there are."""

    def __init__(self, manager: CacheManager, memory: KVMemory) -> None:
        self._manager, self._memory = manager, memory
        self._heads = memory.layout.span
        self._token_bytes = memory.layout.token_bytes(memory.layout.heads)
        self._copies: dict[int, memoryview] = {}

    def __len__(self) -> int:
        return len(self._copies)

    def save(self, request: Request) -> bool:
        """Copy what it has computed, before it loses its slots. Not while a step is under way."""
        if request.lease is None or not request.computed:
            return False
        runs = runs_of(request.lease, self._manager.cache, 0, request.computed)
        self._copies[request.seq] = self._memory.read(runs, self._heads, "token")
        return True

    def restore(self, request: Request) -> bool:
        """It has slots again: what the cache does not have of the copy is written into them."""
        copy = self._copies.pop(request.seq, None)
        lease = request.lease
        if copy is None or lease is None:
            return False
        start = request.computed
        end = min(copy.nbytes // self._token_bytes, request.matchable)
        if end > start:
            runs = lease.take(end - start)
            size = self._token_bytes
            self._memory.write(runs, self._heads, "token", copy[start * size : end * size])
            lease.settle()
            request.computed = end
            self._manager.publish(lease, request.tokens, request.settled)
        return True

    def drop(self, request: Request) -> None:
        self._copies.pop(request.seq, None)
