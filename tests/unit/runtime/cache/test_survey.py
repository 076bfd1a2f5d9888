"""What a prefix cache tells of itself: the most used nodes, never one without those above it, and no more
than was asked for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import runtime.cache.node
from runtime.cache.radix import NoCache, RadixCache
from runtime.plan import Run

PROMPTS = st.lists(
    st.tuples(st.sampled_from([None, "a"]), st.lists(st.integers(0, 2), min_size=1, max_size=9))
)


def filled(prompts: list[tuple[str | None, list[int]]]) -> RadixCache:
    """A cache that has seen these prompts; each counts as reused from its second time on."""
    cache = RadixCache()
    slot = 0
    for key, tokens in prompts:
        match = cache.match(tokens, key)
        cache.reuse(match)
        cache.insert(tokens, [Run(slot, len(tokens))], key)
        slot += len(tokens)
    return cache


@given(PROMPTS, st.integers(1, 12), st.integers(0, 4))
def test_a_survey_is_a_top_of_the_tree(
    prompts: list[tuple[str | None, list[int]]], most: int, ids: int
) -> None:
    cache = filled(prompts)
    before = sorted((node.id, tuple(node.tokens)) for node in cache.nodes())
    tree = cache.survey(most, ids)
    whole = {node.id: node for node in cache.nodes()}
    assert len(tree.nodes) == min(most, len(whole))
    listed: dict[int, runtime.cache.node.Prefix] = {}
    for node in tree.nodes:
        real = whole[node.id]
        assert node.parent in listed or node.parent == 0 == node.start
        assert node.ids == list(real.tokens[:ids])
        assert (node.tokens, node.start, node.hits) == (real.length, real.start, real.hits)
        assert node.children == len(real.children)
        assert node.idle >= 0
        listed[node.id] = node
    if most >= len(whole):
        assert tree.left_out == 0
        assert sum(node.tokens for node in tree.nodes) == tree.evictable + tree.protected
    elif whole:
        assert tree.left_out > 0
    assert [node.hits for node in tree.nodes] == sorted((n.hits for n in tree.nodes), reverse=True)
    assert before == sorted((node.id, tuple(node.tokens)) for node in cache.nodes())


def test_namespaces_are_told_apart() -> None:
    tree = filled([(None, [1, 2]), ("a", [1, 2])]).survey(10, 2)
    assert sorted(node.namespace for node in tree.nodes) == [0, 1]


def test_locks_and_time_are_told() -> None:
    cache = filled([(None, [1, 2]), (None, [3, 4])])
    cache.lock(cache.match([3, 4]))
    one, other = cache.survey(10, 1).nodes
    assert (one.ids, one.locks, one.idle) == ([3], 1, 0)
    assert (other.ids, other.locks) == ([1], 0)
    assert other.idle > 0


def test_a_wide_tree_is_not_looked_at_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime.cache.node, "EXAMINED", 10)
    tree = filled([(None, [number]) for number in range(100)]).survey(50, 1)
    assert len(tree.nodes) == 10
    assert tree.left_out == 90


def test_no_cache_holds_nothing() -> None:
    assert NoCache().survey(10, 1).nodes == []
