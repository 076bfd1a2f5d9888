"""Router policies: which of the available workers gets a request. A policy is created once per router and
pool, from the router's options. One thread calls it, for every attempt; it must be quick, and must not wait.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

from runtime.config.serving.router import RouterConfig
from runtime.protocol.registry import Registry

BLOCK_BYTES = 128
"""About 32 tokens of English."""


def blocks_of(prompt: bytes) -> list[bytes]:
    """The whole blocks of a prompt; its rest is left out."""
    end = len(prompt) - BLOCK_BYTES + 1
    return [prompt[start : start + BLOCK_BYTES] for start in range(0, end, BLOCK_BYTES)]


class PrefixTree:
    """The prefixes of prompts, by their hashes. `most`: blocks that are kept. The ends that were used longest
    ago go first."""

    def __init__(self, most: int) -> None:
        self._most = most
        # Oldest first. A prefix is always used after all that continue it, so the oldest is an end.
        self._used: OrderedDict[int, None] = OrderedDict()

    @property
    def size(self) -> int:
        """Blocks that are remembered."""
        return len(self._used)

    def match(self, blocks: Sequence[bytes]) -> int:
        """How many blocks, from the first on, are remembered together. Changes nothing."""
        count = 0
        for prefix in _prefixes(blocks):
            if prefix not in self._used:
                break
            count += 1
        return count

    def insert(self, blocks: Sequence[bytes]) -> None:
        """Remember these; of more than are kept, the first ones."""
        for prefix in reversed(list(_prefixes(blocks[: self._most]))):
            self._used[prefix] = None
            self._used.move_to_end(prefix)
        while len(self._used) > self._most:
            self._used.popitem(last=False)


def _prefixes(blocks: Sequence[bytes]) -> Iterator[int]:
    """A hash of each prefix, the shortest first."""
    prefix = 0
    for block in blocks:
        prefix = hash((prefix, block))
        yield prefix


class Candidate(Protocol):
    """What a policy sees of a worker."""

    @property
    def name(self) -> str:
        """Its address, which is unique."""
        ...

    @property
    def active(self) -> int:
        """Requests that it has."""
        ...


C = TypeVar("C", bound=Candidate)


class Policy(Protocol):
    def choose(self, prompt: bytes, candidates: Sequence[C], /) -> C:
        """One of `candidates` (at least one). prompt: what the request's cached prefix depends on: prompts
        with a common beginning have one here. It may be empty or cut off."""
        ...

    def forget(self, name: str, /) -> None:
        """The worker of this name failed: its cache is lost."""
        ...


class RoundRobin:
    def __init__(self, options: RouterConfig) -> None:
        self._last: dict[str, int] = {}
        self._count = 0

    def choose(self, prompt: bytes, candidates: Sequence[C], /) -> C:
        """The least recently chosen one: a worker that comes back does not shift the others' turns."""
        chosen = min(candidates, key=lambda one: self._last.get(one.name, 0))
        self._count += 1
        self._last[chosen.name] = self._count
        return chosen

    def forget(self, name: str, /) -> None:
        """Its turn stays the same."""


class PowerOfTwo:
    def __init__(self, options: RouterConfig) -> None:
        self._random = random.Random()

    def choose(self, prompt: bytes, candidates: Sequence[C], /) -> C:
        drawn = self._random.sample(candidates, min(2, len(candidates)))
        return min(drawn, key=lambda one: one.active)

    def forget(self, name: str, /) -> None:
        """There is no state."""


class CacheAware:
    def __init__(self, options: RouterConfig) -> None:
        self._threshold = options.cache_threshold
        self._options = options
        self._most_blocks = max(1, options.prefix_bytes // BLOCK_BYTES)
        self._trees: dict[str, PrefixTree] = {}

    def choose(self, prompt: bytes, candidates: Sequence[C], /) -> C:
        """The one that has seen most of the prompt, if that is cache_threshold of it at least. If there is
        none, or it is overloaded: the idlest; of several, the one with the smallest tree."""
        blocks = blocks_of(prompt)
        idlest = min(candidates, key=lambda one: (one.active, self._tree(one.name).size))
        chosen = idlest
        if blocks:
            matched = {one.name: self._tree(one.name).match(blocks) for one in candidates}
            best = max(candidates, key=lambda one: (matched[one.name], -one.active))
            if matched[best.name] and matched[best.name] >= self._threshold * len(blocks):
                chosen = idlest if overloaded(self._options, best.active, idlest.active) else best
            self._tree(chosen.name).insert(blocks)
        return chosen

    def forget(self, name: str, /) -> None:
        self._trees.pop(name, None)

    def _tree(self, name: str) -> PrefixTree:
        if name not in self._trees:
            self._trees[name] = PrefixTree(self._most_blocks)
        return self._trees[name]


def overloaded(options: RouterConfig, active: int, least: int) -> bool:
    """Whether a worker has many more requests than the one that has the least."""
    return active - least > options.balance_abs_threshold and active > options.balance_rel_threshold * least


POLICIES: Registry[Callable[[RouterConfig], Policy]] = Registry(
    "router policy",
    {
        "cache_aware": "runtime.server.router.policies:CacheAware",
        "power_of_two": "runtime.server.router.policies:PowerOfTwo",
        "round_robin": "runtime.server.router.policies:RoundRobin",
    },
)
