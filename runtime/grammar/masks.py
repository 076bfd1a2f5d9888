"""TokenAutomaton: which tokens may follow, worked out for a state when a generation first comes there.

Masks are shared by all generations under a constraint and kept in one cache per vocabulary, bounded in bytes.
It does not know requests, or how a constraint was written.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from runtime.grammar.dfa import ByteDfa
from runtime.grammar.trie import TokenTrie
from runtime.plan import TokenMask
from runtime.protocol.errors import BadConstraint
from runtime.protocol.vocabulary import Vocabulary

SPARSE = 16
"""A mask that allows fewer than 1/SPARSE of the ids also lists them."""

_EXPLORED = 4096


class MaskCache:
    """Masks by key, the longest unused dropped first when they take more than `limit_bytes`."""

    def __init__(self, limit_bytes: int = 256 << 20) -> None:
        self._limit, self._held = limit_bytes, 0
        self._masks: OrderedDict[tuple[int, int], TokenMask] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[int, int], make: Callable[[], TokenMask]) -> TokenMask:
        with self._lock:
            mask = self._masks.get(key)
            if mask is not None:
                self._masks.move_to_end(key)
                return mask
        mask = make()  # outside of the lock: two threads may make the same one, which is harmless
        with self._lock:
            if key not in self._masks:
                self._masks[key] = mask
                self._held += _size(mask)
            while self._held > self._limit and len(self._masks) > 1:
                self._held -= _size(self._masks.popitem(last=False)[1])
        return mask


def _size(mask: TokenMask) -> int:
    return int(mask.bits.nbytes) + (0 if mask.allowed is None else int(mask.allowed.nbytes)) + 400


class TokenSpace:
    """A vocabulary prepared for masks: made once, used by every constraint."""

    def __init__(self, vocabulary: Vocabulary, cache_bytes: int = 256 << 20) -> None:
        self.vocabulary = vocabulary
        self.trie = TokenTrie(vocabulary)
        self.cache = MaskCache(cache_bytes)
        self.eos = np.array(sorted(vocabulary.eos), dtype=np.int64)
        self._serials = itertools.count()
        self.stop_only = pack(self.eos, len(vocabulary))

    def serial(self) -> int:
        """A number no other constraint of this vocabulary has: cached masks must not keep a constraint
        alive."""
        return next(self._serials)

    def bytes_of(self, token: int) -> bytes:
        """The text of an id, b"" for ids that never are text."""
        vocabulary = self.vocabulary
        if not 0 <= token < len(vocabulary) or token in vocabulary.special or token in vocabulary.eos:
            return b""
        return vocabulary.tokens[token]


def pack(ids: npt.NDArray[np.int64], width: int) -> TokenMask:
    """The mask that allows exactly `ids` out of `width`."""
    flags = np.zeros(-(-width // 32) * 32, dtype=np.bool_)
    flags[ids] = True
    bits = np.packbits(flags, bitorder="little").view("<u4")
    bits.flags.writeable = False
    if len(ids) * SPARSE >= width:
        return TokenMask(bits, None)
    allowed = np.sort(ids)
    allowed.flags.writeable = False
    return TokenMask(bits, allowed)


class TokenAutomaton:
    """An automaton over bytes, seen through a vocabulary. Shared by all matchers of a constraint;
    thread-safe.

    Where the vocabulary lacks bytes that the constraint may want, a state can be alive for bytes and yet no
    sequence of tokens leads on from it to a match; such states count as dead here.
    """

    def __init__(self, dfa: ByteDfa, space: TokenSpace) -> None:
        self.dfa, self.space = dfa, space
        self._serial = space.serial()
        self._complete = space.trie.can_spell(dfa)
        self._alive: dict[int, bool] = {}
        if not self._complete:
            self._explore(0)
        if not self.leads_on(0):
            text = "no sequence of the vocabulary's tokens spells a text that matches"
            raise BadConstraint(text, where="constraint")
        self.mask(
            0
        )  # tables and first mask are made where constraints are compiled, not in the scheduler's loop

    def mask(self, state: int) -> TokenMask:
        """Ids that may follow `state`, those that end the generation included where it is a whole match."""
        return self.space.cache.get((self._serial, state), lambda: self._make(state))

    def _make(self, state: int) -> TokenMask:
        ids, states = self.space.trie.reach(self.dfa, state)
        if not self._complete:
            after, which = np.unique(states, return_inverse=True)
            ids = ids[np.array([self.leads_on(state) for state in after.tolist()], dtype=np.bool_)[which]]
        if self.dfa.accepts(state):
            ids = np.concatenate((ids, self.space.eos))
        return pack(ids, len(self.space.vocabulary))

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
