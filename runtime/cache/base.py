"""PrefixCache: the contract of every prefix cache. Ints only; it knows neither requests nor tensors.

Slots belong to exactly one of: the free list of the allocator, a cache node, a request. The verbs below say who
owns what afterwards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from runtime.plan import Run


class Node(Protocol):
    """One stretch of cached tokens that some prefix ends with. Its identity (id) is what plans share segments by."""

    @property
    def id(self) -> int: ...

    @property
    def runs(self) -> tuple[Run, ...]: ...

    @property
    def length(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix: `nodes` from the root down, `length` tokens in all. Valid until the next insert or
    evict unless locked."""

    nodes: tuple[Node, ...]
    length: int


class PrefixCache(ABC):
    """Prefix -> KV slots. `key` namespaces (extra_key): different keys never share."""

    @abstractmethod
    def match(self, tokens: Sequence[int], key: str | None = None) -> Match:
        """The longest cached prefix, in whole pages. May split a node; total size does not change."""

    @abstractmethod
    def insert(self, tokens: Sequence[int], runs: Sequence[Run], key: str | None = None) -> tuple[Match, list[Run]]:
        """Hand over `runs` (the slots of ALL of `tokens`, whole pages, cached part included) to the cache. Returns
        the match that now covers `tokens`, and those of the handed slots that the cache did not take because it
        holds other slots for the same tokens: the caller frees them."""

    @abstractmethod
    def lock(self, match: Match) -> None:
        """Protect the match's nodes from eviction; counts."""

    @abstractmethod
    def unlock(self, match: Match) -> None: ...

    @abstractmethod
    def evict(self, slots: int) -> list[Run]:
        """Drop unlocked leaves until at least `slots` slots are gone, or no leaf is left; returns them to the caller."""

    @abstractmethod
    def reset(self) -> list[Run]:
        """Drop all that is unlocked; returns the slots."""

    @property
    @abstractmethod
    def evictable(self) -> int:
        """Slots in unlocked nodes."""

    @property
    @abstractmethod
    def protected(self) -> int:
        """Slots in locked nodes."""
