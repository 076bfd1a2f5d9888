"""A stage hears of each request in order, and of each point once, whatever happens to the request."""

from __future__ import annotations

import random
from typing import Any

import pytest

from runtime.plan import Sample
from runtime.protocol.constraint import Constraint
from runtime.scheduler.requests.request import Request
from runtime.scheduler.stage import Stage


class Watched(Stage):
    """Notes what it is called for. `waits`: requests that are not let in."""

    calls: dict[str, list[str]]
    waits: set[str]

    def note(self, request: Request, what: str) -> None:
        self.calls.setdefault(request.rid, []).append(what)

    def before_first_decode(self, request: Request) -> bool:
        assert request.cached < 0
        return request.rid not in self.waits

    def admitted(self, request: Request, now: float) -> None:
        super().admitted(request, now)
        assert request.lease is not None
        assert request.cached >= 0
        self.note(request, "admitted")

    def prompt_done(self, request: Request, sample: Sample, now: float) -> None:
        super().prompt_done(request, sample, now)
        assert request.computed >= request.prompt_len
        assert request.produced == 0 or request.guide is not None
        assert self.manager.cache.probe(request.tokens[: request.prompt_len]) == request.prompt_len
        self.note(request, "prompt done")

    def finished(self, request: Request, now: float) -> None:
        super().finished(request, now)
        assert request.lease is None
        self.note(request, "finished")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_each_point_is_passed_once(make_bench: Any, toy_grammars: Any, seed: int, overlap: bool) -> None:
    dice = random.Random(seed)
    Watched.calls, Watched.waits = {}, set()
    sim = make_bench(60, grammar=toy_grammars(), stage=Watched, overlap=overlap, chunked_prefill_size=7)
    names = [f"{number}" for number in range(14)]
    for name in names:
        fields: dict[str, Any] = {"max_new_tokens": dice.randrange(0, 20), "ignore_eos": True}
        if dice.random() < 0.3:
            fields |= {"constraint": Constraint("regex", "the st|ab and in"), "max_new_tokens": 12}
        if dice.random() < 0.3:
            fields["return_logprob"] = True
        sim.add(name, [dice.randrange(3) for _ in range(dice.randrange(1, 20))], **fields)
        for _ in range(dice.randrange(4)):
            sim.tick()
        if dice.random() < 0.2:
            sim.scheduler.abort(dice.choice(names))
        if name in names[::4]:
            sim.scheduler.pause("retract")
            sim.tick()
            sim.scheduler.resume()
    sim.run()
    whole = ["admitted", "prompt done", "finished"]
    for name in names:
        calls, answer = Watched.calls[name], sim.answer(name)
        if answer.finish.type == "abort":
            assert calls[:-1] == whole[: len(calls) - 1]
            assert calls[-1] == "finished"
        elif answer.new_ids and answer.decode_steps:
            assert calls == whole
        else:
            assert calls in (["admitted", "finished"], ["finished"])
    assert sim.scheduler.state()["retractions"]
    sim.empty()


def test_who_may_not_begin_is_passed_by(make_bench: Any) -> None:
    Watched.calls, Watched.waits = {}, {"first"}
    sim = make_bench(60, stage=Watched, policy="priority", preemption_threshold=1)
    sim.add("first", [1, 2], max_new_tokens=3, ignore_eos=True, priority=5)
    sim.add("second", [1, 2, 3], max_new_tokens=3, ignore_eos=True)
    while "second" not in sim.news:
        sim.tick()
    assert "first" not in Watched.calls
    Watched.waits.clear()
    assert len(sim.run().answer("first").new_ids) == 3
    sim.empty()
