"""Masks by the C library are those by numpy: of any automaton, vocabulary and state; and odd trees do no
harm."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.grammar.automata.dfa import DEAD, ByteDfa, compile_choices, compile_regex
from runtime.grammar.masks import native_walk
from runtime.grammar.masks.merged_trie import MergedTries, merged, run_table
from runtime.grammar.masks.native_walk import NativeWalk
from runtime.grammar.masks.token_automaton import WIDE, TokenAutomaton, TokenSpace
from runtime.grammar.masks.token_bits import TokenBits
from runtime.grammar.masks.trie import TokenTrie
from runtime.protocol.vocabulary import Vocabulary
from tests.exploring import tries
from tests.long.runtime.grammar.automata.test_repeats import patterns

pytestmark = pytest.mark.skipif(native_walk.library() is None, reason="there is no C compiler")

SINGLES = tuple(bytes([byte]) for byte in range(256))
WIDER = ["[^x]{0,5}x", "[a-zé]{2,4}(?:日|東)?", r"(?s).{1,3}", r'"(?:[^"\\]|\\["n]){0,6}"', "[^é]*", "()"]
TEXTS = st.lists(st.text('aabbcxé日東"\\\n', max_size=5).map(str.encode) | st.binary(max_size=3), max_size=40)


def states_of(dfa: ByteDfa, texts: list[bytes]) -> Iterator[int]:
    """Those between characters, and those within them that the texts come to."""
    yield from range(0, len(dfa.delta) * dfa.nodes, dfa.nodes)
    for data in texts:
        for start in range(0, min(len(dfa.delta), 4) * dfa.nodes, dfa.nodes):
            state = start
            for byte in data:
                if (state := dfa.step(state, byte)) == DEAD:
                    break
                yield state


@settings(max_examples=tries(150), deadline=None)
@given(patterns | st.sampled_from(WIDER), TEXTS, st.sets(st.integers(0, 39), max_size=3))
def test_both_walks_find_the_same(pattern: str, texts: list[bytes], silent: set[int]) -> None:
    """The lists hold equal texts, empty ones, parts of characters, and now and then nothing."""
    trie = TokenTrie(Vocabulary(tuple(texts), frozenset(n for n in silent if n < len(texts)), frozenset()))
    dfa = compile_regex(pattern)
    walk = NativeWalk(native_walk.library(), dfa)
    runs = [(run, merged(trie, dfa.kind_of, run_table(dfa.utf8, run.classes))) for run in dfa.runs(WIDE)]
    for state in sorted(set(states_of(dfa, texts))):
        found = walk.mask(trie.native, [state])
        assert len(found) == -(-len(texts) // 32)
        assert TokenBits.ids(found).tolist() == sorted(trie.reach(dfa, state).ids.tolist())
        for run, tree in runs if state % dfa.nodes == 0 else ():
            chain = [at * dfa.nodes for at in run.chain(state // dfa.nodes, tree.roots)]
            if chain:
                assert walk.mask(tree.native, chain).tolist() == tree.reach(dfa, chain).tolist()


def test_a_vocabulary_of_nothing_and_one_of_ends_alone() -> None:
    dfa = compile_regex("[a-z]{2,30}")
    for vocabulary in (Vocabulary(()), Vocabulary((b"", b"a"), frozenset({1}), frozenset({0}))):
        trie = TokenTrie(vocabulary)
        run = dfa.runs(WIDE)[0]
        tree = merged(trie, dfa.kind_of, run_table(dfa.utf8, run.classes))
        walk = NativeWalk(native_walk.library(), dfa)
        assert not walk.mask(trie.native, [0]).any()
        assert not walk.mask(tree.native, run.chain(0, tree.roots)).any()


@pytest.mark.parametrize("dfa", [compile_choices(["a", "ab"]), compile_regex("a|ab")], ids=["bytes", "text"])
def test_a_state_that_nothing_follows(dfa: ByteDfa) -> None:
    words = Vocabulary((*SINGLES, b"ab", b"ab", b""), frozenset(), frozenset({258}))
    automaton = TokenAutomaton(dfa, TokenSpace(words))
    last = dfa.walk(0, b"ab")
    assert automaton.mask(last).allowed.tolist() == [258]  # type: ignore[union-attr]
    assert automaton.mask(0).allowed.tolist() == [97, 256, 257]  # type: ignore[union-attr]


class Store:
    """One that gives out what it was given."""

    def __init__(self, *arrays: np.ndarray) -> None:
        self.arrays = arrays

    def load(self, key: bytes) -> tuple[np.ndarray, ...]:
        return self.arrays

    def save(self, key: bytes, arrays: object) -> None:
        pass


def test_a_stored_tree_that_points_outside_is_not_believed() -> None:
    words = Vocabulary((*SINGLES, b"abc", b"a,b", b",,"))
    trie, dfa = TokenTrie(words), compile_regex("[a-z]{0,30},*")
    run = run_table(dfa.utf8, dfa.runs(WIDE)[0].classes)
    good = merged(trie, dfa.kind_of, run)
    roots = np.array([good.roots])
    whole = [good.byte, good.child_count, roots, good.node_of]

    def stored(arrays: list[np.ndarray]) -> bool:
        """Whether it is taken as it is, not made anew."""
        tree = MergedTries(trie, store=Store(*arrays)).of(dfa.kind_of, run)  # type: ignore[arg-type]
        assert tree.byte is arrays[0] or np.array_equal(tree.node_of, good.node_of)
        return tree.byte is arrays[0]

    assert stored(whole)
    for which, place, value in (
        (0, 1, 256), (0, 1, -1), (1, 0, -5), (1, 0, 1 << 30), (2, 0, 0), (2, 0, -1), (2, 0, 1 << 40),
        (3, 0, good.nodes + 1), (3, 0, -1),
    ):  # fmt: skip
        wrong = [array.copy() for array in whole]
        before = int(wrong[which][place])
        wrong[which][place] = value
        if which == 1:  # the sum stays what it was
            wrong[1][-1] += before - value
        assert not stored(wrong), (which, value)
