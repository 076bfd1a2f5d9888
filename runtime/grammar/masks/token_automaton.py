"""TokenAutomaton: which tokens may follow a state, computed when a generation first reaches it. Masks are
shared by all generations and kept in one bounded cache per vocabulary.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

from runtime.grammar.automata.dfa import ByteDfa, Run
from runtime.grammar.automata.shortest_end import ShortestEnds
from runtime.grammar.masks import native_walk
from runtime.grammar.masks.mask_store import MaskStore
from runtime.grammar.masks.merged_trie import MergedTrie, MergedTries, run_table
from runtime.grammar.masks.native_walk import NativeWalk
from runtime.grammar.masks.token_bits import LONGEST, Cache, mask_bytes, token_bits
from runtime.grammar.masks.trie import TokenTrie
from runtime.plan import TokenMask
from runtime.protocol.errors import BadConstraint
from runtime.protocol.vocabulary import Vocabulary

WIDE = 16
"""If so many ASCII characters lead to one state, tokens are walked along the merged tree; otherwise few
branches of the whole tree are visited anyway."""

_EXPLORED = 4096
_COMPARED = 1 << 17
"""Entries of a table whose states are compared: inside of a long repeat all have one mask."""


class TokenSpace:
    """A vocabulary prepared for masks, shared by all constraints."""

    def __init__(
        self, vocabulary: Vocabulary, cache_bytes: int = 256 << 20, store: MaskStore | None = None
    ) -> None:
        self.vocabulary = vocabulary
        self.bits = token_bits(vocabulary)
        self.trie = TokenTrie(vocabulary)
        self.trees = MergedTries(self.trie, store=store)
        self.cache: Cache[TokenMask] = Cache(cache_bytes, mask_bytes)
        self.native = native_walk.library()  # loaded here rather than for the first mask


class TokenAutomaton:
    """An automaton over bytes for a vocabulary. Shared by all matchers of a constraint; thread-safe.

    If the vocabulary lacks bytes, a state can be alive for bytes though no tokens lead from it to a match;
    such states count as dead here.
    """

    def __init__(self, dfa: ByteDfa, space: TokenSpace) -> None:
        self.dfa, self.space = dfa, space
        self._complete = space.trie.can_spell(dfa)
        self._alive: dict[int, bool] = {}
        if not self._complete:
            self._explore(0)
        if not self.leads_on(0):
            text = "no sequence of the vocabulary's tokens spells a text that matches"
            raise BadConstraint(text, where="constraint")
        # The tree and the first masks are made by the compiling thread, not in the scheduler's loop.
        self._trees: list[tuple[Run, MergedTrie]] = []
        self._native = None if space.native is None else NativeWalk(space.native, dfa)
        self._alike: npt.NDArray[np.uint64] | None = None
        if self._complete and dfa.widest >= WIDE:
            for run in dfa.runs(WIDE):
                tree = space.trees.of(dfa.kind_of, run_table(dfa.utf8, run.classes))
                self._trees.append((run, tree))
            if space.trie.deepest < len(dfa.delta) and dfa.delta.size <= _COMPARED:
                self._alike = dfa.alike(space.trie.deepest)
            along = self._trees[0][0].after >= 0  # masks within a run take longest
            self.mask(int(along.argmax()) * dfa.nodes)
        self.mask(0)

    def mask(self, state: int) -> TokenMask:
        """Ids that may follow `state`, those that end the generation included if it is a whole match."""
        at, node = divmod(state, self.dfa.nodes)
        kind = at if self._alike is None else (int(self._alike[at]), bool(self.dfa.accepting[at]))
        return self.space.cache.get((self.dfa.content, kind, node), lambda: self._make(state))

    def _make(self, state: int) -> TokenMask:
        bits, allowed = self.space.bits, self._allowed(state)
        return bits.seal(allowed | bits.stop_only.bits if self.dfa.accepts(state) else allowed)

    def _allowed(self, state: int) -> npt.NDArray[np.uint32]:
        """The ids whose text may follow, as words; a new array."""
        space, native = self.space, self._native
        if self._trees and self.dfa.width(state) >= WIDE:
            at = state // self.dfa.nodes
            chains = ((tree, run.chain(at, tree.roots)) for run, tree in self._trees)
            tree, chain = next(one for one in chains if one[1])
            states = [at * self.dfa.nodes for at in chain]
            return tree.reach(self.dfa, states) if native is None else native.mask(tree.native, states)
        if self._complete and native is not None:
            return native.mask(space.trie.native, [state])
        ids, after = space.trie.reach(self.dfa, state)
        if not self._complete:
            some, which = np.unique(after, return_inverse=True)
            ids = ids[np.array([self.leads_on(state) for state in some.tolist()], dtype=np.bool_)[which]]
        return space.bits.pack_ids(ids)

    def shortest_end(self, state: int, limit: int) -> tuple[int, ...] | None:
        """At most `limit` ids that spell the shortest text from `state` to a match, if tokens can."""
        if not self._complete:
            return None
        text = self._ends.text(state)
        ids = self.space.bits.pieces(text) if len(text) <= limit * LONGEST else None
        return None if ids is None or len(ids) > limit else tuple(ids)

    @cached_property
    def _ends(self) -> ShortestEnds:
        return ShortestEnds(self.dfa)

    def leads_on(self, state: int) -> bool:
        """Whether tokens can lead from `state` to a match."""
        if self._complete:
            return True
        if state not in self._alive:  # reached by forced text
            self._explore(state)
        return self._alive[state]

    def _explore(self, start: int) -> None:
        """Set `_alive` for all states that tokens lead to: forwards once, then back from matches."""
        sources: dict[int, list[int]] = {start: []}
        queue, alive = [start], []
        for state in queue:
            if self._alive.get(state, self.dfa.accepts(state)):
                alive.append(state)
            if state in self._alive:
                continue
            if len(queue) > _EXPLORED:
                text = f"the vocabulary cannot spell every byte, and more than {_EXPLORED} states need a look"
                raise BadConstraint(text, where="constraint", hint="use smaller counts")
            for after in np.unique(self.space.trie.reach(self.dfa, state).states).tolist():
                if after not in sources:
                    sources[after] = []
                    queue.append(after)
                sources[after].append(state)
        for state in queue:
            self._alive.setdefault(state, False)
        while alive:
            state = alive.pop()
            self._alive[state] = True
            alive.extend(source for source in sources[state] if not self._alive[source])
