"""10,000 random requests on the FakeRunner: nothing leaks, nobody is forgotten, company changes no output."""

from __future__ import annotations

import random
from typing import Any

import pytest

from runtime.protocol.constraint import Constraint
from tests.exploring import EXPLORE, tries
from tests.unit.runtime.scheduler.fake import START, draw, follow, logprob

# (seed, requests, slots, config)
RUNS: list[tuple[int, int, int, dict[str, Any]]] = [
    (1, 2000, 400, {"chunked_prefill_size": 16, "max_running_requests": 8}),
    (2, 1500, 150, {"chunked_prefill_size": 7, "max_running_requests": 16}),
    (3, 1500, 512, {"page_size": 4, "chunked_prefill_size": 64, "max_running_requests": 12}),
    (4, 1000, 640, {"page_size": 16, "chunked_prefill_size": 33, "max_running_requests": 16}),
    (5, 500, 300, {"chunked_prefill_size": 1, "max_running_requests": 4, "policy": "fcfs"}),
    (6, 1000, 200, {"radix_cache": False, "chunked_prefill_size": 24, "max_running_requests": 10}),
    (7, 1500, 4000, {"chunked_prefill_size": 256, "max_running_requests": 64, "policy": "fcfs"}),
    (8, 1000, 260, {"page_size": 2, "chunked_prefill_size": 2048, "jump_forward": False}),
]
SPECS = ["yes|no", "abc", "the|there|then", "in|inging", "abcxyz|abczz", "st ab a|st abc"]
BACKLOG = 32  # requests alive, beyond which none is sent


def test_there_are_ten_thousand() -> None:
    assert sum(run[1] for run in RUNS) == 10_000


