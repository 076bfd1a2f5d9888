"""The scheduler's promises one by one, on the FakeRunner (which checks every plan against the pool)."""

from __future__ import annotations

import re
from typing import Any

import pytest

from runtime.protocol.errors import BadRequest
from tests.unit.runtime.scheduler.fake import START, draw, follow


def expected(prompt: list[int], count: int, size: int) -> list[int]:
    ids: list[int] = []
    while len(ids) < count:
        ids.append(draw(follow(START, [*prompt, *ids]), size))
    return ids


def without_eos(prompt: list[int], count: int, size: int) -> list[int]:
    """The same where min_new_tokens keeps the end-of-text token (0) away. Such requests may run out of slots:
    how long they get is known to nobody before, unlike with ignore_eos."""
    ids: list[int] = []
    while len(ids) < count:
        ids.append(1 + (follow(follow(START, [*prompt, *ids]), (0,)) >> 33) % (size - 1))
    return ids


# -- prefix cache --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [1, 7, 16, 64])
@pytest.mark.parametrize(("chunk", "overlap"), [(2048, False), (2048, True), (100, False)])
def test_cached_tokens(bench: Any, page: int, chunk: int, overlap: bool) -> None:
    sim = bench(24_000, page_size=page, chunked_prefill_size=chunk, context_length=20_000, overlap=overlap)
    ids = [n % 37 for n in range(20_000)]
    cached = []
    for number, length in enumerate((100, 10_000, 10_000, 1000, 11_000)):
        sim.add(str(number), ids[:length], max_new_tokens=1)
        cached.append(sim.run().answer(str(number)).cached_tokens)
    assert cached == [n // page * page for n in (0, 100, 9999, 999, 10_000)]
    sim.account()


@pytest.mark.parametrize("policy", ["lpm", "fcfs", "dfs-weight", "lof", "priority"])
@pytest.mark.parametrize("overlap", [False, True])
def test_siblings_compute_their_prefix_once(bench: Any, policy: str, overlap: bool) -> None:
    sim = bench(8000, chunked_prefill_size=256, policy=policy, overlap=overlap)
    stem = [n * n % 37 for n in range(1000)]
    for number in range(64):
        sim.add(str(number), [*stem, number % 32, number // 32], max_new_tokens=3, ignore_eos=True)
    sim.run()
    assert sorted(sim.answer(str(n)).cached_tokens for n in range(64))[:2] == [0, 1000]
    assert sim.runner.tokens <= 1000 + 64 * (2 + 3)


def test_strangers_do_not_wait_for_each_other(bench: Any) -> None:
    sim = bench(2000, chunked_prefill_size=64)
    for number in range(4):
        sim.add(str(number), [number, *[n % 37 for n in range(200)]], max_new_tokens=1)
    sim.tick()
    assert sim.scheduler.state()["running"] == 4


def test_a_shared_node_is_one_segment_and_a_tail_is_contiguous(bench: Any) -> None:
    sim = bench(4000)
    stem = list(range(37)) * 10
    sim.add("stem", stem, max_new_tokens=0)
    sim.run()
    for number in range(8):
        sim.add(str(number), [*stem, number], max_new_tokens=200, ignore_eos=True)
    seen: list[Any] = []
    launch = sim.runner.launch
    sim.runner.launch = lambda plan: (seen.append(plan), launch(plan))
    for _ in range(60):
        sim.tick()
    plan = seen[-1]
    shared = [segment for segment in plan.segments if len(segment.rows) > 1]
    assert [(len(s.rows), s.position, s.length, len(s.runs)) for s in shared] == [(8, 0, 370, 1)]
    own = [segment for segment in plan.segments if len(segment.rows) == 1]
    assert max(len(segment.runs) for segment in own) <= 3


def test_keys_do_not_share(bench: Any) -> None:
    sim = bench(600)
    prompt = [n % 30 for n in range(100)]
    for rid, key in (("a", None), ("b", ""), ("c", "x"), ("d", "x"), ("e", None)):
        sim.add(rid, prompt, max_new_tokens=1, extra_key=key)
        sim.run()
    assert [sim.answer(rid).cached_tokens for rid in "abcde"] == [0, 0, 0, 99, 99]


def test_generated_tokens_are_cached_too(bench: Any) -> None:
    sim = bench(600)
    sim.add("a", [1, 2, 3], max_new_tokens=50, ignore_eos=True)
    ids = sim.run().answer("a").new_ids
    sim.add("b", [1, 2, 3, *ids], max_new_tokens=1)
    assert sim.run().answer("b").cached_tokens == 52, "all but the last, which was never computed"


def test_without_radix_nothing_is_kept(bench: Any) -> None:
    sim = bench(600, radix_cache=False, chunked_prefill_size=10)
    for rid in "ab":
        sim.add(rid, [n % 30 for n in range(100)], max_new_tokens=3, ignore_eos=True)
    sim.run()
    assert [sim.answer(rid).cached_tokens for rid in "ab"] == [0, 0]
    assert sim.scheduler.state()["free"] == 600


def test_flush(bench: Any) -> None:
    sim = bench(600)
    sim.add("a", [1, 2, 3], max_new_tokens=20, ignore_eos=True)
    sim.tick()
    assert not sim.scheduler.flush_cache(), "somebody reads it"
    sim.run()
    assert sim.scheduler.flush_cache()
    assert sim.scheduler.state()["free"] == 600


# -- batching ------------------------------------------------------------------------------------------------


def test_decodes_go_on_while_a_long_prompt_is_computed(bench: Any) -> None:
    sim = bench(4000, chunked_prefill_size=10)
    sim.add("short", [1], max_new_tokens=100, ignore_eos=True, stream=True)
    sim.tick()
    sim.add("long", [n % 30 for n in range(500)], max_new_tokens=1)
    for _ in range(50):
        assert [len(output.new_ids) for output in sim.tick() if output.rid == "short"] == [1]
    assert "long" in sim.news


@pytest.mark.parametrize("chunk", [1, 2, 7, 64])
@pytest.mark.parametrize("page", [1, 4])
def test_any_chunk_gives_the_same(bench: Any, chunk: int, page: int) -> None:
    sim = bench(640, chunked_prefill_size=chunk, page_size=page)
    prompts = [[n * k % 31 for n in range(40)] for k in range(1, 5)]
    for number, prompt in enumerate(prompts):
        sim.add(str(number), prompt, max_new_tokens=6, ignore_eos=True)
    sim.run()
    for number, prompt in enumerate(prompts):
        assert sim.answer(str(number)).new_ids == expected(prompt, 6, len(sim.vocabulary))
    sim.empty()


def test_no_more_than_allowed_run_at_once(bench: Any) -> None:
    sim = bench(4000, max_running_requests=3)
    for number in range(10):
        sim.add(str(number), [number], max_new_tokens=5, ignore_eos=True)
    sim.tick()
    assert (sim.scheduler.state()["running"], sim.scheduler.state()["waiting"]) == (3, 7)
    sim.run()


def test_no_new_tokens_commit_the_prefix(bench: Any) -> None:
    sim = bench(600, chunked_prefill_size=16)
    prompt = [n % 30 for n in range(100)]
    sim.add("commit", prompt, max_new_tokens=0)
    answer = sim.run().answer("commit")
    assert (answer.finish.type, answer.new_ids, answer.decode_steps) == ("length", [], 0)
    sim.add("use", [*prompt, 1], max_new_tokens=1)
    assert sim.run().answer("use").cached_tokens == 100


def test_a_seed_is_drawn_once(bench: Any) -> None:
    sim = bench(600)
    sim.add("own", [1], seed=7)
    sim.add("drawn", [2])
    sim.add("other", [3])
    plan = sim.scheduler.plan()
    assert plan.rows[0].sampling.seed == 7
    seeds = {row.sampling.seed for row in plan.rows}
    assert len(seeds) == 3
    assert None not in seeds


def test_steps_count_what_was_generated(bench: Any) -> None:
    sim = bench(600)
    sim.add("a", [1, 2], max_new_tokens=4, ignore_eos=True)
    steps = []
    launch = sim.runner.launch
    sim.runner.launch = lambda plan: (steps.append([row.step for row in plan.rows]), launch(plan))
    sim.run()
    assert steps == [[0], [1], [2], [3]]


def test_penalties_see_the_output_and_repetition_the_prompt(bench: Any) -> None:
    sim = bench(600)
    sim.add("plain", [1, 2], max_new_tokens=3, ignore_eos=True)
    sim.add("frequency", [3, 4], max_new_tokens=3, ignore_eos=True, frequency_penalty=1.0)
    sim.add("repetition", [5, 6], max_new_tokens=3, ignore_eos=True, repetition_penalty=1.5)
    sim.tick()
    rows = sim.scheduler.plan().rows
    assert [(list(row.prompt), len(row.output)) for row in rows] == [([], 0), ([], 1), ([5, 6], 1)]


def test_released_handles_are_told_once(bench: Any) -> None:
    sim = bench(600)
    told: list[int] = []
    launch = sim.runner.launch
    sim.runner.launch = lambda plan: (told.extend(plan.released), launch(plan))
    for rid in "abc":
        sim.add(rid, [1], max_new_tokens=2, ignore_eos=True)
        sim.add(f"{rid} never ran", [1])
        sim.scheduler.abort(f"{rid} never ran")
        sim.run()
    assert told == [1, 3]


def test_reserves_are_given_up_for_who_needs_the_slots(bench: Any) -> None:
    sim = bench(100, conservativeness=0.01)
    sim.add("a", [1, 2, 3, 4], max_new_tokens=90, ignore_eos=True)
    sim.add("b", [5, 6, 7, 8], max_new_tokens=40, ignore_eos=True)
    sim.tick()
    sim.tick()
    assert sim.scheduler.state()["free"] < 30
    sim.add("c", [9] * 30, max_new_tokens=1)
    sim.tick()
    assert "c" in sim.news
    assert sim.scheduler.state()["retractions"] == 0
    sim.run()


# -- slots run short -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("radix", [True, False])
def test_retraction_changes_no_output(bench: Any, page: int, radix: bool) -> None:
    sim = bench(200, page_size=page, radix_cache=radix, conservativeness=0.05, max_running_requests=16)
    prompts = [[number, 5, 6, 7] for number in range(12)]
    for number, prompt in enumerate(prompts):
        sim.add(str(number), prompt, max_new_tokens=60, min_new_tokens=60)
    sim.run()
    assert sim.scheduler.state()["retractions"] > 0
    for number, prompt in enumerate(prompts):
        answer = sim.answer(str(number))
        assert answer.new_ids == without_eos(prompt, 60, len(sim.vocabulary))
        assert answer.decode_steps == 60
    sim.empty()


def test_fewest_produced_is_retracted_first(bench: Any) -> None:
    sim = bench(120, conservativeness=0.01)
    sim.add("old", [1, 2], max_new_tokens=90, min_new_tokens=90)
    for _ in range(10):
        sim.tick()
    sim.add("new", [3, 4], max_new_tokens=90, min_new_tokens=90)
    ratio = 0.0
    sim.add("third", [5, 6], max_new_tokens=90, min_new_tokens=90)
    while not sim.scheduler.state()["retractions"]:
        ratio = sim.scheduler.state()["new_token_ratio"]
        sim.tick()
    running = [request.rid for request in sim.scheduler._batch.running]
    assert running[0] == "old"
    assert sim.scheduler.state()["new_token_ratio"] > 10 * ratio, "fewer are let in from now on"
    retracted = {"new", "third"} - set(running)
    assert retracted
    sim.add("late", [7], max_new_tokens=10, ignore_eos=True)
    while retracted - {request.rid for request in sim.scheduler._batch.running}:
        assert "late" not in [*sim.news, *(request.rid for request in sim.scheduler._batch.running)], (
            "they go first"
        )
        sim.tick()
    sim.run()
    assert len(sim.answer("new").new_ids) == 90


def test_the_whole_pool_can_be_used_by_one(bench: Any) -> None:
    for page in (1, 4):
        sim = bench(64, page_size=page, chunked_prefill_size=5)
        sim.add("a", [1] * 30, max_new_tokens=34, ignore_eos=True)
        assert len(sim.run().answer("a").new_ids) == 34


# -- refusals, ends, waits -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "code", "word"),
    [
        ({"prompt": []}, "bad_request", "no tokens"),
        ({"prompt": [1, 1000]}, "bad_request", "ids must be in"),
        ({"prompt": [-1]}, "bad_request", "ids must be in"),
        ({"prompt": [1], "temperature": -1.0}, "bad_request", "temperature"),
        (
            {"prompt": [1] * 60, "max_new_tokens": 50},
            "prompt_too_long",
            "60 .* 50 = 110.* context length is 100",
        ),
        ({"prompt": [1, 2], "logprob_start_len": 3}, "bad_request", "prompt of 2 tokens, got 3"),
        ({"prompt": [1, 2], "top_logprobs_num": -1}, "bad_request", "at least 0"),
    ],
)
def test_what_cannot_run_is_answered_at_once(
    bench: Any, fields: dict[str, Any], code: str, word: str
) -> None:
    sim = bench(200, context_length=100)
    sim.add("a", **fields)
    (output,) = sim.scheduler.drain()
    assert output.finish.error["code"] == code
    assert re.search(word, output.finish.error["message"])
    assert not sim.scheduler.busy


def test_what_the_pool_cannot_hold_is_refused(bench: Any) -> None:
    sim = bench(64)
    sim.add("a", [1] * 40, max_new_tokens=30)
    (output,) = sim.scheduler.drain()
    assert output.finish.error["code"] == "prompt_too_long"
    assert "KV pool is 64" in output.finish.error["message"]


def test_a_full_queue_says_so(bench: Any) -> None:
    sim = bench(600, max_waiting_requests=2)
    for rid in "abc":
        sim.add(rid, [1], max_new_tokens=1)
    (output,) = sim.scheduler.drain()
    assert (output.rid, output.finish.error["code"]) == ("c", "queue_full")
    sim.run()


def test_a_live_id_is_not_taken_again(bench: Any) -> None:
    sim = bench(600)
    sim.add("a", [1], max_new_tokens=1)
    sim.add("a", [2], max_new_tokens=1)
    (output,) = sim.scheduler.drain()
    assert output.finish.error["code"] == "bad_request"
    sim.run()
    sim.add("a", [3], max_new_tokens=1)
    sim.run()


def test_abort_in_the_queue_and_while_running(bench: Any) -> None:
    sim = bench(600, max_running_requests=1, chunked_prefill_size=4)
    sim.add("run", [1] * 20, max_new_tokens=50, ignore_eos=True)
    sim.add("wait", [2], max_new_tokens=50)
    sim.tick()
    for rid in ("wait", "run", "nobody"):
        sim.scheduler.abort(rid)
    outputs = sim.scheduler.drain()
    assert [(output.rid, output.finish.error["code"]) for output in outputs] == [
        ("wait", "aborted"),
        ("run", "aborted"),
    ]
    assert not sim.scheduler.busy
    sim.empty()


def test_abort_during_a_step_takes_effect_at_its_end(bench: Any) -> None:
    sim = bench(600)
    sim.add("a", [1], max_new_tokens=50, ignore_eos=True)
    sim.add("b", [2], max_new_tokens=3, ignore_eos=True)
    plan = sim.scheduler.plan()
    sim.runner.launch(plan)
    sim.scheduler.abort(None)
    assert sim.scheduler.drain() == []
    outputs = sim.scheduler.commit(sim.runner.finish(sim.scheduler.masks()))
    assert sorted((output.rid, output.finish.error["code"]) for output in outputs) == [
        ("a", "aborted"),
        ("b", "aborted"),
    ]
    sim.empty()


def test_deadlines(bench: Any) -> None:
    now = 0.0
    sim = bench(600, max_running_requests=1, clock=lambda: now)
    sim.add("running", [1], max_new_tokens=50, ignore_eos=True, time_left_s=5.0)
    sim.add("waiting", [2], max_new_tokens=50, ignore_eos=True, time_left_s=3.0)
    sim.add("fine", [3], max_new_tokens=2, ignore_eos=True, time_left_s=1e9)
    while sim.scheduler.busy:
        now += 1.0
        for output in sim.tick():
            if output.finish.type == "abort":
                assert output.finish.error["code"] == "deadline_exceeded"
                assert now == {"waiting": 3.0, "running": 5.0}[output.rid]
    assert sim.answer("running").new_ids
    assert sim.answer("fine").finish.type == "length"
    assert sim.answer("fine").queue_s == 5.0
    sim.empty()


def test_min_new_tokens_keeps_stop_ids_away(bench: Any) -> None:
    sim = bench(2000)
    size = len(sim.vocabulary)
    stops = tuple(range(1, size - 2))
    for number in range(20):
        sim.add(str(number), [number], max_new_tokens=30, min_new_tokens=10, stop_token_ids=stops)
    sim.run()
    for number in range(20):
        ids = sim.answer(str(number)).new_ids
        assert len(ids) >= 10 + 1
        assert set(ids[:10]) <= {size - 2, size - 1}


def test_a_stop_string_ends_with_its_token(bench: Any) -> None:
    sim = bench(2000)
    for number in range(30):
        sim.add(str(number), [number], max_new_tokens=40, ignore_eos=True, stop=("a", "th"))
    sim.run()
    stopped = [sim.answer(str(n)) for n in range(30) if sim.answer(str(n)).finish.type == "stop"]
    assert len(stopped) > 10
    for answer in stopped:
        before = b"".join(sim.vocabulary.tokens[token] for token in answer.new_ids[:-1])
        assert b"a" not in before
        assert b"th" not in before
        assert answer.finish.matched.encode() in before + sim.vocabulary.tokens[answer.new_ids[-1]]


def test_streams_speak_every_step_and_others_at_the_end(bench: Any) -> None:
    sim = bench(600)
    sim.add("stream", [1], max_new_tokens=5, ignore_eos=True, stream=True)
    sim.add("quiet", [2], max_new_tokens=5, ignore_eos=True)
    sim.run()
    assert [len(output.new_ids) for output in sim.news["stream"]] == [1] * 5
    assert [len(output.new_ids) for output in sim.news["quiet"]] == [5]
    assert [output.completion_tokens for output in sim.news["stream"]] == [1, 2, 3, 4, 5]


def test_a_plan_must_be_committed(bench: Any) -> None:
    sim = bench(600)
    assert sim.scheduler.plan() is None
    sim.add("a", [1], max_new_tokens=2)
    assert sim.scheduler.plan() is not None
    with pytest.raises(Exception, match="before the last plan was committed"):
        sim.scheduler.plan()


@pytest.mark.parametrize(
    "field",
    ["page_size", "max_running_requests", "max_waiting_requests", "chunked_prefill_size", "conservativeness"],
)
def test_numbers_of_the_configuration_are_checked(bench: Any, field: str) -> None:
    with pytest.raises(BadRequest, match=field):
        bench(100, **{field: 0})
