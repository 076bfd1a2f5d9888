"""Sessions: trees of turns, what they cost, and what is refused."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.protocol.errors import BadRequest
from tests.exploring import tries


def add(sim: Any, name: str, tokens: list[int], new: int = 3, **session: Any) -> None:
    sim.add(name, tokens, max_new_tokens=new, ignore_eos=True, session_params={"id": "s", **session})


def turn(sim: Any, name: str, tokens: list[int], new: int = 3, **session: Any) -> Any:
    sim.news.pop(name, None)  # of an earlier one with this id, which has ended
    add(sim, name, tokens, new, **session)
    return sim.run().answer(name)


def plain(sim: Any, tokens: list[int], new: int = 3) -> list[int]:
    """What the same prompt gives without a session."""
    name = f"plain {len(sim.news)}"
    sim.add(name, tokens, max_new_tokens=new, ignore_eos=True, extra_key="elsewhere")
    return sim.run().answer(name).new_ids


def refused(answer: Any, word: str) -> bool:
    error = answer.finish.error
    assert error["code"] in ("bad_request", "prompt_too_long"), error
    assert word in f"{error['where']}: {error['message']}"
    return True


@pytest.fixture
def sim(bench: Any) -> Any:
    made = bench(800)
    assert made.scheduler.open_session("s") == "s"
    return made


def test_turns_go_on_from_one_another_and_branch(sim: Any) -> None:
    first = turn(sim, "1", [1, 2, 3])
    whole = [1, 2, 3, *first.new_ids]
    for name, tokens in (("1a", [4, 5]), ("1b", [6])):
        answer = turn(sim, name, tokens, rid="1")
        assert answer.prompt_tokens == len(whole) + len(tokens)
        assert answer.cached_tokens >= len(whole) - 1, "earlier turns are in the cache"
        assert answer.new_ids == plain(sim, [*whole, *tokens])
    assert turn(sim, "1a2", [7], rid="1a").prompt_tokens == len(whole) + 2 + 3 + 1
    assert turn(sim, "other", [1, 2]).prompt_tokens == 2, "without rid a turn follows nothing"
    sim.scheduler.close_session("s")
    sim.empty()


@pytest.mark.parametrize(
    ("fields", "base"),
    [
        ({}, slice(None)),
        ({"offset": 0}, slice(None)),
        ({"offset": 2}, slice(0, 2)),
        ({"offset": -1}, slice(0, -1)),
        ({"offset": 7}, slice(None)),
        ({"drop_previous_output": True}, slice(0, 4)),
        ({"drop_previous_output": True, "offset": 3}, slice(0, 3)),
        ({"drop_previous_output": True, "offset": -1}, slice(0, 3)),
    ],
)
def test_how_much_of_the_turn_before_is_kept(sim: Any, fields: dict[str, Any], base: slice) -> None:
    whole = [1, 2, 3, 4, *turn(sim, "1", [1, 2, 3, 4]).new_ids]
    answer = turn(sim, "2", [8, 9], rid="1", **fields)
    assert answer.new_ids == plain(sim, [*whole[base], 8, 9])
    assert answer.prompt_tokens == len(whole[base]) + 2
    third = turn(sim, "3", [5], rid="2")
    assert third.new_ids == plain(sim, [*whole[base], 8, 9, *answer.new_ids, 5])


def test_replace_drops_what_followed(sim: Any) -> None:
    whole = [1, 2, *turn(sim, "1", [1, 2]).new_ids]
    turn(sim, "2", [3], rid="1")
    add(sim, "2 running", [4], 50, rid="1")
    for _ in range(4):
        sim.tick()
    answer = turn(sim, "new", [5], rid="1", replace=True)
    assert answer.new_ids == plain(sim, [*whole, 5])
    assert sim.answer("2 running").finish.error["message"] == "its turn was replaced"
    assert refused(turn(sim, "lost", [6], rid="2"), "no turn '2'")
    again = turn(sim, "fresh", [9], replace=True)
    assert again.prompt_tokens == 1
    assert refused(turn(sim, "lost too", [6], rid="1"), "no turn '1'")
    sim.scheduler.close_session("s")
    sim.empty()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_running_turn_can_be_replaced_and_not_followed(bench: Any, overlap: bool) -> None:
    sim = bench(800, overlap=overlap)
    sim.scheduler.open_session("s")
    add(sim, "1", [1, 2], 50)
    for _ in range(6):
        sim.tick()
    add(sim, "too early", [3], rid="1")
    add(sim, "instead", [3], rid="1", replace=True)
    sim.run()
    assert refused(sim.answer("too early"), "not finished")
    cut = sim.answer("1")
    assert cut.finish.error["code"] == "aborted"
    kept = sim.answer("instead").prompt_tokens - 3
    assert 4 <= kept <= len(cut.new_ids)
    assert sim.answer("instead").new_ids == plain(sim, [1, 2, *cut.new_ids[:kept], 3])
    sim.scheduler.close_session("s")
    sim.empty()


@pytest.mark.parametrize(
    ("params", "word"),
    [
        ({"id": "nobody"}, "no session 'nobody'"),
        ({}, "session_params"),
        ({"id": "s", "rid": "nobody"}, "no turn 'nobody'"),
        ({"id": "s", "offest": 3}, "offest"),
        ({"id": "s", "offset": "3"}, "offset"),
        ({"id": 7}, "id"),
        ({"id": "s", "rid": "1", "offset": 9}, "has 4 tokens"),
        ({"id": "s", "rid": "1", "offset": -5}, "has 4 tokens"),
    ],
)
def test_what_is_wrong_is_said(sim: Any, params: dict[str, Any], word: str) -> None:
    turn(sim, "1", [1], 3)
    sim.add("bad", [1], max_new_tokens=1, session_params=params)
    assert refused(sim.run().answer("bad"), word)
    assert turn(sim, "good", [2], rid="1").finish.type == "length", "nothing was harmed"


def test_opening_and_closing(sim: Any) -> None:
    scheduler = sim.scheduler
    assert scheduler.open_session() != scheduler.open_session()
    for arguments, word in (
        (("s",), "open already"), (("",), "empty"), (("t", -1), "at least 0"), (("t", 0, 0.0), "positive"),
    ):  # fmt: skip
        with pytest.raises(BadRequest, match=word):
            scheduler.open_session(*arguments)
    add(sim, "running", [1], 50)
    sim.tick()
    scheduler.close_session("s")
    assert sim.run().answer("running").finish.error["message"] == "its session was closed"
    with pytest.raises(BadRequest, match="no session"):
        scheduler.close_session("s")
    scheduler.open_session("s")
    assert turn(sim, "running", [1]).prompt_tokens == 1, "a new session knows nothing of the old one"


def test_limits(bench: Any) -> None:
    now = 0.0
    sim = bench(800, clock=lambda: now, max_sessions=2)
    sim.scheduler.open_session("s", 10, 5.0)
    sim.scheduler.open_session("t")
    with pytest.raises(BadRequest, match="2 sessions are open"):
        sim.scheduler.open_session("u")
    turn(sim, "1", [1, 2, 3], 3)
    assert refused(turn(sim, "2", [1, 2], 3, rid="1"), "capacity of 10")
    assert turn(sim, "2", [1, 2], 2, rid="1").finish.type == "length"
    now = 4.9
    sim.tick()
    assert sim.scheduler.state()["num_sessions"] == 2
    now = 5.0
    sim.tick()
    assert sim.scheduler.state()["num_sessions"] == 1
    assert refused(turn(sim, "3", [1], 1), "no session 's'")
    sim.scheduler.open_session("u")


def test_a_streaming_session_keeps_its_last_turn(bench: Any) -> None:
    sim = bench(100)
    sim.scheduler.open_session("s", streaming=True)
    first = turn(sim, "1", list(range(20)), 5)
    sim.add("hungry", [30] * 50, max_new_tokens=20, ignore_eos=True)
    sim.run()
    answer = turn(sim, "2", [7], 5)
    assert answer.prompt_tokens == 26
    assert answer.cached_tokens == 24, "nobody could evict it"
    assert answer.new_ids == plain(sim, [*range(20), *first.new_ids, 7], 5)
    sim.add("all of it", [29] * 90, max_new_tokens=10, ignore_eos=True)
    assert sim.run().answer("all of it").finish.type == "length", "but it does not stand in anybody's way"
    for session, word in (
        ({"rid": "1"}, "last turn"),
        ({"rid": "2", "offset": 3}, "only appends"),
        ({"replace": True}, "only appends"),
    ):  # fmt: skip
        assert refused(turn(sim, "bad", [1], 1, **session), word)
    assert turn(sim, "3", [7], 1, rid="2").finish.type == "length"
    add(sim, "4", [1], 30)
    add(sim, "5", [1], 1)
    sim.run()
    assert refused(sim.answer("5"), "not finished")
    sim.scheduler.check()
    assert sim.scheduler.flush_cache()
    sim.scheduler.close_session("s")
    sim.empty()


def test_retraction_before_a_kept_turn_is_never_needed(bench: Any) -> None:
    sim = bench(100, conservativeness=0.01)
    sim.scheduler.open_session("s", streaming=True)
    turn(sim, "1", list(range(30)), 10)
    for rid in "ab":
        sim.add(rid, [1], max_new_tokens=45, min_new_tokens=45)
    sim.run()
    assert sim.scheduler.state()["retractions"] == 0
    sim.scheduler.close_session("s")
    sim.empty()


@settings(max_examples=tries(25), deadline=None)
@given(seed=st.integers(0, 10**6), page=st.sampled_from([1, 4]), streaming=st.booleans())
def test_random_conversations(seed: int, page: int, streaming: bool, make_bench: Any) -> None:
    """Against a model of the tree: a dictionary from rid to all its tokens."""
    rng = random.Random(seed)
    sim = make_bench(
        300, page_size=page, overlap=rng.random() < 0.5, eviction_policy=rng.choice(["lru", "lfu"])
    )
    sim.scheduler.open_session("s", streaming=streaming)
    whole: dict[str, list[int]] = {}
    prompts: dict[str, int] = {}
    last = None
    for number in range(12):
        own = [rng.randrange(30) for _ in range(rng.randrange(1, 5))]
        fields: dict[str, Any] = {}
        base: list[int] = []
        if streaming:
            base = whole[last] if last else []
        elif whole and rng.random() < 0.8:
            fields["rid"] = rng.choice(sorted(whole))
            base = whole[fields["rid"]]
            if rng.random() < 0.3:
                fields["drop_previous_output"] = True
                base = base[: prompts[fields["rid"]]]
            if rng.random() < 0.3:
                fields["offset"] = rng.randrange(1, len(base) + 1)
                base = base[: fields["offset"]]
        last = str(number)
        answer = turn(sim, last, own, rng.randrange(1, 6), **fields)
        assert answer.new_ids == plain(sim, [*base, *own], len(answer.new_ids))
        whole[last], prompts[last] = [*base, *own, *answer.new_ids], len(base) + len(own)
    sim.scheduler.close_session("s")
    sim.empty()
