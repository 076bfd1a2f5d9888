"""The radix cache against a brute-force model: a dictionary from every cached prefix, page by page, to its
slots."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from runtime.cache.node import Match
from runtime.cache.radix import NoCache, RadixCache
from runtime.plan import Run
from runtime.protocol.errors import InternalFault
from tests.exploring import tries

TOKENS = st.lists(st.integers(0, 2), max_size=24)
KEYS = st.sampled_from([None, "", "a"])


def slots_of(runs: Any) -> list[int]:
    return [slot for start, length in runs for slot in range(start, start + length)]


class CacheMachine(RuleBasedStateMachine):
    @initialize(page=st.sampled_from([1, 1, 2, 3]))
    def start(self, page: int) -> None:
        self.page = page
        self.cache = RadixCache(page)
        self.model: dict[tuple[str | None, tuple[int, ...]], list[int]] = {}
        self.locked: list[tuple[Match, str | None, tuple[int, ...]]] = []
        self.next_slot = 0

    def prefixes(self, key: str | None, tokens: Any) -> list[tuple[str | None, tuple[int, ...]]]:
        """The cached prefixes of `tokens`, shortest first."""
        found = []
        for end in range(self.page, len(tokens) + 1, self.page):
            if (key, tuple(tokens[:end])) not in self.model:
                break
            found.append((key, tuple(tokens[:end])))
        return found

    def expect(self, match: Match, key: str | None, tokens: Any) -> None:
        names = self.prefixes(key, tokens)
        assert match.length == len(names) * self.page == sum(node.length for node in match.nodes)
        held = [slot for node in match.nodes for slot in slots_of(node.runs)]
        assert held == [slot for name in names for slot in self.model[name]]

    def fresh(self, pages: int, gap: bool) -> list[Run]:
        """Slots nobody has; with a gap they are not adjacent to the last ones."""
        self.next_slot += self.page * gap
        run = Run(self.next_slot, pages * self.page)
        self.next_slot += run.length
        return [run] if pages else []

    @rule(tokens=TOKENS, key=KEYS)
    def match(self, tokens: list[int], key: str | None) -> None:
        assert self.cache.probe(tokens, key) == len(self.prefixes(key, tokens)) * self.page
        self.expect(self.cache.match(tokens, key), key, tokens)

    @rule(tokens=TOKENS, key=KEYS, keep=st.integers(0, 8), gap=st.booleans(), data=st.data())
    def insert(self, tokens: list[int], key: str | None, keep: int, gap: bool, data: st.DataObject) -> None:
        """Hand over a prefix: some of its cached part with the cache's own slots, the rest with fresh
        ones."""
        held = None
        if self.locked and data.draw(st.booleans()):
            held, key, head = self.locked[data.draw(st.integers(0, len(self.locked) - 1))]
            tokens = [*head, *tokens]
        tokens = tokens[: len(tokens) - len(tokens) % self.page]
        known = self.prefixes(key, tokens)
        least = held.length // self.page if held else 0
        own = known[: max(least, min(keep, len(known)))]
        runs = [Run(slot, 1) for name in own for slot in self.model[name]]
        given = slots_of(runs) + slots_of(fresh := self.fresh(len(tokens) // self.page - len(own), gap))
        match, back = self.cache.insert(tokens, [*runs, *fresh], key, held)
        duplicates: list[int] = []
        for index in range(0, len(tokens), self.page):
            name = (key, tuple(tokens[: index + self.page]))
            offered = given[index : index + self.page]
            if self.model.setdefault(name, offered) != offered:
                duplicates += offered
        assert slots_of(back) == duplicates
        self.expect(match, key, tokens)
        if held is not None:  # as promised by who passes it: lock what came back, unlock what was held
            self.cache.lock(match)
            self.cache.unlock(held)
            at = next(i for i, entry in enumerate(self.locked) if entry[0] is held)
            self.locked[at] = (match, key, tuple(tokens))

    @rule(tokens=TOKENS, key=KEYS)
    def lock(self, tokens: list[int], key: str | None) -> None:
        match = self.cache.match(tokens, key)
        self.cache.lock(match)
        self.locked.append((match, key, tuple(tokens[: match.length])))

    @precondition(lambda self: self.locked)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        match, _, _ = self.locked.pop(data.draw(st.integers(0, len(self.locked) - 1)))
        self.cache.unlock(match)

    def protected(self) -> set[tuple[str | None, tuple[int, ...]]]:
        return {
            (key, tokens[:end])
            for _, key, tokens in self.locked
            for end in range(self.page, len(tokens) + 1, self.page)
        }

    @rule(count=st.integers(0, 30))
    def evict(self, count: int) -> None:
        free = len(self.model) - len(self.protected())
        gone = slots_of(self.cache.evict(count))
        self.drop(gone)
        assert len(gone) >= min(count, free * self.page)
        assert len(gone) < count + self.page, "no more than was asked for, in whole pages"

    @rule()
    def reset(self) -> None:
        self.drop(slots_of(self.cache.reset()))
        assert set(self.model) == self.protected()

    def drop(self, gone: list[int]) -> None:
        assert len(gone) == len(set(gone))
        names = {slot: name for name, slots in self.model.items() for slot in slots}
        dropped = {names[slot] for slot in gone}
        assert len(dropped) * self.page == len(gone)
        assert not dropped & self.protected()
        for name in dropped:
            del self.model[name]

    @invariant()
    def sizes(self) -> None:
        assert self.cache.protected == len(self.protected()) * self.page
        assert self.cache.evictable == len(self.model) * self.page - self.cache.protected
        for key, tokens in self.model:  # what is left is closed under "is a prefix of"
            assert len(tokens) == self.page or (key, tokens[: -self.page]) in self.model
        for match, key, tokens in self.locked:
            held = [slot for node in self.cache.path(match) for slot in slots_of(node.runs)]
            assert held == [slot for name in self.prefixes(key, tokens) for slot in self.model[name]]
            assert len(held) == match.length


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=tries(120), stateful_step_count=30, deadline=None)


def test_the_least_recently_used_leaf_goes_first() -> None:
    cache = RadixCache()
    for first, start in ((1, 0), (2, 10), (3, 20)):
        cache.insert([first] * 4, [Run(start, 4)])
    cache.match([1, 1])
    cache.match([1, 1, 1, 1])
    assert cache.evict(4) == [Run(10, 4)]
    cache.match([3] * 4)
    assert cache.evict(4) == [Run(2, 2), Run(0, 2)], "the leaf, then the parent it leaves childless"


def test_the_last_leaf_is_only_shortened() -> None:
    cache = RadixCache(page_size=4)
    cache.insert(list(range(16)), [Run(0, 16)])
    assert cache.evict(5) == [Run(8, 8)]
    assert cache.match(list(range(16))).length == 8


def test_chunks_of_one_reader_are_one_node() -> None:
    cache = RadixCache()
    match, _ = cache.insert([1, 2], [Run(0, 2)])
    cache.lock(match)
    for end in (4, 6, 8):
        longer, _ = cache.insert(list(range(1, end + 1)), [Run(0, end)], None, match)
        cache.lock(longer)
        cache.unlock(match)
        match = longer
    (node,) = cache.path(match)
    assert node.runs == (Run(0, 8),)
    twin = cache.match(list(range(1, 9)))
    cache.lock(twin)
    longer, _ = cache.insert(list(range(1, 10)), [Run(0, 9)], None, match)
    assert [node.length for node in longer.nodes] == [8, 1], "another one reads it: it must not grow"
    cache.unlock(twin)
    other = cache.match([1, 2, 3])
    cache.lock(other)
    grown, _ = cache.insert(list(range(1, 11)), [Run(0, 10)], None, match)
    assert [node.length for node in grown.nodes] == [3, 5, 2]


def test_a_split_keeps_the_reader_s_slots() -> None:
    cache = RadixCache()
    cache.insert(list(range(10)), [Run(0, 10)])
    held = cache.match(list(range(10)))
    cache.lock(held)
    version = cache.version
    assert cache.match([0, 1, 2, 7]).length == 3
    assert cache.version > version
    assert [node.runs for node in cache.path(held)] == [(Run(0, 3),), (Run(3, 7),)]
    assert (cache.protected, cache.evictable) == (10, 0)
    cache.unlock(held)
    assert (cache.protected, cache.evictable) == (0, 10)


def test_misuse_is_named() -> None:
    cache = RadixCache(page_size=2)
    with pytest.raises(InternalFault, match="3 tokens with 4 slots"):
        cache.insert([1, 2, 3], [Run(0, 4)])
    with pytest.raises(InternalFault, match="page size 2"):
        cache.insert([1, 2, 3], [Run(0, 3)])
    match, _ = cache.insert([1, 2], [Run(0, 2)])
    with pytest.raises(InternalFault, match="more often"):
        cache.unlock(match)


def test_keeping_nothing() -> None:
    cache = NoCache()
    match, back = cache.insert([1, 2], [Run(0, 2)])
    assert (match.length, back) == (0, []), "the slots stay the caller's"
    cache.lock(match)
    assert (cache.match([1, 2]).length, cache.probe([1, 2]), cache.path(match)) == (0, 0, ())
    assert (cache.evict(5), cache.reset(), cache.evictable, cache.protected) == ([], [], 0, 0)
    cache.unlock(match)
