"""NoCache: the PrefixCache that keeps nothing, for radix_cache=False. The contract's smallest example."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.cache.node import Match, Node
from runtime.cache.prefix_cache import PrefixCache
from runtime.cache.survey import PrefixTree
from runtime.plan import Run

NOTHING = Match((), 0)


class NoCache(PrefixCache):
    """Matches nothing and takes nothing: all slots stay their sequence's. No verb changes anything."""

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
