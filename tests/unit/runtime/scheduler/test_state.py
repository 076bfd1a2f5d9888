"""What the scheduler tells of itself, and pieces of streams."""

from __future__ import annotations

from typing import Any

import pytest


def test_counters(bench: Any, toy_grammars: Any) -> None:
    now = 0.0
    sim = bench(600, clock=lambda: now, max_running_requests=2, grammar=toy_grammars(ready=False))
    for number in range(4):
        sim.add(str(number), [1, 2, 3, 4, number], max_new_tokens=10, ignore_eos=True, stream=True)
    for _ in range(4):
        sim.tick()
        now += 0.5
    state = sim.scheduler.state()
    assert (state["num_running_reqs"], state["num_queue_reqs"], state["num_grammar_queue_reqs"]) == (2, 2, 0)
    assert state["max_total_num_tokens"] == 600
    assert state["num_used_tokens"] + state["free"] + state["evictable"] == 600
    assert state["token_usage"] == pytest.approx(state["num_used_tokens"] / 600)
    assert state["generation_tokens_total"] == 8
    assert state["gen_throughput"] > 0
    sim.run()
    sim.add("bad", [], max_new_tokens=1)
    sim.add("again", [1, 2, 3, 4, 0], max_new_tokens=2, ignore_eos=True)
    sim.run()
    state = sim.scheduler.state()
    cached = sum(sim.answer(rid).cached_tokens for rid in ("0", "1", "2", "3", "again"))
    expected = {
        "num_requests_total": 6,
        "prompt_tokens_total": 25,
        "cached_tokens_total": cached,
        "cache_hit_rate": cached / 25,
        "generation_tokens_total": 42,
        "computed_tokens_total": sim.runner.tokens,
        "num_running_reqs": 0,
        "num_used_tokens": 0,
        "num_retracted_reqs": 0,
        "num_paused_reqs": 0,
        "num_aborted_requests_total": 0,
        "gen_throughput": 0.0,
        "finished": 5,
        "failed": 1,
    }
    assert {name: state[name] for name in expected} == expected
    assert cached == 12


@pytest.mark.parametrize("interval", [1, 3, 100])
@pytest.mark.parametrize("logprob", [False, True])
def test_pieces_come_every_stream_interval(bench: Any, interval: int, logprob: bool) -> None:
    """The first at once, the last whatever is left."""
    sim = bench(600)
    sim.add(
        "a", [1], max_new_tokens=9, ignore_eos=True, stream=True, stream_interval=interval,
        return_logprob=logprob,
    )  # fmt: skip
    sim.run()
    sizes = [len(part.new_ids) for part in sim.news["a"]]
    assert sizes == {1: [1] * 9, 3: [1, 3, 3, 2], 100: [1, 8]}[interval]


def test_mixed_prefill_can_be_turned_off(bench: Any) -> None:
    for mixed in (True, False):
        sim = bench(600, mixed_prefill=mixed, chunked_prefill_size=10)
        sim.add("decoding", [1], max_new_tokens=30, ignore_eos=True, stream=True)
        sim.tick()
        sim.add("prompt", [2] * 35, max_new_tokens=1)
        pieces = [len(sim.tick()) for _ in range(4)]
        assert pieces == ([1, 1, 1, 2] if mixed else [0, 0, 0, 1])
        assert len(sim.run().answer("decoding").new_ids) == 30
        sim.empty()
