"""EmbeddingScheduler around a runner that only counts: batches, limits, deadlines, one answer for each."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.config.scheduler import SchedulerConfig
from runtime.plan import Text, TextResult
from runtime.protocol.errors import (
    Aborted,
    BadRequest,
    DeadlineExceeded,
    EngineDead,
    InternalFault,
    PromptTooLong,
    QueueFull,
    RuntimeFault,
    from_dict,
)
from runtime.protocol.io_struct import TokenizedEmbeddingReqInput, TokenizedGenerateReqInput, TokenOutput
from runtime.protocol.sampling import SamplingParams
from runtime.scheduler.embedding_scheduler import EmbeddingLoop, EmbeddingScheduler, TextLimits
from tests.exploring import tries

LIMITS = TextLimits(vocab_size=100, positions=50, kinds=2, width=4, scores=False)


class Counting:
    """A text's vector is its ids' sum and its length. Fails at texts that begin with 99; 98 is not finite."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.kinds: list[tuple[int, ...]] = []

    def verify(self, params: SamplingParams) -> None:
        raise BadRequest("no")

    def encode(self, texts: Sequence[Text]) -> tuple[TextResult, ...]:
        self.batches.append([len(text.tokens) for text in texts])
        self.kinds += [text.kinds for text in texts]
        if any(text.tokens[0] == 99 for text in texts):
            raise OSError("the device fell off the bus")
        return tuple(
            TextResult(error="the model's numbers are not finite")
            if text.tokens[0] == 98
            else TextResult((float(sum(text.tokens)), float(len(text.tokens))))
            for text in texts
        )

    def close(self) -> None: ...


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Bench:
    def __init__(self, limits: TextLimits = LIMITS, **config: Any) -> None:
        self.clock, self.runner = Clock(), Counting()
        self.scheduler = EmbeddingScheduler(SchedulerConfig(**config), limits, clock=self.clock)
        self.loop = EmbeddingLoop(self.scheduler, self.runner)
        self.told: dict[str, TokenOutput] = {}

    def ask(self, rid: str, ids: Sequence[int], **fields: Any) -> None:
        self.scheduler.embed(TokenizedEmbeddingReqInput(rid=rid, input_ids=list(ids), **fields))

    def take(self, outputs: Sequence[TokenOutput]) -> None:
        for output in outputs:
            assert output.rid not in self.told, "told twice"
            assert output.finish is not None
            self.told[output.rid] = output

    def step(self) -> None:
        self.take(self.loop.step())

    def finish(self, steps: int = 1000) -> None:
        while self.scheduler.busy:
            self.step()
            steps -= 1
            assert steps, "it does not end"

    def fault(self, rid: str) -> RuntimeFault:
        finish = self.told[rid].finish
        assert finish is not None
        assert finish.error is not None
        return from_dict(finish.error)


@settings(deadline=None, max_examples=tries(40))
@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(20, 300), st.integers(1, 9))
def test_all_are_answered_once_in_batches_within_the_budget(sizes: list[int], tokens: int, rows: int) -> None:
    bench = Bench(max_prefill_tokens=tokens, max_running_requests=rows)
    draw = random.Random(len(sizes))
    asked = {f"r{at}": [draw.randrange(90) for _ in range(size)] for at, size in enumerate(sizes)}
    for rid, ids in asked.items():
        bench.ask(rid, ids)
    bench.finish()
    for rid, ids in asked.items():
        output = bench.told[rid]
        assert output.hidden_states == [[sum(ids), len(ids)]]
        assert output.prompt_tokens == len(ids)
    for batch in bench.runner.batches:
        assert len(batch) <= rows
        assert len(batch) == 1 or max(batch) * len(batch) <= tokens
    assert bench.scheduler.state()["finished"] == len(sizes)


def test_texts_of_one_length_share_a_batch_and_the_first_in_line_never_waits() -> None:
    bench = Bench(max_prefill_tokens=40)
    for at, size in enumerate([10, 50, 9, 50, 11, 10]):
        bench.ask(f"r{at}", [1] * size)
    bench.step()
    assert bench.runner.batches == [[10, 10, 9]]  # 50 * 2 does not fit, 11 * 4 does not either
    bench.finish()
    assert bench.runner.batches[1:] == [[50], [50], [11]]


def test_priority_decides_who_is_first() -> None:
    bench = Bench(policy="priority", max_running_requests=1)
    for rid, priority in (("low", 0), ("high", 5), ("middle", 2)):
        bench.ask(rid, [1], priority=priority)
    bench.finish()
    assert list(bench.told) == ["high", "middle", "low"]


def test_a_light_client_goes_before_the_rest_of_a_heavy_one() -> None:
    """Whose texts are many, and as long as they should be to fill the batches."""
    bench = Bench(max_running_requests=2)
    for number in range(20):
        bench.ask(f"h{number}", [1] * 10, flow="h")
    bench.step()
    bench.ask("l0", [1] * 40, flow="l")
    bench.ask("l1", [1] * 40, flow="l")
    bench.step()
    bench.step()
    assert {"l0", "l1"} <= set(bench.told)
    bench.finish()
    assert len(bench.told) == 22


