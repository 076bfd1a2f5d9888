"""PrefixCache: the contract of every prefix cache, and NoCache, which keeps nothing. Ints only;
it knows neither requests nor tensors.

Slots belong to exactly one of: the free list of the allocator, a cache node, a request. The verbs below say
who owns what afterwards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from runtime.cache.node import Match, Node, PrefixTree
from runtime.plan import Run


class PrefixCache(ABC):
    """Prefix -> KV slots. `key` namespaces (extra_key): different keys never share."""

    @abstractmethod
    def match(self, tokens: Sequence[int], key: str | None = None) -> Match:
        """The longest cached prefix, in whole pages. May split a node; total size does not change."""

    @abstractmethod
    def insert(
        self,
        tokens: Sequence[int],
        runs: Sequence[Run],
        key: str | None = None,
        held: Match | None = None,
        priority: int = 0,
    ) -> tuple[Match, list[Run]]:
        """Hand over `runs` (the slots of ALL of `tokens`, whole pages, cached part included) to the cache.
        Returns the match that now covers `tokens`, and those of the handed slots that the cache did not take
        because it holds other slots for the same tokens: the caller frees them. Slots of tokens beyond the
        returned match's length (a cache that keeps nothing) stay the caller's.

        `held`: a match of a beginning of `tokens` that the caller has locked and will unlock next; the cache
        may lengthen its last node in place, so it is good for unlock() only from then on. `priority`: of who
        computed them, for eviction."""

    @abstractmethod
    def probe(self, tokens: Sequence[int], key: str | None = None) -> int:
        """The length that match() would find. Changes nothing; valid until the next insert or evict."""

    @abstractmethod
    def trail(self, tokens: Sequence[int], key: str | None = None) -> tuple[int, ...]:
        """The ids of the nodes that match() would come by, root first. Changes nothing; valid until the next
        insert or evict."""

    @abstractmethod
    def reuse(self, match: Match, priority: int = 0) -> None:
        """Count one more sequence, of that priority, that reuses a locked match. For eviction only."""

    @abstractmethod
    def path(self, match: Match) -> tuple[Node, ...]:
        """The nodes that now make up a locked match, root first: a later match may have split some of them.
        Changes nothing; valid until `version` changes."""

    @abstractmethod
    def lock(self, match: Match) -> None:
        """Protect the match's nodes from eviction; counts."""

    @abstractmethod
    def unlock(self, match: Match) -> None: ...

    @abstractmethod
    def held_by(self, matches: Sequence[Match]) -> int:
        """Slots that would become evictable if all these locked matches were unlocked. Changes nothing."""

    @abstractmethod
    def evict(self, slots: int) -> list[Run]:
        """Drop unlocked leaves until at least `slots` slots are gone, or no leaf is left; returns them to
        the caller. Whole pages; the last leaf may only be shortened."""

    @abstractmethod
    def reset(self) -> list[Run]:
        """Drop all that is unlocked; returns the slots."""

    @abstractmethod
    def survey(self, most: int, ids: int) -> PrefixTree:
        """What is held: `most` nodes at most, each with its first `ids` tokens. Changes nothing."""

    @property
    @abstractmethod
    def version(self) -> int:
        """Goes up whenever a node is split: only then can path() of a locked match change."""

    @property
    @abstractmethod
    def evictable(self) -> int:
        """Slots in unlocked nodes."""

    @property
    @abstractmethod
    def protected(self) -> int:
        """Slots in locked nodes."""


NOTHING = Match((), 0)


class NoCache(PrefixCache):
    """For radix_cache=False: matches nothing and takes nothing; all slots stay their sequence's."""

    def match(self, tokens: Sequence[int], key: str | None = None) -> Match:
        return NOTHING

    def insert(
        self,
        tokens: Sequence[int],
        runs: Sequence[Run],
        key: str | None = None,
        held: Match | None = None,
        priority: int = 0,
    ) -> tuple[Match, list[Run]]:
        return NOTHING, []

    def probe(self, tokens: Sequence[int], key: str | None = None) -> int:
        return 0

    def trail(self, tokens: Sequence[int], key: str | None = None) -> tuple[int, ...]:
        return ()

    def reuse(self, match: Match, priority: int = 0) -> None:
        return

    def held_by(self, matches: Sequence[Match]) -> int:
        return 0

    def path(self, match: Match) -> tuple[Node, ...]:
        return ()

    def lock(self, match: Match) -> None:
        return

    def unlock(self, match: Match) -> None:
        return

    def evict(self, slots: int) -> list[Run]:
        return []

    def reset(self) -> list[Run]:
        return []

    def survey(self, most: int, ids: int) -> PrefixTree:
        return PrefixTree(page_size=0, evictable=0, protected=0)

    @property
    def version(self) -> int:
        return 0

    @property
    def evictable(self) -> int:
        return 0

    @property
    def protected(self) -> int:
        return 0
