"""The overlapped loop gives every request exactly what the plain one gives it; and it does overlap."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.plan import StepPlan
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import EngineDead
from runtime.scheduler.loop import Loop
from tests.exploring import tries

SPECS = ["yes|no", "abc", "the|there|then", "in|inging", "abcxyz|abczz", "st ab a|st abc"]


def make_request(rng: random.Random, size: int, bound: float) -> dict[str, Any]:
    stem = [[], [1, 2, 3] * 10, [4, 5] * 20][rng.randrange(3)]
    new = rng.choice([0, 1, 2, 5, 20, 30])
    fields: dict[str, Any] = {
        "prompt": [*stem, *(rng.randrange(size) for _ in range(rng.randrange(1, 20)))],
        "max_new_tokens": new,
        "ignore_eos": rng.random() < 0.4,
        "stream": rng.random() < 0.6,
        "stream_interval": rng.choice([1, 1, 3]),
        "priority": rng.randrange(3),
        "min_new_tokens": rng.choice([0, 0, new // 2, new]),
        "extra_key": rng.choice([None, None, "", "x"]),
    }
    if rng.random() < 0.3:
        fields["stop"] = ("the", "ab", "z")
    if rng.random() < 0.3:
        fields["stop_token_ids"] = (rng.randrange(size), rng.randrange(size))
    if rng.random() < 0.3:
        fields |= {"return_logprob": True, "logprob_start_len": rng.choice([-1, 0]), "top_logprobs_num": 1}
    if rng.random() < bound:
        fields["constraint"] = Constraint("regex", rng.choice(SPECS))
    return fields


def play(
    make_bench: Any, toy_grammars: Any, seed: int, overlap: bool, **more: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """One random trace; the answers put together, and what was sent. more: of the config."""
    rng = random.Random(seed)
    config = {
        "page_size": rng.choice([1, 1, 4]),
        "chunked_prefill_size": rng.choice([3, 16, 2048]),
        "max_running_requests": rng.choice([2, 6, 64]),
        "mixed_prefill": rng.random() < 0.7,
        "policy": rng.choice(["lpm", "fcfs", "lof", "dfs-weight", "priority", "random"]),
        "preemption_threshold": 1,
        "radix_cache": rng.random() < 0.8,
        "liveness": rng.random() < 0.5,
    }
    slots = rng.choice([100, 160, 1000])
    grammars = toy_grammars(ready=False)
    pace = random.Random(seed)
    now, slow = 0.0, pace.choice([0.0, 2.0, 20.0])

    def clock() -> float:
        nonlocal now
        now += 1e-4 * pace.random()
        return now

    def takes(plan: StepPlan) -> tuple[float, float]:
        nonlocal now
        hidden = 1e-3 * (2 + 0.1 * len(plan.rows) + pace.random())
        now += hidden + 1e-3 * slow * any(row.masked for row in plan.rows)
        return hidden, 1.2 * hidden

    sim = make_bench(slots, grammar=grammars, overlap=overlap, clock=clock, **config, **more)
    sim.runner.takes = takes
    size = len(sim.vocabulary)
    bound, over = rng.choice([0.25, 0.6]), rng.choice([0.0, 0.3, 0.8, 1.0])
    ends = random.Random(seed)
    sim.runner.over = lambda: ends.random() < over
    sent = {str(number): make_request(rng, size, bound) for number in range(20)}
    arrivals = {rid: rng.randrange(25) for rid in sent}
    aborts = {rid: rng.randrange(30) for rid in sent if rng.random() < 0.15}
    pauses = {rng.randrange(30): rng.choice(["in_place", "retract"]) for _ in range(2)}
    for tick in range(5000):
        for rid in sent:
            if arrivals[rid] == tick:
                sim.add(rid, **sent[rid])
            if aborts.get(rid) == tick:
                sim.scheduler.abort(rid)
        if tick in pauses:
            sim.scheduler.pause(pauses[tick])
        if tick - 3 in pauses:
            sim.scheduler.resume()
        grammars.release(1 + tick % 2)
        sim.tick()
        if tick > 40 and not sim.scheduler.busy:
            break
    sim.scheduler.resume()
    sim.run()
    sim.empty()
    answers = {}
    for rid in sent:
        pieces = [len(part.new_ids) for part in sim.news[rid]]
        answer = sim.answer(rid)
        answers[rid] = answer, pieces, aborts.get(rid)
    return answers, sent


@settings(max_examples=tries(60), deadline=None)
@given(seed=st.integers(0, 10**9))
def test_the_same_answers_as_the_plain_loop(seed: int, make_bench: Any, toy_grammars: Any) -> None:
    plain, sent = play(make_bench, toy_grammars, seed, False)
    overlapped, _ = play(make_bench, toy_grammars, seed, True)
    for rid, (one, pieces, aborted) in plain.items():
        other, others, _ = overlapped[rid]
        ends = {one.finish.type, other.finish.type}
        if "abort" in ends:  # where an abort falls may differ by a step
            assert aborted is not None
            shorter, longer = sorted((one.new_ids, other.new_ids), key=len)
            assert longer[: len(shorter)] == shorter
            continue
        assert (one.new_ids, one.finish) == (other.new_ids, other.finish)
        assert one.output_logprobs == other.output_logprobs
        assert one.output_top_logprobs == other.output_top_logprobs
        assert one.input_logprobs == other.input_logprobs
        assert (one.completion_tokens, one.prompt_tokens, one.decode_steps, one.jumped_tokens) == (
            other.completion_tokens, other.prompt_tokens, other.decode_steps, other.jumped_tokens,
        )  # fmt: skip
        if not (sent[rid].get("return_logprob") or "constraint" in sent[rid]):
            # Else a piece may wait for its log-probabilities, and so for what others leave of the chunk.
            assert pieces == others


class Watched:
    """Notes what happens while a pass runs."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.log: list[str] = []

    def launch(self, plan: StepPlan) -> None:
        self.log.append("launch")
        self.runner.launch(plan)

    def done(self) -> bool:
        return bool(self.runner.done())

    def finish(self, masks: Any) -> Any:
        self.log.append("finish")
        return self.runner.finish(masks)


