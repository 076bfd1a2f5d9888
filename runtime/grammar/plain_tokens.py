"""PlainTokens: the tokens of a vocabulary that can stand nowhere in a JSON document but inside of a string.

They are whole characters, none of which a string escapes, and nine of ten tokens of a usual vocabulary. Where
an automaton takes very many characters, they are walked along a tree of characters that is merged by what the
automaton tells apart, and only the others along that of all bytes. It knows no constraint.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.grammar.counted_dfa import CountedByteDfa
from runtime.grammar.dfa import ByteDfa
from runtime.grammar.mask_cache import Cache
from runtime.grammar.merged_trie import Ints, MergedTrie, MergedTries, merged
from runtime.grammar.state_masks import StateMasks
from runtime.grammar.symbolic_walk import CharacterWalker
from runtime.grammar.token_bits import Bits, TokenBits
from runtime.grammar.trie import TokenTrie, spread
from runtime.protocol.vocabulary import Vocabulary

_OUTSIDE = frozenset(b"0123456789+-.eEtrufalsn{}[]:, \t\r\n")
"""What a JSON document spells its other parts with."""

_ESCAPED = frozenset((*range(32), 34, 92, 127))
WIDE = 16
"""Where so many ASCII characters lead on to one state, tokens are walked along a merged tree; elsewhere the
tree of all has few branches anyway."""

_STATES = 256
_SMALL = 80_000
"""Nodes of a tree that is walked in a millisecond or two."""


def is_plain(data: bytes) -> bool:
    """Whether `data` stands for whole characters of a string, and for nothing else in a document. Single
    bytes are not counted among them: with them any text can be followed."""
    if len(data) < 2 or _OUTSIDE.issuperset(data) or not _ESCAPED.isdisjoint(data):
        return False
    if data.isascii():
        return True
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@lru_cache(maxsize=1)
def plain_tokens(vocabulary: Vocabulary) -> PlainTokens:
    """Those of `vocabulary`, made once for all backends of a process, which has one vocabulary."""
    return PlainTokens(TokenBits(vocabulary))


class PlainTokens:
    """Made once for a vocabulary. Thread-safe. All bits are uint32 [words] of the vocabulary, read only."""

    def __init__(self, bits: TokenBits) -> None:
        flags = np.fromiter(map(is_plain, bits.texts), np.bool_, bits.width)
        texts = tuple(data if plain else b"" for data, plain in zip(bits.texts, flags.tolist()))
        self.bits, self._flags = bits, flags
        self.all = _sealed(bits.pack(flags))
        self.trie = TokenTrie(Vocabulary(texts, frozenset(), frozenset()), characters=True)
        self.trees = MergedTries(self.trie)
        self.unmerged = MergedTrie(
            self.trie.byte, self.trie.child_count, self.trie.roots,
            np.where(self.trie.end_of < 0, len(self.trie.byte), self.trie.end_of).astype(np.int32),
        )  # fmt: skip
        merged(self.trie, np.zeros(len(self.trie.points), dtype=np.int64))  # works out what all others need
        self.cache: Cache[Bits] = Cache(lambda found: found.nbytes + 400, 64 << 20)
        self.numbers = itertools.count()

    def less(self, texts: Sequence[bytes]) -> tuple[bytes, ...]:
        """`texts` of the vocabulary, and what may follow them, without those of plain tokens."""
        kept = [b"" if plain else data for data, plain in zip(texts, self._flags.tolist())]
        return (*kept, *texts[len(kept) :])


class PlainAutomaton:
    """An automaton over the characters of a string's value, seen through the plain tokens. Shared by all
    strings that follow it; thread-safe.

    Where a walk can come to, few kinds of characters differ; the tree of tokens is merged by them.
    """

    def __init__(self, dfa: ByteDfa, tokens: PlainTokens) -> None:
        self.dfa, self._tokens, self._serial = dfa, tokens, next(tokens.numbers)
        self._trees: dict[int, MergedTrie] = {}
        self._after: dict[int, set[int]] = {}
        self._near: dict[int, MergedTrie] = {}
        self._lock = threading.Lock()

    def after(self, state: int) -> Bits:
        """The plain tokens that may follow `state`, which is between two characters."""
        place = state // self.dfa.nodes
        if place in self._free:
            return self._tokens.all
        return self._tokens.cache.get((self._serial, place), lambda: self._reach(place))

    def prepare(self, most: int) -> bool:
        """Make trees, at most so many, for the wide states. False: there are more."""
        made: set[int] = set()
        for place in range(len(self.dfa.delta)):
            if place in self._near or place in self._free or not self._is_wide(place):
                continue
            made.add(id(self._tree(place)))
            if len(made) > most or len(self._trees) > _STATES:
                return False
        return True

    def _is_wide(self, place: int) -> bool:
        return self.dfa.width(place * self.dfa.nodes) >= WIDE

    @cached_property
    def _free(self) -> frozenset[int]:
        """The states from which every character of the tree leads to one of them."""
        after = self.dfa.delta[:, np.unique(self._kinds)]
        free: npt.NDArray[np.bool_] = np.all(after >= 0, axis=1)
        while True:
            still: npt.NDArray[np.bool_] = free & np.all(free[np.where(after >= 0, after, 0)], axis=1)
            if (still == free).all():
                return frozenset(np.flatnonzero(free).tolist())
            free = still

    def _reach(self, place: int) -> Bits:
        ready = place in self._near or self._is_wide(place)
        tree = self._tree(place) if ready else self._tokens.unmerged
        nodes = np.zeros(tree.nodes + 1, dtype=np.bool_)
        here = np.arange(tree.roots)
        at = np.full(len(here), place, dtype=np.int64)
        flat, width = self.dfa.delta.reshape(-1), self.dfa.classes + 1
        while len(here):
            at = flat.take(at * width + self._kinds.take(tree.byte.take(here))).astype(np.int64)
            keep = (at >= 0).nonzero()[0]
            here = here.take(keep)
            nodes[here] = True
            here, source = spread(tree.child_start.take(here), tree.child_count.take(here))
            at = at.take(keep.take(source))
        return _sealed(tree.pack(nodes))

    @cached_property
    def _kinds(self) -> Ints:
        return _classes(self._tokens.trie.points, self.dfa)

    def _tree(self, place: int) -> MergedTrie:
        """The tree for walks from a state of characters."""
        tree = self._trees.get(place) or self._near.get(place)
        if tree is None:
            met = self._closure(place)
            tree = self._tokens.trees.of_kinds(_numbered(_alike(self.dfa.delta[met], self._kinds)))
            with self._lock:
                self._trees[place] = tree
                if tree.nodes <= _SMALL:
                    self._near.update(dict.fromkeys(met, tree))
        return tree

    def _closure(self, place: int) -> list[int]:
        """Where a walk of plain tokens from `place` can come to."""
        met, queue = {place}, [place]
        for one in queue:
            known = self._after.get(one)
            if known is None:
                known = self._after[one] = set(self.dfa.delta[one, self._met].tolist()) - {-1}
            queue.extend(known - met)
            met |= known
        return sorted(met)

    @cached_property
    def _met(self) -> Ints:
        """The classes of characters that the tree has."""
        found = np.unique(self._kinds)
        return found[found < self.dfa.classes]


class PlainCounts:
    """The same for an automaton with counters: the masks of its controls."""

    def __init__(self, dfa: CountedByteDfa, tokens: PlainTokens) -> None:
        self._dfa, self._tokens = dfa, tokens
        self._kinds = _classes(tokens.trie.points, dfa)

    def masks(self, control: int) -> StateMasks:
        """Of the places between two characters."""
        counts = self._dfa.counts
        met, queue = {control}, [control]
        wanted = np.unique(self._kinds)
        for one in queue:
            begins, lengths = counts.first[one, wanted].tolist(), counts.count[one, wanted].tolist()
            for edge, number in {pair for pair in zip(begins, lengths) if pair[1]}:
                after = set(counts.target[edge : edge + number].tolist()) - met
                met |= after
                queue.extend(after)
        some = sorted(met)
        first, many = counts.first[some].astype(np.int64), counts.count[some]
        doing = np.where(many > 0, (first << 20) + many, -1)
        tree = self._tokens.trees.of_kinds(_numbered(_alike(doing, self._kinds)))
        walker = CharacterWalker(self._dfa, tree, self._kinds)
        return StateMasks(walker, walker.start(control, 0))


def _classes(points: Ints, dfa: ByteDfa | CountedByteDfa) -> Ints:
    """int64 [points]: the class of each."""
    table = np.array(dfa.intervals, dtype=np.int64).reshape(-1, 3)
    if not len(table):
        return np.full(len(points), dfa.classes, dtype=np.int64)
    row = np.searchsorted(table[:, 0], points, side="right") - 1
    inside = (row >= 0) & (points <= table[row, 1])
    return np.where(inside, table[row, 2], dfa.classes)


def _alike(doing: npt.NDArray[Any], kinds: Ints) -> Ints:
    """`kinds` as classes that differ somewhere in `doing` [places, classes + 1], of which the last one does
    nothing; -1: as that one."""
    label = np.unique(doing, axis=1, return_inverse=True)[1].reshape(-1)
    found: Ints = np.where(label[kinds] == label[-1], -1, label[kinds])
    return found


def _numbered(kinds: Ints) -> Ints:
    """The same, without gaps."""
    names = np.unique(kinds[kinds >= 0])
    return np.where(kinds >= 0, np.searchsorted(names, kinds), -1)


def _sealed(bits: Bits) -> Bits:
    bits.flags.writeable = False
    return bits
