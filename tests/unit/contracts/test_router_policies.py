"""What every router policy of the table promises: one of those it is given, whatever came before; and what
each of them is for."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.config.serving.router import RouterConfig
from runtime.server.router.policies import BLOCK_BYTES, POLICIES, Policy, PrefixTree, blocks_of


@dataclass
class Replica:
    name: str
    active: int = 0


def made(name: str, **options: object) -> Policy:
    return POLICIES.load(name)(RouterConfig.of({"worker": ["http://a"], **options}))


def block(letter: str) -> bytes:
    return letter.encode() * BLOCK_BYTES


PROMPTS = st.lists(st.sampled_from("abc"), max_size=4).map(lambda letters: b"".join(map(block, letters)))
STEPS = st.lists(
    st.tuples(PROMPTS, st.sets(st.integers(0, 3), min_size=1), st.booleans(), st.integers(0, 3)), max_size=40
)


@pytest.mark.parametrize("name", POLICIES.names())
@given(steps=STEPS)
def test_one_of_those_it_is_given(name: str, steps: list[tuple[bytes, set[int], bool, int]]) -> None:
    policy = made(name, prefix_bytes=BLOCK_BYTES * 5)
    replicas = [Replica(f"http://{index}") for index in range(4)]
    for prompt, able, fails, other in steps:
        before = [one.active for one in replicas]
        found = policy.choose(prompt, [replicas[index] for index in sorted(able)])
        assert replicas.index(found) in able
        assert [one.active for one in replicas] == before, "the counts are the pool's"
        found.active += 1
        if fails:
            policy.forget(replicas[other].name)


@pytest.mark.parametrize("name", POLICIES.names())
def test_requests_without_anything_in_common_are_spread(name: str) -> None:
    policy = made(name)
    replicas = [Replica(f"http://{index}") for index in range(4)]
    for index in range(400):
        prompt = f"{index:0{BLOCK_BYTES}}".encode()[::-1]
        policy.choose(prompt, replicas).active += 1
    assert all(90 <= one.active <= 110 for one in replicas)


def test_round_robin_takes_turns_also_when_one_is_away() -> None:
    policy = made("round_robin")
    a, b, c = replicas = [Replica(name) for name in "abc"]
    taken = [policy.choose(b"", replicas).name for _ in range(6)]
    assert taken == ["a", "b", "c"] * 2
    away = [policy.choose(b"", [a, c]).name for _ in range(4)]
    assert away == ["a", "c"] * 2
    assert policy.choose(b"", replicas) is b


def test_power_of_two_never_takes_the_busiest() -> None:
    policy = made("power_of_two")
    replicas = [Replica("a", 5), Replica("b", 1), Replica("c", 0)]
    taken = Counter(policy.choose(b"", replicas).name for _ in range(300))
    assert taken["a"] == 0
    assert taken["c"] > taken["b"] > 0


# -- cache_aware ---------------------------------------------------------------------------------------------


def test_a_prompt_goes_where_its_beginning_is() -> None:
    policy = made("cache_aware")
    replicas = [Replica(name) for name in "abcd"]
    homes = {letter: policy.choose(block(letter) * 8, replicas) for letter in "wxyz"}
    assert {one.name for one in homes.values()} == set("abcd"), "new ones are spread"
    for turn in range(5):
        for letter, home in homes.items():
            longer = block(letter) * 8 + block(str(turn)) * turn
            assert policy.choose(longer, replicas) is home


def test_an_overloaded_worker_is_passed_over() -> None:
    policy = made("cache_aware", balance_abs_threshold=4, balance_rel_threshold=2.0)
    a, b = Replica("a"), Replica("b")
    home = policy.choose(block("x") * 4, [a, b])
    other = b if home is a else a
    home.active = 4
    assert policy.choose(block("x") * 4, [a, b]) is home
    home.active = 5
    assert policy.choose(block("x") * 4, [a, b]) is other
    home.active, other.active = 8, 7
    assert policy.choose(block("x") * 4, [a, b]) is other, "both have seen it: the idler one"


def test_little_in_common_is_not_enough() -> None:
    policy = made("cache_aware", cache_threshold=0.5)
    a, b = Replica("a"), Replica("b")
    home = policy.choose(block("x") * 4, [a, b])
    other = b if home is a else a
    assert policy.choose(block("x") + block("y") * 3, [a, b]) is other
    assert policy.choose(block("x") * 3 + block("z"), [a, b]) is home


def test_what_a_worker_that_failed_had_is_forgotten() -> None:
    policy = made("cache_aware")
    a, b = Replica("a"), Replica("b")
    home = policy.choose(block("x") * 4, [a, b])
    policy.forget(home.name)
    home.active = 1
    assert policy.choose(block("x") * 4, [a, b]) is not home


def test_eight_programs_on_four_replicas() -> None:
    """Each replica's cache holds three of the eight long prefixes: at least twice round robin's hits."""

    def hits(name: str) -> int:
        policy, drawn, count = made(name), random.Random(5), 0
        replicas = [Replica(str(index)) for index in range(4)]
        caches = {one.name: PrefixTree(3 * 40) for one in replicas}
        waiting: list[Replica] = []
        for _ in range(400):
            prompt = block("abcdefgh"[drawn.randrange(8)]) * 38 + block(str(drawn.randrange(10))) * 2
            found = policy.choose(prompt, replicas)
            count += caches[found.name].match(blocks_of(prompt))
            caches[found.name].insert(blocks_of(prompt))
            found.active += 1
            waiting.append(found)
            if len(waiting) > 8:
                waiting.pop(drawn.randrange(8)).active -= 1
        return count

    assert hits("cache_aware") >= 2 * hits("round_robin")
    assert hits("cache_aware") > 400 * 40 * 0.9


@given(
    most=st.integers(1, 6),
    prompts=st.lists(st.lists(st.sampled_from([b"a", b"b", b"c"]), max_size=7), max_size=30),
    asked=st.lists(st.sampled_from([b"a", b"b", b"c"]), max_size=7),
)
def test_the_tree_keeps_the_prefixes_that_were_used_last(
    most: int, prompts: list[list[bytes]], asked: list[bytes]
) -> None:
    """Against a plain list of prefixes, the one used longest ago first; of one prompt the longest first."""
    tree, kept = PrefixTree(most), OrderedDict[tuple[bytes, ...], None]()
    for prompt in prompts:
        tree.insert(prompt)
        for length in range(min(len(prompt), most), 0, -1):
            kept.pop(tuple(prompt[:length]), None)
            kept[tuple(prompt[:length])] = None
        while len(kept) > most:
            kept.popitem(last=False)
        assert tree.size == len(kept) <= most
        for prefix in kept:
            assert tree.match(prefix) == len(prefix)
    expected = max((length for length in range(len(asked) + 1) if tuple(asked[:length]) in kept), default=0)
    assert tree.match(asked) == expected
    assert tree.match(asked) == expected, "matching changes nothing"


def test_blocks() -> None:
    assert blocks_of(b"x" * (BLOCK_BYTES - 1)) == []
    assert blocks_of(b"x" * BLOCK_BYTES) == [b"x" * BLOCK_BYTES]
    assert [len(one) for one in blocks_of(b"x" * (3 * BLOCK_BYTES + 5))] == [BLOCK_BYTES] * 3