@pytest.mark.parametrize(
    ("fields", "limits", "kind", "words"),
    [
        ({"ids": []}, {}, BadRequest, "no tokens"),
        ({"ids": [100]}, {}, BadRequest, r"\[0, 100\)"),
        ({"ids": [-1]}, {}, BadRequest, r"\[0, 100\)"),
        ({"ids": [1] * 51}, {}, PromptTooLong, "51 tokens; the model has 50 positions"),
        ({"dimensions": 5}, {}, BadRequest, "from 1 to 4"),
        ({"dimensions": 0}, {}, BadRequest, "from 1 to 4"),
        ({"dimensions": 2}, {"scores": True}, BadRequest, "scores"),
        ({"cross_encoder": True}, {}, BadRequest, "no classifier"),
        ({"token_type_ids": [0, 2]}, {}, BadRequest, "0 to 1"),
        ({"token_type_ids": [0]}, {}, BadRequest, "2 ids"),
    ],
)
def test_impossible_requests(
    fields: dict[str, Any], limits: dict[str, Any], kind: type[RuntimeFault], words: str
) -> None:
    given_limits = {name: getattr(LIMITS, name) for name in TextLimits.__slots__}
    bench = Bench(TextLimits(**{**given_limits, **limits}))
    bench.ask("bad", **{"ids": [1, 2], **fields})
    bench.ask("good", [3])
    bench.finish()
    assert type(bench.fault("bad")) is kind
    with pytest.raises(kind, match=words):
        raise bench.fault("bad")
    assert bench.told["good"].hidden_states == [[3.0, 1.0]]


def test_token_types_go_to_models_that_read_them() -> None:
    for kinds, wanted in ((2, (0, 1)), (1, ())):
        bench = Bench(TextLimits(100, 50, kinds, 4, True))
        bench.ask("a", [1, 2], token_type_ids=[0, 1], cross_encoder=True)
        bench.finish()
        assert bench.runner.kinds == [wanted]


def test_a_full_queue_and_one_id_twice() -> None:
    bench = Bench(max_waiting_requests=2)
    for rid in ("a", "b", "c"):
        bench.ask(rid, [1])
    bench.finish()
    assert isinstance(bench.fault("c"), QueueFull)
    assert "The request queue is full." in str(bench.fault("c"))
    bench = Bench()
    bench.ask("a", [1])
    bench.ask("a", [2])
    (refused,) = bench.scheduler.drain()
    assert refused.finish is not None
    assert "already running" in str(refused.finish.error)
    bench.finish()
    assert bench.told["a"].hidden_states == [[1.0, 1.0]]


def test_deadlines() -> None:
    bench = Bench(queue_timeout_s=5.0, max_running_requests=1)
    bench.ask("own", [1], time_left_s=1.0)
    bench.ask("queue", [1])
    bench.clock.now += 2
    bench.ask("late", [1], time_left_s=98.0)
    bench.clock.now += 4
    bench.finish()
    assert "in the time it was given" in str(bench.fault("own"))
    assert "not let in within 5.0 s" in str(bench.fault("queue"))
    assert isinstance(bench.fault("own"), DeadlineExceeded)
    assert bench.told["late"].hidden_states
    assert bench.told["late"].queue_s == 4.0
    assert bench.scheduler.state()["num_timed_out_requests_total"] == 2


def test_abort() -> None:
    bench = Bench()
    for rid in ("a1", "a2", "b", "c"):
        bench.ask(rid, [1])
    scheduler = bench.scheduler
    assert scheduler.abort("nobody") == 0
    assert scheduler.abort("", prefix=True) == 0
    assert scheduler.abort("a", prefix=True) == 2
    assert scheduler.abort("b", message="enough") == 1
    bench.finish()
    assert all(isinstance(bench.fault(rid), Aborted) for rid in ("a1", "a2", "b"))
    assert bench.fault("b").message == "enough"
    assert bench.told["c"].hidden_states
    bench.ask("d", [1])
    assert scheduler.abort(None) == 1
    bench.take(bench.loop.stop(EngineDead("closed")))
    assert isinstance(bench.fault("d"), Aborted)
    assert not scheduler.busy


def test_pause_keeps_or_cancels_and_stops_the_queues_clock() -> None:
    bench = Bench(queue_timeout_s=5.0)
    bench.ask("before", [1])
    bench.scheduler.pause("in_place")
    bench.clock.now += 60
    bench.ask("during", [2])
    bench.ask("timed", [3], time_left_s=1.0)
    bench.clock.now += 60
    bench.step()
    assert list(bench.told) == ["timed"]
    assert bench.scheduler.busy
    assert not bench.scheduler.running
    bench.scheduler.resume()
    bench.clock.now += 4
    bench.finish()
    assert bench.told["before"].hidden_states
    assert bench.told["during"].hidden_states
    bench.ask("last", [1])
    bench.scheduler.pause("abort")
    bench.finish()
    assert isinstance(bench.fault("last"), Aborted)
    assert bench.scheduler.paused == "abort"


def test_a_failed_batch_fails_alone_and_a_bad_row_within_one_too() -> None:
    bench = Bench()
    bench.ask("nan", [98])
    bench.ask("well", [1])
    bench.finish()
    assert isinstance(bench.fault("nan"), InternalFault)
    assert bench.told["well"].hidden_states
    bench.ask("broken", [99])
    bench.finish()
    assert "the device fell off the bus" in str(bench.fault("broken"))
    bench.ask("after", [1])
    bench.finish()
    assert bench.told["after"].hidden_states == [[1.0, 1.0]]


def test_what_generating_schedulers_do_is_refused_in_words() -> None:
    scheduler = Bench().scheduler
    generation = TokenizedGenerateReqInput(rid="a", input_ids=[1], sampling_params=SamplingParams())
    close = partial(scheduler.close_session, "s")
    for ask in (partial(scheduler.add, generation), scheduler.open_session, close):
        with pytest.raises(BadRequest, match="embeddings only"):
            ask()
    assert scheduler.flush_cache()
    assert scheduler.tune({"max_running_requests": 3})["max_running_requests"] == 3
    with pytest.raises(BadRequest, match="cannot be changed"):
        scheduler.tune({"policy": 1})
    with pytest.raises(BadRequest, match="at least 1"):
        scheduler.tune({"max_prefill_tokens": 0})
    assert scheduler.config.max_running_requests == 3
