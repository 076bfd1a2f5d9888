"""TokenAutomaton: which tokens may follow, worked out for a state when a generation first comes there.

Masks are shared by all generations under a constraint and kept in one cache per vocabulary, bounded in bytes.
It does not know requests, or how a constraint was written.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from functools import cached_property

import numpy as np
import numpy.typing as npt

from runtime.grammar.automata.dfa import ByteDfa, Run
from runtime.grammar.automata.shortest_end import ShortestEnds
from runtime.grammar.masks import native_walk
from runtime.grammar.masks.mask_cache import MaskCache
from runtime.grammar.masks.mask_store import MaskStore
from runtime.grammar.masks.merged_trie import MergedTrie, MergedTries, run_table
from runtime.grammar.masks.native_walk import NativeWalk
from runtime.grammar.masks.token_bits import token_bits
from runtime.grammar.masks.trie import TokenTrie
from runtime.plan import TokenMask
from runtime.protocol.errors import BadConstraint
from runtime.protocol.vocabulary import Vocabulary

WIDE = 16
"""Where so many ASCII characters lead on to one state, tokens are walked along the merged tree; elsewhere
the tree of all has few branches anyway."""

_EXPLORED = 4096
_COMPARED = 1 << 17
"""Entries of a table whose states are compared: in the middle of a long repeat all have one mask."""
_SERIALS_KEPT = 10_000


class TokenSpace:
    """A vocabulary prepared for masks: made once, used by every constraint."""

    def __init__(
        self, vocabulary: Vocabulary, cache_bytes: int = 256 << 20, store: MaskStore | None = None
    ) -> None:
        self.vocabulary = vocabulary
        self.bits = token_bits(vocabulary)
        self.trie = TokenTrie(vocabulary)
        self.trees = MergedTries(self.trie, store=store)
        self.cache = MaskCache(cache_bytes)
        self.native = native_walk.library()  # loaded here rather than when the first mask is wanted
        self._serials: OrderedDict[bytes, int] = OrderedDict()
        self._next = itertools.count()
        self._lock = threading.Lock()

    def serial(self, content: bytes) -> int:
        """A number for an automaton of this content: masks are shared by all that are equal, and do not keep
        them alive."""
        with self._lock:
            number = self._serials.get(content)
            if number is None:
                number = self._serials[content] = next(self._next)
                if len(self._serials) > _SERIALS_KEPT:
                    self._serials.popitem(last=False)
            self._serials.move_to_end(content)
            return number

    @cached_property
    def id_of(self) -> dict[bytes, int]:
        """The smallest id of each text."""
        count = len(self.vocabulary)
        found = {self.bits.texts[token]: token for token in range(count - 1, -1, -1)}
        found.pop(b"", None)
        return found

    def fewest(self, text: bytes, limit: int) -> tuple[int, ...] | None:
        """The fewest ids that spell `text`, None if that takes more than `limit`."""
        deepest = self.trie.deepest
        if len(text) > limit * deepest:
            return None
        best: list[tuple[int, int, int]] = [(0, 0, 0)]  # ids so far, the last one, where it begins
        none = (len(text) + 1, -1, -1)
        for end in range(1, len(text) + 1):
            found = none
            for start in range(max(0, end - deepest), end):
                if best[start][0] + 1 < found[0] and (token := self.id_of.get(text[start:end])) is not None:
                    found = best[start][0] + 1, token, start
            best.append(found)
        if best[-1][0] > limit:
            return None
        ids: list[int] = []
        at = len(text)
        while at:
            _, token, at = best[at]
            ids.append(token)
        return tuple(reversed(ids))


class TokenAutomaton:
    """An automaton over bytes, seen through a vocabulary. Shared by all matchers of a constraint;
    thread-safe.

    Where the vocabulary lacks bytes that the constraint may want, a state can be alive for bytes and yet no
    sequence of tokens leads on from it to a match; such states count as dead here.
    """

    def __init__(self, dfa: ByteDfa, space: TokenSpace) -> None:
        self.dfa, self.space = dfa, space
        self._serial = space.serial(dfa.content)
        self._complete = space.trie.can_spell(dfa)
        self._alive: dict[int, bool] = {}
        if not self._complete:
            self._explore(0)
        if not self.leads_on(0):
            text = "no sequence of the vocabulary's tokens spells a text that matches"
            raise BadConstraint(text, where="constraint")
        # The tree and the first masks are made where constraints are compiled, not in the scheduler's loop.
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
        """Ids that may follow `state`, those that end the generation included where it is a whole match."""
        at, node = divmod(state, self.dfa.nodes)
        place = at if self._alike is None else (int(self._alike[at]), bool(self.dfa.accepting[at]))
        return self.space.cache.get((self._serial, place, node), lambda: self._make(state))

    def _make(self, state: int) -> TokenMask:
        space, found = self.space, self._allowed(state)
        return space.bits.seal(found | space.bits.stop_only.bits if self.dfa.accepts(state) else found)

    def _allowed(self, state: int) -> npt.NDArray[np.uint32]:
        """The ids whose text may follow, as words; a new array."""
        space, native = self.space, self._native
        if self._trees and self.dfa.width(state) >= WIDE:
            at = state // self.dfa.nodes
            chains = ((tree, run.chain(at, tree.roots)) for run, tree in self._trees)
            tree, chain = next(one for one in chains if one[1])
            states = [place * self.dfa.nodes for place in chain]
            return tree.reach(self.dfa, states) if native is None else native.mask(tree.native, states)
        if self._complete and native is not None:
            return native.mask(space.trie.native, [state])
        ids, after = space.trie.reach(self.dfa, state)
        if not self._complete:
            some, which = np.unique(after, return_inverse=True)
            ids = ids[np.array([self.leads_on(state) for state in some.tolist()], dtype=np.bool_)[which]]
        return space.bits.words_of(ids)

    @property
    def nbytes(self) -> int:
        """Bytes of the automaton."""
        return self.dfa.nbytes

    def shortest_end(self, state: int, limit: int) -> tuple[int, ...] | None:
        """At most `limit` ids that spell the shortest text from `state` to a match; None where there is none
        that short, or tokens may not spell it."""
        return self.space.fewest(self._ends.text(state), limit) if self._complete else None

    @cached_property
    def _ends(self) -> ShortestEnds:
        return ShortestEnds(self.dfa)

    def leads_on(self, state: int) -> bool:
        """Whether tokens can lead from `state` to a match."""
        if self._complete:
            return True
        if (
            state not in self._alive
        ):  # not between two tokens of a walk from the start: forced text ended there
            self._explore(state)
        return self._alive[state]

    def _explore(self, start: int) -> None:
        """Settle `_alive` for all states that tokens lead to from `start`: forwards once, then back from
        matches."""
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