class Maker:
    """Random requests whose prompts share prefixes like the calls of programs do."""

    def __init__(self, rng: random.Random, slots: int, size: int) -> None:
        self.rng, self.size = rng, size
        self.longest = min(120, slots // 3)
        self.stems: list[list[int]] = [
            [rng.randrange(size) for _ in range(rng.randrange(50))] for _ in range(4)
        ]

    def prompt(self) -> list[int]:
        rng = self.rng
        stem = rng.choice(self.stems)
        prompt = (stem + [rng.randrange(self.size) for _ in range(rng.randrange(1, 20))])[: self.longest]
        if rng.random() < 0.3:
            self.stems.append(prompt)
            if len(self.stems) > 12:
                self.stems.pop(rng.randrange(len(self.stems)))
        return prompt

    def request(self) -> dict[str, Any]:
        rng = self.rng
        fields: dict[str, Any] = {
            "prompt": self.prompt(),
            "max_new_tokens": rng.choice([0, 1, 1, 2, 5, 10, 20, 40]),
            "ignore_eos": rng.random() < 0.5,
            "stream": rng.random() < 0.5,
            "extra_key": rng.choice([None, None, None, "a", ""]),
        }
        if rng.random() < 0.3:
            fields["stop_token_ids"] = tuple(rng.randrange(self.size) for _ in range(3))
        if rng.random() < 0.3:
            fields["min_new_tokens"] = rng.randrange(fields["max_new_tokens"] + 1)
        if rng.random() < 0.2:
            fields["stop"] = ("the", "ab", "z")
        if rng.random() < 0.3:
            fields["return_logprob"] = True
            fields["logprob_start_len"] = rng.choice([-1, rng.randrange(len(fields["prompt"]) + 1)])
        if rng.random() < 0.1:
            fields["constraint"] = Constraint("regex", rng.choice(SPECS))
        if rng.random() < 0.03:
            fields["time_left_s"] = float(rng.randrange(1, 40))
        return fields


def alone(fields: dict[str, Any], tokens: tuple[bytes, ...], eos: int) -> tuple[list[int], Any]:
    """What an unconstrained request must give, straight from the definitions: ids and (type, matched)."""
    ids: list[int] = []
    ends = set() if fields["ignore_eos"] else {eos, *fields.get("stop_token_ids", ())}
    history = follow(START, fields["prompt"])
    while len(ids) < fields["max_new_tokens"]:
        allowed = set(range(len(tokens)))
        if len(ids) < fields.get("min_new_tokens", 0):
            allowed -= ends
        order = sorted(allowed)
        choice = follow(history, (0,)) >> 33
        token = order[choice % len(order)]
        assert len(order) < len(tokens) or token == draw(history, len(tokens))
        ids.append(token)
        history = follow(history, (token,))
        text = b"".join(tokens[other] for other in ids)
        found = [stop for stop in fields.get("stop", ()) if stop.encode() in text]
        if found:
            return ids, (
                "stop",
                min(found, key=lambda stop: (text.find(stop.encode()) + len(stop), -len(stop))),
            )
        if token in ends:
            return ids, ("stop", token)
    return ids, ("length", None)


@pytest.mark.drawn
@pytest.mark.parametrize(("seed", "count", "slots", "config"), RUNS, ids=[str(run[0]) for run in RUNS])
def test_simulation(
    bench: Any, toy_grammars: Any, seed: int, count: int, slots: int, config: dict[str, Any]
) -> None:
    rng = random.Random(seed + 100 * EXPLORE)
    now, count = 0, tries(count)
    grammars = toy_grammars(ready=False)
    sim = bench(slots, grammar=grammars, clock=lambda: float(now), **config)
    size = len(sim.vocabulary)
    maker = Maker(rng, slots, size)
    sent: dict[str, dict[str, Any]] = {}
    aborted: set[str] = set()
    due: dict[str, float] = {}
    live: set[str] = set()
    while len(sent) < count or sim.scheduler.busy:
        now += 1
        assert now < 40 * count
        arrivals = rng.choice([0, 0, 1, 2, 8]) if len(live) < BACKLOG else 0
        for _ in range(min(arrivals, count - len(sent))):
            rid = str(len(sent))
            sent[rid] = maker.request()
            if "time_left_s" in sent[rid]:
                due[rid] = now + sent[rid]["time_left_s"]
            live.add(rid)
            sim.add(rid, **sent[rid])
        if live and rng.random() < 0.03:
            rid = rng.choice(sorted(live))
            aborted.add(rid)
            sim.scheduler.abort(rid)
        grammars.release(rng.randrange(3))
        if rng.random() < 0.002:
            sim.scheduler.flush_cache()
        for output in sim.tick():
            if output.finish is not None:
                live.remove(output.rid)
        if now % 50 == 0:
            sim.account()
    sim.empty()
    assert set(sim.news) == set(sent)
    # A tick is a second here. Prompts have up to 120 tokens and take turns in the chunk budget; decoding is
    # shared.
    longest_wait = 400 + BACKLOG * 120 / config["chunked_prefill_size"]
    reference = bench(100_000, grammar=toy_grammars(), jump_forward=config.get("jump_forward", True))
    for rid, fields in sent.items():
        answer = sim.answer(rid)
        check(answer, fields, reference, rid, sim.vocabulary.tokens)
        if answer.finish.type == "abort":
            assert answer.finish.error["code"] in ("aborted", "deadline_exceeded")
            assert rid in aborted if answer.finish.error["code"] == "aborted" else due[rid] <= now
        assert answer.queue_s <= longest_wait
    state = sim.scheduler.state()
    assert state["finished"] + state["failed"] == count
    if slots <= 200:
        assert state["retractions"] > 0


def check(answer: Any, fields: dict[str, Any], reference: Any, rid: str, tokens: tuple[bytes, ...]) -> None:
    """Complete answers equal those of a request alone; aborted ones are a beginning of them."""
    whole = answer.finish.type != "abort"
    if "constraint" in fields:
        reference.add(rid, **{name: value for name, value in fields.items() if name != "time_left_s"})
        other = reference.run().answer(rid)
        ids, finish = other.new_ids, (other.finish.type, other.finish.matched)
        scores = (other.input_logprobs, other.output_logprobs)
        assert whole is False or answer.jumped_tokens == other.jumped_tokens
    else:
        ids, finish = alone(fields, tokens, 0)
        scores = expected_scores(fields, ids)
    if not whole:
        assert answer.new_ids == ids[: len(answer.new_ids)]
        return
    assert (answer.new_ids, (answer.finish.type, answer.finish.matched)) == (ids, finish)
    assert (answer.input_logprobs, answer.output_logprobs) == scores
    assert answer.prompt_tokens == len(fields["prompt"])
    assert answer.completion_tokens == len(ids)
    # A text forced from the start is computed behind the prompt, so all of that may come from the cache.
    assert 0 <= answer.cached_tokens < len(fields["prompt"]) + ("constraint" in fields)


def expected_scores(fields: dict[str, Any], ids: list[int]) -> tuple[Any, list[float | None]]:
    if not fields.get("return_logprob"):
        return None, []
    values: list[float | None] = []
    history = START
    for token in [*fields["prompt"], *ids]:
        values.append(logprob(history, token) if values else None)
        history = follow(history, (token,))
    start, prompt = fields["logprob_start_len"], len(fields["prompt"])
    return (values[start:prompt] if start >= 0 else None), values[prompt:]
