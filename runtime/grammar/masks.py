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

from runtime.grammar.counted_dfa import CountedByteDfa
from runtime.grammar.dfa import ByteDfa
from runtime.grammar.mask_cache import MaskCache
from runtime.grammar.mask_store import MaskStore
from runtime.grammar.merged_trie import MergedTries
from runtime.grammar.plain_tokens import WIDE, PlainAutomaton, PlainCounts, plain_tokens
from runtime.grammar.shortest_end import ShortestEnds
from runtime.grammar.state_masks import StateMasks
from runtime.grammar.symbolic_walk import Walker
from runtime.grammar.trie import TokenTrie
from runtime.plan import TokenMask
from runtime.protocol.errors import BadConstraint
from runtime.protocol.vocabulary import Vocabulary

SPARSE = 16
"""A mask that allows fewer than 1/SPARSE of the ids also lists them."""

APART = 8192
"""Vocabularies of so many ids or more are walked in two parts through automata with counters, of which that
of the plain tokens, nearly all, is the cheaper one. In smaller ones a second walk costs more than it
saves."""

_PREPARED = 8
_EXPLORED = 4096
_STATES_BYTES = 16 << 20
_SERIALS_KEPT = 10_000


class TokenSpace:
    """A vocabulary prepared for masks: made once, used by every constraint."""

    def __init__(
        self, vocabulary: Vocabulary, cache_bytes: int = 256 << 20, store: MaskStore | None = None
    ) -> None:
        self.vocabulary = vocabulary
        self.trie = TokenTrie(vocabulary)
        self.plain = plain_tokens(vocabulary)
        self.others = TokenTrie(Vocabulary(self.plain.less(self.plain.bits.texts)))
        self.apart = len(vocabulary) >= APART
        self.trees = MergedTries(self.others if self.apart else self.trie, store=store)
        self.cache = MaskCache(cache_bytes)
        self.eos = np.array(sorted(vocabulary.eos), dtype=np.int64)
        self._serials: OrderedDict[bytes, int] = OrderedDict()
        self._next = itertools.count()
        self._lock = threading.Lock()
        self.stop_only = pack(self.eos, len(vocabulary))

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
        found = {self.bytes_of(token): token for token in range(count - 1, -1, -1)}
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

    def bytes_of(self, token: int) -> bytes:
        """The text of an id, b"" for ids that never are text."""
        vocabulary = self.vocabulary
        if not 0 <= token < len(vocabulary) or token in vocabulary.special or token in vocabulary.eos:
            return b""
        return vocabulary.tokens[token]