def test_news_are_made_and_requests_taken_in_while_a_pass_runs(bench: Any) -> None:
    sim = bench(500, overlap=True)
    watched = sim.runner = Watched(sim.runner)
    sim.add("a", [1, 2, 3], max_new_tokens=4, ignore_eos=True, stream=True)
    assert sim.tick() == [], "the first pass has just begun"
    for number in range(3):
        (news,) = [one for one in sim.tick() if one.rid == "a"]
        watched.log.append(f"news {len(news.new_ids)}")
        assert sim._loop.in_flight
        sim.add(f"late {number}", [number], max_new_tokens=1)
    assert watched.log == ["launch", *["finish", "launch", "news 1"] * 3]
    sim.run()
    assert not sim._loop.in_flight


def test_an_abort_during_a_pass_takes_effect_at_its_end(bench: Any) -> None:
    sim = bench(500, overlap=True)
    sim.add("a", [1, 2], max_new_tokens=50, ignore_eos=True, stream=True)
    sim.add("b", [1, 3], max_new_tokens=4, ignore_eos=True)
    sim.tick()
    sim.tick()
    assert sim.scheduler.abort("a") == 1
    assert [(one.rid, one.finish.error["code"]) for one in sim.tick() if one.finish] == [("a", "aborted")]
    assert len(sim.run().answer("b").new_ids) == 4
    sim.empty()


@pytest.mark.parametrize("how", ["launch", "finish"])
def test_a_failing_pass_fails_its_requests_only(bench: Any, how: str) -> None:
    sim = bench(500, overlap=True, max_running_requests=2)
    for rid in "abc":
        sim.add(rid, [ord(rid) % 30, 2], max_new_tokens=6, ignore_eos=True)
    whole = getattr(sim.runner, how)
    calls = 0

    def broken(argument: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            if how == "finish":
                whole(argument)
            raise RuntimeError("device lost")
        return whole(argument)

    setattr(sim.runner, how, broken)
    sim.run()
    assert [sim.answer(rid).finish.type for rid in "abc"] == ["abort", "abort", "length"]
    assert "device lost" in sim.answer("a").finish.error["message"]
    sim.empty()


def test_stop_answers_everybody_once(bench: Any, toy_grammars: Any) -> None:
    sim = bench(500, grammar=toy_grammars(ready=False), overlap=True, max_running_requests=1)
    sim.add("running", [1], max_new_tokens=50, ignore_eos=True)
    sim.add("waiting", [2], max_new_tokens=50)
    sim.add("compiling", [3], constraint=Constraint("regex", "a"))
    loop = Loop(sim.scheduler, sim.runner, overlap=True)
    loop.step()
    loop.step()
    assert loop.in_flight
    ended = loop.stop(EngineDead("the engine was closed"))
    assert sorted((one.rid, one.finish.error["code"]) for one in ended) == [
        ("compiling", "engine_dead"), ("running", "engine_dead"), ("waiting", "engine_dead"),
    ]  # fmt: skip
    assert not sim.scheduler.busy
    assert loop.step() == []
    sim.add("later", [1], max_new_tokens=1)
    sim.run()
    sim.empty()
