"""The worker that most likely has the prompt's beginning in its cache, unless that one is overloaded.

An approximate radix tree per worker remembers the prompts that were sent there. The router never asks a
worker what it holds: what was sent lately is nearly what is cached.
"""

from __future__ import annotations

from collections.abc import Sequence

from runtime.server.router.policies import C, PolicyOptions
from runtime.server.router.policies.prefix_tree import BLOCK_BYTES, PrefixTree, blocks_of


class CacheAware:
    def __init__(self, options: PolicyOptions) -> None:
        self._threshold = options.cache_threshold
        self._more, self._factor = options.balance_abs_threshold, options.balance_rel_threshold
        self._most_blocks = max(1, options.prefix_bytes // BLOCK_BYTES)
        self._trees: dict[str, PrefixTree] = {}

    def choose(self, prompt: bytes, candidates: Sequence[C], /) -> C:
        """Of those that have seen cache_threshold of the prompt, the one that has seen most. Where there is
        none, or it is overloaded: the idlest; of several, the one with the least to remember."""
        blocks = blocks_of(prompt)
        idlest = min(candidates, key=lambda one: (one.active, self._tree(one.name).size))
        found = idlest
        if blocks:
            matched = {one.name: self._tree(one.name).match(blocks) for one in candidates}
            best = max(candidates, key=lambda one: (matched[one.name], -one.active))
            if matched[best.name] and matched[best.name] >= self._threshold * len(blocks):
                found = idlest if self._overloaded(best.active, idlest.active) else best
            self._tree(found.name).insert(blocks)
        return found

    def forget(self, name: str, /) -> None:
        self._trees.pop(name, None)

    def _tree(self, name: str) -> PrefixTree:
        if name not in self._trees:
            self._trees[name] = PrefixTree(self._most_blocks)
        return self._trees[name]

    def _overloaded(self, active: int, least: int) -> bool:
        return active - least > self._more and active > self._factor * least
