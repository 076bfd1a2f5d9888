"""Router policies: which of the available workers gets a request. A policy is created once per router and
pool, from the router's options. One thread calls it, for every attempt; it must be quick, and must not wait.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from runtime.config.serving.router import RouterConfig
from runtime.protocol.registry import Registry

BLOCK_BYTES = 128
"""About 32 tokens of English."""


def blocks_of(prompt: bytes) -> list[bytes]:
    """The whole blocks of a prompt; its rest is left out."""
    end = len(prompt) - BLOCK_BYTES + 1
    return [prompt[start : start + BLOCK_BYTES] for start in range(0, end, BLOCK_BYTES)]


class _Node:
    __slots__ = ("block", "children", "parent")

    def __init__(self, parent: _Node | None, block: bytes) -> None:
        self.parent, self.block = parent, block
        self.children: dict[bytes, _Node] = {}


class PrefixTree:
    """`most`: blocks that are kept. The ends that were used longest ago go first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._root = _Node(None, b"")
        # Oldest first. A node is always touched after all that are below it, so the oldest is an end.
        self._order: OrderedDict[_Node, None] = OrderedDict()

    @property
    def size(self) -> int:
        """Blocks that are remembered."""
        return len(self._order)

    def match(self, blocks: Sequence[bytes]) -> int:
        """How many blocks, from the first on, are remembered together. Changes nothing."""
        node, count = self._root, 0
        for block in blocks:
            child = node.children.get(block)
            if child is None:
                break
            node, count = child, count + 1
        return count

    def insert(self, blocks: Sequence[bytes]) -> None:
        """Remember these; of more than are kept, the first ones."""
        node = self._root
        for block in blocks[: self._most]:
            child = node.children.get(block)
            if child is None:
                child = node.children[block] = _Node(node, block)
            node = child
        while node.parent is not None:
            self._order[node] = None
            self._order.move_to_end(node)
            node = node.parent
        while len(self._order) > self._most:
            oldest, _ = self._order.popitem(last=False)
            assert oldest.parent is not None
            del oldest.parent.children[oldest.block]


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
        self._more, self._factor = options.balance_abs_threshold, options.balance_rel_threshold
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
                chosen = idlest if self._overloaded(best.active, idlest.active) else best
            self._tree(chosen.name).insert(blocks)
        return chosen

    def forget(self, name: str, /) -> None:
        self._trees.pop(name, None)

    def _tree(self, name: str) -> PrefixTree:
        if name not in self._trees:
            self._trees[name] = PrefixTree(self._most_blocks)
        return self._trees[name]

    def _overloaded(self, active: int, least: int) -> bool:
        return active - least > self._more and active > self._factor * least


POLICIES: Registry[Callable[[RouterConfig], Policy]] = Registry(
    "router policy",
    {
        "cache_aware": "runtime.server.router.policies:CacheAware",
        "power_of_two": "runtime.server.router.policies:PowerOfTwo",
        "round_robin": "runtime.server.router.policies:RoundRobin",
    },
)