def flagged(ids: npt.NDArray[np.int64], width: int) -> npt.NDArray[np.uint32]:
    """`ids` out of `width` as words."""
    flags = np.zeros(-(-width // 32) * 32, dtype=np.bool_)
    flags[ids] = True
    return np.packbits(flags, bitorder="little").view("<u4")


def pack(ids: npt.NDArray[np.int64], width: int) -> TokenMask:
    """The mask that allows exactly `ids` out of `width`."""
    bits = flagged(ids, width)
    bits.flags.writeable = False
    if len(ids) * SPARSE >= width:
        return TokenMask(bits, None)
    allowed = np.sort(ids)
    allowed.flags.writeable = False
    return TokenMask(bits, allowed)


def seal(bits: npt.NDArray[np.uint32], width: int) -> TokenMask:
    """The mask of packed words, which are taken over."""
    bits.flags.writeable = False
    if int(np.bitwise_count(bits).sum()) * SPARSE >= width:
        return TokenMask(bits, None)
    words = np.flatnonzero(bits)
    places = np.flatnonzero(np.unpackbits(bits[words].view(np.uint8), bitorder="little"))
    allowed = words[places >> 5] * 32 + (places & 31)
    allowed.flags.writeable = False
    return TokenMask(bits, allowed)


class TokenAutomaton:
    """An automaton over bytes, seen through a vocabulary. Shared by all matchers of a constraint;
    thread-safe.

    Where the vocabulary lacks bytes that the constraint may want, a state can be alive for bytes and yet no
    sequence of tokens leads on from it to a match; such states count as dead here. Automata with counters are
    not looked through for them: they must not want bytes that are missing.
    """

    def __init__(self, dfa: ByteDfa | CountedByteDfa, space: TokenSpace) -> None:
        self.dfa, self.space = dfa, space
        self._serial = space.serial(dfa.content)
        self._complete = space.trie.can_spell(dfa)
        self._alive: dict[int, bool] = {}
        self._states: dict[int, tuple[StateMasks, ...]] = {}
        self._held = 0
        self._lock = threading.Lock()
        self._plain: PlainAutomaton | PlainCounts | None = None
        self._counted = dfa if isinstance(dfa, CountedByteDfa) else None
        if not self._complete:
            if self._counted is not None:
                raise ValueError("an automaton with counters needs a token for each of its bytes")
            self._explore(0)
        if not self.leads_on(0):
            text = "no sequence of the vocabulary's tokens spells a text that matches"
            raise BadConstraint(text, where="constraint")
        # Trees and first mask are made where constraints are compiled, not in the scheduler's loop.
        if isinstance(dfa, CountedByteDfa):
            self._plain = PlainCounts(dfa, space.plain) if space.apart else None
            for control in dfa.counts.repeating()[:_PREPARED].tolist():
                self._masks_of(dfa, control, 0)
        elif self._complete and dfa.intervals:
            self._plain = PlainAutomaton(dfa, space.plain)
            self._plain.prepare(_PREPARED)
        self.mask(0)

    def mask(self, state: int) -> TokenMask:
        """Ids that may follow `state`, those that end the generation included where it is a whole match."""
        if self._counted is None:
            return self.space.cache.get((self._serial, state), lambda: self._make(state))
        control, values, node = self._counted.place(state)
        masks = self._masks_of(self._counted, control, node)
        region = tuple(part for one in masks for part in one.region(values))
        key = (self._serial, control * self._counted.nodes + node, *region)
        return self.space.cache.get(key, lambda: self._sealed(masks, values))

    def _masks_of(self, dfa: CountedByteDfa, control: int, node: int) -> tuple[StateMasks, ...]:
        """The masks of one control, made when first needed: of plain tokens, and of the others."""
        place = control * dfa.nodes + node
        masks = self._states.get(place)
        if masks is None:
            walker = self._walker
            accepts = dfa.counts.accepts[control] if node == 0 else ()
            masks = (StateMasks(walker, walker.start(control, node), accepts),)
            if isinstance(self._plain, PlainCounts) and node == 0:
                masks += (self._plain.masks(control),)
            with self._lock:
                if self._held > _STATES_BYTES:
                    self._states, self._held = {}, 0
                self._states[place] = masks
                self._held += sum(one.nbytes for one in masks)
        return masks

    @cached_property
    def _walker(self) -> Walker:
        dfa = self._counted
        assert dfa is not None
        return Walker(dfa, self.space.trees.of(dfa.utf8, ~dfa.classes))

    def _sealed(self, masks: tuple[StateMasks, ...], values: tuple[int, ...]) -> TokenMask:
        bits = masks[0].bits(values)
        for one in masks[1:]:
            bits |= one.bits(values)
        if masks[0].accepts(values):
            bits |= self.space.stop_only.bits
        return seal(bits, len(self.space.vocabulary))

    def _make(self, state: int) -> TokenMask:
        assert isinstance(self.dfa, ByteDfa), "states with counters have masks of their own"
        if isinstance(self._plain, PlainAutomaton) and self.dfa.width(state) >= WIDE:
            ids = self.space.others.reach(self.dfa, state).ids
            if self.dfa.accepts(state):
                ids = np.concatenate((ids, self.space.eos))
            width = len(self.space.vocabulary)
            return seal(flagged(ids, width) | self._plain.after(state), width)
        ids, states = self.space.trie.reach(self.dfa, state)
        if not self._complete:
            after, which = np.unique(states, return_inverse=True)
            ids = ids[np.array([self.leads_on(state) for state in after.tolist()], dtype=np.bool_)[which]]
        if self.dfa.accepts(state):
            ids = np.concatenate((ids, self.space.eos))
        return pack(ids, len(self.space.vocabulary))

    @property
    def nbytes(self) -> int:
        """Bytes of the automaton and of what was worked out for its states, roughly."""
        return self.dfa.nbytes + self._held

    def shortest_end(self, state: int, limit: int) -> tuple[int, ...] | None:
        """At most `limit` ids that spell the shortest text from `state` to a match; None where there is none
        that short, or it was not found."""
        if self._ends is None:
            return None
        text = self._ends.text(state)
        return None if text is None else self.space.fewest(text, limit)

    @cached_property
    def _ends(self) -> ShortestEnds | None:
        if not self._complete:
            return None
        dfa = self._counted or (self.dfa.with_controls() if isinstance(self.dfa, ByteDfa) else None)
        return None if dfa is None else ShortestEnds(dfa)

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
            assert isinstance(self.dfa, ByteDfa), "automata with counters are not explored"
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
