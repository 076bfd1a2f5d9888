"""Deferred advance: beside free requests, what a constraint asks for is done while passes run, and nobody
waits."""

from __future__ import annotations

import random
from typing import Any

import pytest

from runtime.processes.checkpoint.tokenizer import TextTable
from runtime.protocol.constraint import Constraint
from tests.unit.runtime.processes.shown_text import IncrementalText

FORCED = "st and then st|st by the st"
TEXTS = tuple(FORCED.encode().split(b"|"))


def mixed(make_bench: Any, toy_grammars: Any, *, free: int, bound: int, over: Any, **fields: Any) -> Any:
    sim = make_bench(2000, grammar=toy_grammars(), overlap=True)
    sim.runner.over = over
    for number in range(free):
        sim.add(f"free {number}", [number, 2], max_new_tokens=12, ignore_eos=True, stream=True)
    for number in range(bound):
        regex = Constraint("regex", FORCED)
        sim.add(f"bound {number}", [number, 3], constraint=regex, max_new_tokens=20, **fields)
    return sim


def texts(sim: Any, count: int) -> list[bytes]:
    return [sim.text(f"bound {number}") for number in range(count)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("over", [False, True])
def test_outputs_are_those_of_requests_alone(
    make_bench: Any, toy_grammars: Any, over: bool, stream: bool
) -> None:
    alone = mixed(make_bench, toy_grammars, free=0, bound=6, over=lambda: over, stream=stream).run()
    beside = mixed(make_bench, toy_grammars, free=6, bound=6, over=lambda: over, stream=stream).run()
    assert texts(alone, 6) == texts(beside, 6)
    for number in range(6):
        one, other = alone.answer(f"bound {number}"), beside.answer(f"bound {number}")
        assert one.new_ids == other.new_ids
        assert one.jumped_tokens == other.jumped_tokens > 0
    beside.empty()


@pytest.mark.parametrize("seed", range(12))
def test_what_was_not_advanced_is_not_sent(make_bench: Any, toy_grammars: Any, seed: int) -> None:
    """A jump may put another token in its place."""
    sims, dice = [], random.Random(seed)
    for over in (lambda: False, lambda: dice.random() < 0.4):
        sim = make_bench(2000, grammar=toy_grammars(), overlap=True, liveness=False)
        sim.runner.over = over
        for number in range(3):
            sim.add(f"free {number}", [1, 2], max_new_tokens=99, ignore_eos=True)
        for number in range(8):
            regex = Constraint("regex", "st by|the in|in st|he|abcz")
            sim.add(f"{number}", [seed, number], constraint=regex, max_new_tokens=9, stream=True)
        sims.append(sim.run())
    for number in range(8):
        one, other = [sim.answer(f"{number}") for sim in sims]
        assert one.new_ids == other.new_ids


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("jump", [True, False])
def test_a_stop_string_is_sent_with_the_end(
    make_bench: Any, toy_grammars: Any, seed: int, jump: bool
) -> None:
    """What is sent before the end is shown, and never taken back: the text of a stream is the whole one's."""
    dice = random.Random(seed)
    words = ["".join(dice.choices("abehinrstz ", k=9)) for _ in range(40)]
    stops = [tuple(dice.sample(["s", "t", "he", "in", "ab", "z", " a"], 2)) for _ in range(6)]
    told: list[list[tuple[str, list[int], Any]]] = []
    for stream in (False, True):
        sim = make_bench(2000, grammar=toy_grammars(), overlap=True)
        sim.runner.over = lambda: stream and dice.random() < 0.3  # noqa: B023 - used within the turn
        for number in range(4):
            sim.add(f"free {number}", [1, 2], max_new_tokens=60, ignore_eos=True, stream=True)
        for number, stop in enumerate(stops):
            regex, prompt = Constraint("regex", "|".join(words)), [seed, number]
            # Most have room for no whole word, so that nothing but the verdict holds a token back.
            sim.add(f"{number}", prompt, constraint=regex, max_new_tokens=3 + number, stop=stop,
                    stream=stream, jump_forward=jump)  # fmt: skip
        sim.run()
        table = TextTable(sim.vocabulary, {})
        answers = []
        for number, stop in enumerate(stops):
            made, news = IncrementalText(table, stop=stop), sim.news[f"{number}"]
            for one in news:
                end = one.finish
                made.feed(one.new_ids, finished=end is not None, matched=end.matched if end else None)
            answers.append((made.text, made.ids, news[-1].finish))
        told.append(answers)
    assert told[0] == told[1]


def test_free_requests_take_a_step_for_each_token_however_long_advances_take(
    make_bench: Any, toy_grammars: Any
) -> None:
    """A pass is over at once: one advance and one mask is all that is done in it."""
    sim = mixed(make_bench, toy_grammars, free=5, bound=20, over=lambda: True)
    for _ in range(14):
        sim.tick()
    assert [len(sim.answer(f"free {number}").new_ids) for number in range(5)] == [12] * 5
    assert any(f"bound {number}" not in sim.news for number in range(20)), "these go on in their own time"
    sim.run()
    assert all(text in TEXTS for text in texts(sim, 20))
    sim.empty()


def test_constrained_ones_get_on_in_every_pass(make_bench: Any, toy_grammars: Any) -> None:
    sim = mixed(make_bench, toy_grammars, free=0, bound=4, over=lambda: True)
    sim.add("free", [1], max_new_tokens=200, ignore_eos=True)
    for _ in range(60):
        sim.tick()
    assert all(sim.text(f"bound {number}") for number in range(4)), "long before the free one ends"
    sim.run()
    assert len(sim.answer("free").new_ids) == 200
    sim.empty()


def test_nothing_is_deferred_without_free_requests(make_bench: Any, toy_grammars: Any) -> None:
    """Nobody would gain by it, and each jump would cost a step."""
    sim = mixed(make_bench, toy_grammars, free=0, bound=3, over=lambda: True)
    sim.tick()
    while sim.scheduler.busy:
        sim.tick()
        assert not sim.scheduler.guided.has_deferred
        assert all(request.intact for request in sim.scheduler._batch.running)


@pytest.mark.parametrize("how", ["launch", "finish"])
def test_a_pass_that_fails_while_advances_are_deferred(make_bench: Any, toy_grammars: Any, how: str) -> None:
    sim = mixed(make_bench, toy_grammars, free=3, bound=3, over=lambda: False)
    whole, calls = getattr(sim.runner, how), 0

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
    names = [f"{kind} {number}" for kind in ("free", "bound") for number in range(3)]
    assert {sim.answer(rid).finish.type for rid in names} <= {"abort", "stop", "length"}
    assert any(sim.answer(rid).finish.type == "abort" for rid in names)
    sim.empty()


@pytest.mark.parametrize("tick", range(1, 9))
def test_aborted_or_paused_while_an_advance_is_due(make_bench: Any, toy_grammars: Any, tick: int) -> None:
    sim = mixed(make_bench, toy_grammars, free=4, bound=4, over=lambda: True)
    for _ in range(tick):
        sim.tick()
    sim.scheduler.abort("bound 0")
    sim.scheduler.pause("retract")
    for _ in range(3):
        sim.tick()
    sim.scheduler.resume()
    sim.run()
    assert all(sim.text(f"bound {number}") in TEXTS for number in range(1, 4))
    sim.empty()


@pytest.mark.parametrize("stream", [False, True])
def test_an_advance_is_interrupted_between_two_pieces_of_its_search(
    make_bench: Any, toy_grammars: Any, stream: bool
) -> None:
    """However long a search for a completion is, a pass waits for one piece of it; what comes of it is the
    same."""
    dice = random.Random(7)
    specs = ["|".join("".join(dice.choices("az", k=24)) for _ in range(200)) for _ in range(4)]
    answers, broken = [], 0
    for over in (False, True):
        sim = make_bench(4000, grammar=toy_grammars(), overlap=True)
        sim.runner.over = lambda over=over: over
        sim.add("free", [1], max_new_tokens=400, ignore_eos=True)
        for number, spec in enumerate(specs):
            regex = Constraint("regex", spec)
            sim.add(f"{number}", [number, 3], constraint=regex, max_new_tokens=40, stream=stream)
        while sim.scheduler.busy:
            sim.tick()
            stopped = [one for one in sim.scheduler._batch.running if one.guide and one.guide.interrupted]
            assert all(one.waits for one in stopped)
            broken += len(stopped)
        answers.append([(sim.answer(f"{number}").new_ids, sim.text(f"{number}")) for number in range(4)])
        assert not sim.scheduler.guided.has_deferred
        sim.empty()
    assert answers[0] == answers[1]
    assert broken > 0


def test_an_interrupted_advance_ends_with_its_request(make_bench: Any, toy_grammars: Any) -> None:
    dice = random.Random(7)
    spec = "|".join("".join(dice.choices("az", k=24)) for _ in range(200))
    sim = make_bench(4000, grammar=toy_grammars(), overlap=True)
    sim.runner.over = lambda: True
    sim.add("free", [1], max_new_tokens=300, ignore_eos=True)
    for number in range(4):
        regex = Constraint("regex", spec)
        sim.add(f"{number}", [number, 3], constraint=regex, max_new_tokens=60, stream=True)
    while not any(one.guide and one.guide.interrupted for one in sim.scheduler._batch.running):
        sim.tick()
    for number in range(4):
        sim.scheduler.abort(f"{number}")
    sim.run()
    assert not sim.scheduler.guided.has_deferred
    assert len(sim.answer("free").new_ids) == 300
    sim.empty()
