"""Pages on their way from one cache to another: exported here, copied by whoever reaches both pools, adopted
there. Whole pages of a prefix, by their tokens; knows neither tensors nor who copies.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from runtime.cache.manager import CacheManager
from runtime.plan import Run


class _Pinned:
    """The cached prefix of `tokens`, in whole pages, pinned until release()."""

    def __init__(self, manager: CacheManager, tokens: array[int], key: str | None, priority: int) -> None:
        self._manager = manager
        self._lease = manager.open(tokens, key, priority)
        manager.transfers.append(self._lease)

    @property
    def valid(self) -> bool:
        """Whether its slots are still its own: not once they were released, or all slots were (rebuild)."""
        return any(one is self._lease for one in self._manager.transfers)

    def release(self) -> None:
        """Nobody needs the pin any more; slots that the cache did not get are free again. Does nothing where
        it is not `valid`."""
        if self.valid:
            self._manager.transfers[:] = [one for one in self._manager.transfers if one is not self._lease]
            self._manager.close(self._lease, (), 0)


class Export(_Pinned):
    """What is cached of `tokens`, to be copied. `tokens`: those of its pages, maybe none; `runs`: their
    slots, in token order."""

    def __init__(self, manager: CacheManager, tokens: Sequence[int], key: str | None = None) -> None:
        super().__init__(manager, array("q", tokens), key, 0)
        self.tokens = array("q", tokens[: self._lease.covered])
        self.runs = [run for node in self._lease.path(manager.cache) for run in node.runs]


class Adoption(_Pinned):
    """Room for what the cache lacks of the whole pages of `tokens`. `start`: the position of the first token
    to be written; `runs`: the slots of the tokens from there on, once reserve() gave them."""

    def __init__(
        self, manager: CacheManager, tokens: Sequence[int], key: str | None = None, priority: int = 0
    ) -> None:
        self.tokens = array("q", tokens[: len(tokens) - len(tokens) % manager.page_size])
        super().__init__(manager, self.tokens, key, priority)
        self.start = self._lease.covered
        self.runs: tuple[Run, ...] = ()

    def reserve(self) -> bool:
        """Take the slots. False, and none: there are not enough now."""
        need = len(self.tokens) - self.start
        if need and not self.runs and self.valid:
            if not self._manager.grow(self._lease, need):
                return False
            self.runs = self._lease.take(need)
        return self.valid

    def commit(self) -> bool:
        """All of `runs` were written: the cache has the pages now. False: they are void, what was written is
        of no use."""
        if not self.valid or len(self.tokens) - self.start != sum(run.length for run in self.runs):
            return False
        self._lease.settle()
        self._manager.publish(self._lease, self.tokens, len(self.tokens))
        return True
