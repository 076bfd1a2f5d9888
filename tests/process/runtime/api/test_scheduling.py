"""What the scheduler promises, seen from outside on the bundled checkpoint: what is cached for whom, who
waits and how long, who goes first, what pausing does, and that many at once leave nothing behind."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from runtime.api import Engine
from runtime.processes.pipeline import assemble
from runtime.protocol.errors import Aborted, BadRequest, DeadlineExceeded, QueueFull, RuntimeFault
from runtime.protocol.io_struct import GenerateOutput, GenerateReqInput
from runtime.scheduler.scheduler import Scheduler

OPTIONS = {"dtype": "float32", "device": "cpu", "threads": 1, "max_total_tokens": 4096}
LONG = {"max_new_tokens": 300, "ignore_eos": True, "temperature": 0}
ENDLESS = {**LONG, "max_new_tokens": 1900}
SHORT = {"max_new_tokens": 4, "ignore_eos": True, "temperature": 0}
IDS = [3 + (i * 37) % 1200 for i in range(100)]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as made:
        yield made


@pytest.fixture(autouse=True)
def paced(pace: Any) -> Any:
    """What is ENDLESS is slow in all of these tests."""
    return pace


def outcome(future: Future[Any]) -> Any:
    error = future.exception(100)
    return future.result() if error is None else error


def until(engine: Engine, holds: Callable[[dict[str, Any]], bool]) -> None:
    deadline = time.monotonic() + 100
    while not holds(engine.state()):
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("page", [1, 16])
def test_prompts_that_go_on_from_one_another(page: int) -> None:
    """The test vector of radix caches at a tenth of its size, for the model's context is 2,048."""
    with Engine("pocket", **OPTIONS, page_size=page) as engine:
        lengths, found = (10, 1000, 1000, 100, 1100), (0, 10, 999, 99, 1000)
        for length, cached in zip(lengths, found, strict=True):
            output: GenerateOutput = engine.generate(list(range(length)), {"max_new_tokens": 1})
            assert output.meta["cached_tokens"] == cached - cached % page


@pytest.mark.parametrize("page", [1, 16])
def test_what_is_cached_and_for_whom(page: int) -> None:
    def down(count: int) -> int:
        return count - count % page

    with Engine("pocket", **OPTIONS, page_size=page) as engine:

        def cached(length: int = 100, /, **fields: Any) -> int:
            return int(engine.generate(IDS[:length], {"max_new_tokens": 0}, **fields).meta["cached_tokens"])

        assert [cached(), cached(), cached(40)] == [0, down(99), down(39)]
        spaces: list[dict[str, str]] = [
            {"extra_key": ""}, {"extra_key": "a"}, {"cache_salt": "a"}, {"cache_salt": "aa"},
            {"cache_salt": "a", "extra_key": ""}, {"cache_salt": "a", "extra_key": "a"},
            {"extra_key": "salt:a"},
        ]  # fmt: skip
        assert [cached(**space) for space in spaces] == [0] * len(spaces)
        assert [cached(**space) for space in spaces] == [down(99)] * len(spaces)
        assert cached(cache_salt="") == down(99)  # as good as none
        for fields in ({"extra_key": "\0salt:a"}, {"cache_salt": "a\0a"}):
            with pytest.raises(BadRequest, match="NUL"):
                cached(**fields)
        for start, most in ((0, 0), (1, 0), (50, 49), (99, 98), (-1, 99)):
            wanted = {"return_logprob": True, "logprob_start_len": start, "top_logprobs_num": 1}
            output: GenerateOutput = engine.generate(IDS, SHORT, **wanted)
            assert output.meta["cached_tokens"] == down(most)
            scored = output.meta.get("input_token_logprobs") or []
            assert not scored if start < 0 else len(scored) == 100 - start
            if start == 0:
                assert scored[0] == [None, IDS[0], None]
                assert output.meta["input_top_logprobs"][0] is None


def test_a_full_queue_and_aborts_by_prefix(pool: ThreadPoolExecutor) -> None:
    with Engine("pocket", **OPTIONS, max_waiting_requests=2, max_running_requests=1) as engine:
        first = pool.submit(engine.generate, "a", ENDLESS, rid="ab-1")
        until(engine, lambda state: state["running"] == 1)
        # One after the other: who comes first is let in first.
        others = []
        for count, rid in ((1, "ab-2"), (2, "b-1")):
            others.append(pool.submit(engine.generate, "b", ENDLESS, rid=rid))
            until(engine, lambda state, count=count: state["waiting"] == count)
        with pytest.raises(QueueFull) as told:
            engine.generate("c", SHORT)
        assert (told.value.message, told.value.status) == ("The request queue is full.", 503)
        engine.abort("ab-1")
        assert isinstance(outcome(first), Aborted)
        until(engine, lambda state: state["waiting"] == 1)
        engine.abort("ab", prefix=True)
        error = outcome(others[0])
        assert isinstance(error, Aborted)
        assert error.where == "ab-2"
        assert not others[1].done()
        engine.abort("nobody")
        engine.abort()
        assert isinstance(outcome(others[1]), Aborted)


def test_limits_on_time(pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = [0.0]  # of the scheduler's clock: minutes pass when the test says so
    monkeypatch.setattr(assemble, "Scheduler", partial(Scheduler, clock=lambda: time.monotonic() + ahead[0]))

    def when(holds: Callable[[dict[str, Any]], bool], asked: Future[Any]) -> Any:
        """What comes of it when an hour passes, once that is so."""
        until(engine, holds)
        ahead[0] += 3600
        return outcome(asked)

    with Engine("pocket", **OPTIONS, queue_timeout_s=600, max_running_requests=1) as engine:
        running = pool.submit(engine.generate, "a", ENDLESS)
        until(engine, lambda state: state["running"] == 1)
        for fields, told in (({"timeout_s": 500}, "in the time it was"), ({}, "not let in within 600.0 s")):
            late = when(
                lambda state: state["waiting"] == 1, pool.submit(engine.generate, "b", SHORT, **fields)
            )
            assert isinstance(late, DeadlineExceeded)
            assert told in late.message
        assert not running.done()
        assert engine.state()["num_timed_out_requests_total"] == 2
        engine.abort()
        assert isinstance(outcome(running), Aborted)
    with Engine("pocket", **OPTIONS, running_timeout_s=600) as engine:
        late = when(lambda state: state["running"] == 1, pool.submit(engine.generate, "a", ENDLESS))
        assert isinstance(late, DeadlineExceeded)
        assert engine.state()["num_timed_out_requests_total"] == 1


def test_a_higher_priority_takes_the_place_and_changes_no_text(pool: ThreadPoolExecutor, paced: Any) -> None:
    with Engine("pocket", **OPTIONS, schedule_policy="priority", max_running_requests=1) as engine:
        alone = engine.generate("a", LONG).output_ids
        paced.hold()
        low = pool.submit(engine.generate, "a", LONG)
        until(engine, lambda state: state["running"] == 1)
        engine.generate("b", SHORT, priority=20)
        assert not low.done()
        assert engine.state()["preemptions"] == 1
        paced.free()
        assert outcome(low).output_ids == alone


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_pausing(mode: Any, pool: ThreadPoolExecutor, paced: Any) -> None:
    with Engine("pocket", **OPTIONS) as engine:
        alone = engine.generate("a", LONG).output_ids
        engine.flush_cache()
        paced.hold()
        running = pool.submit(engine.generate, "a", LONG)
        until(engine, lambda state: state["generated"] > len(alone) + 5)
        engine.pause(mode)
        waiting = pool.submit(engine.generate, "b", SHORT)
        until(engine, lambda state: state["waiting"] == 1 + (mode == "retract"))
        paced.free()
        before = engine.state()
        time.sleep(0.05)
        after = engine.state()
        assert before["generated"] == after["generated"]
        assert after["running"] == (mode == "in_place")
        if mode == "retract":
            assert after["free"] == after["slots"]
        assert after["paused"] == mode
        if mode == "abort":
            outcome(running)  # it ends though nothing goes on
        assert running.done() == (mode == "abort")
        engine.resume()
        ended = outcome(running)
        if mode == "abort":
            assert isinstance(ended, Aborted)
            assert ended.message == "generation was paused"
        else:
            assert ended.output_ids == alone
        assert len(outcome(waiting).output_ids) == 4


def test_a_stop_string_goes_before_a_stop_id() -> None:
    with Engine("pocket", **OPTIONS) as engine:

        def ended(**params: Any) -> GenerateOutput:
            words = {"temperature": 0, "max_new_tokens": 12, **params}
            output: GenerateOutput = engine.generate("The capital of France is", words)
            return output

        whole = ended(ignore_eos=True)
        place = next(at for at, token in enumerate(whole.output_ids) if at and engine.decode([token]).strip())
        token, text = whole.output_ids[place], engine.decode([whole.output_ids[place]])
        assert ended(stop_token_ids=[token]).meta["finish_reason"] == {"type": "stop", "matched": token}
        both = ended(stop_token_ids=[token], stop=[text])
        assert both.meta["finish_reason"] == {"type": "stop", "matched": text}
        assert both.text == whole.text[: whole.text.index(text)]
        ignoring = ended(stop_token_ids=[token], ignore_eos=True)
        assert ignoring.output_ids == whole.output_ids
        assert ended(stop=[text], ignore_eos=True).meta["finish_reason"]["matched"] == text
        spanning = whole.text[2:9]
        assert ended(stop=[spanning]).text == whole.text[: whole.text.index(spanning)]


KINDS = (
    "plain", "cancel", "seeded", "regex", "logprobs", "samples", "invalid", "stream", "late", "leave",
)  # fmt: skip
COMES_TO = {
    "invalid": {"bad_request", "bad_constraint"},
    "cancel": {"aborted", "ok"},
    "late": {"deadline_exceeded", "ok"},
    "leave": {"left", "ok"},
}
INVALID: list[dict[str, Any]] = [
    {"temperature": -1}, {"top_p": 0}, {"top_k": 0}, {"min_p": 2}, {"frequency_penalty": 3},
    {"presence_penalty": -3}, {"repetition_penalty": 0}, {"max_new_tokens": -1}, {"stop": [""]},
    {"min_new_tokens": 9, "max_new_tokens": 8}, {"stop_regex": ["("]}, {"logit_bias": {"1280": 1}},
    {"stop_token_ids": [1280]}, {"seed": -1}, {"regex": "("}, {"json_schema": "INVALID"}, {"nonsense": 1},
    {"custom_logit_processor": "nobody"}, {"regex": "a", "ebnf": 'root ::= "a"'},
]  # fmt: skip


async def streamed(engine: Engine, request: GenerateReqInput, pieces: int) -> str:
    """The first `pieces` pieces only, which ends the request; what it came to."""
    stream = engine.stream(request)
    try:
        async for piece in stream:
            pieces -= 1
            if piece.meta["finish_reason"] is not None:
                return "ok"
            if not pieces:
                break
    finally:
        await stream.aclose()  # type: ignore[attr-defined]
    return "left"


def one_of_many(engine: Engine, number: int) -> tuple[str, str]:
    """(id, what it came to)."""
    draw = random.Random(number)
    kind = KINDS[number % len(KINDS)]
    rid = f"{kind}-{number}"
    params: dict[str, Any] = {"max_new_tokens": draw.randrange(1, 24), "temperature": 0}
    fields: dict[str, Any] = {"rid": rid, "extra_key": draw.choice([None, "a"])}
    params |= {"temperature": 1.0, "seed": number} if kind == "seeded" else {}
    params |= {"regex": "[a-z]+ [0-9]+"} if kind == "regex" else {}
    params |= {"n": 2} if kind == "samples" else {}
    params |= draw.choice(INVALID) if kind == "invalid" else {}
    params |= {"max_new_tokens": 200, "ignore_eos": True} if kind in ("cancel", "late", "leave") else {}
    fields |= {"return_logprob": True, "logprob_start_len": 0} if kind == "logprobs" else {}
    fields |= {"timeout_s": 0.02} if kind == "late" else {}
    text = draw.choice(["The capital of France is", "서울은 대한민국의", "1 + 2 ="]) + " x" * draw.randrange(
        20
    )
    timer = threading.Timer(draw.random() * 0.05, engine.abort, [rid])
    try:
        if kind in ("stream", "leave"):
            request = GenerateReqInput(text=text, sampling_params=params, **fields)
            return rid, asyncio.run(streamed(engine, request, 3 if kind == "leave" else 1000))
        if kind == "cancel":
            timer.start()
        made = engine.generate(text, params, **fields)
        return rid, "ok" if isinstance(made, list) or made.meta["finish_reason"] else "no end"
    except RuntimeFault as fault:
        return rid, fault.code
    finally:
        timer.cancel()
        if timer.is_alive():
            timer.join()


@pytest.mark.parametrize("overlap", [False, True])
def test_many_at_once_in_a_small_pool(overlap: bool) -> None:
    """Every request is answered once, and nothing is left: no slot, no request, no thread."""
    threads = set(threading.enumerate())
    options = {**OPTIONS, "max_total_tokens": 300, "conservativeness": 0.1, "overlap": overlap}
    with Engine("pocket", **options) as engine:
        with ThreadPoolExecutor(16) as pool:
            asked = [pool.submit(one_of_many, engine, number) for number in range(150)]
            answered = [future.result(300) for future in asked]
        until(engine, lambda state: not (state["live"] or state["running"] or state["waiting"]))
        state = engine.state()
        assert state["num_requests_total"] == state["finished"] + state["failed"]
        assert (state["compiling"], state["repairs"], state["faults_in_a_row"]) == (0, 0, 0)
        assert state["free"] + state["evictable"] == state["slots"]
        assert engine.flush_cache()
        assert engine.state()["free"] == state["slots"]
    for rid, said in answered:
        assert said in COMES_TO.get(rid.partition("-")[0], {"ok"}), (rid, said)
    assert {said for _, said in answered} >= {"ok", "bad_request", "left"}
    for thread in set(threading.enumerate()) - threads:
        thread.join(300)  # what was told to end may still be about to
        assert not thread.is_alive(), thread
