"""Guessing tokens ahead changes no answer, and keeps nothing that was guessed wrong."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest

from runtime.config.engine import EngineConfig
from runtime.config.speculation import SpeculationConfig
from runtime.protocol.errors import BadRequest
from runtime.scheduler.guided.masks import full, mask_of, masks_behind
from runtime.scheduler.requests.drafting import PATIENCE, Drafting, PromptLookup
from runtime.scheduler.requests.request import Request
from runtime.scheduler.speculation import RETRY, Pace, Speculation
from tests.unit.runtime.scheduler.fake import START, draw, follow
from tests.unit.runtime.scheduler.test_overlap import play

NGRAM = SpeculationConfig("NGRAM", 6, 1, 8)
MODEL = SpeculationConfig("STANDALONE", 5)


def knowing(share: float) -> Any:
    """Guesses as one who knows the fake model, and is wrong now and then."""

    def guesses(self: Speculation, request: Request) -> tuple[int, ...]:
        if request.drafting is None or request.healing is not None:
            return ()
        if request.guide is not None and (request.guide.pending or request.guide.unread):
            return ()
        size, found = len(request.vocabulary), []
        history, mask = follow(START, request.tokens), mask_of(request, full(size))
        for place in range(min(5, request.to_come - 1)):
            token = draw(history, size, mask)
            if (follow(history, (place,)) >> 20) % 100 >= 100 * share:
                token = (token + 1) % size
            found.append(token)
            history = follow(history, (token,))
            if mask is not None:
                behind = masks_behind(request, found, mask_of(request, full(size)) or mask, full(size))
                if len(behind) <= place:
                    break
                mask = behind[-1]
        return tuple(found)[: self._slots_for(request, len(found))]

    return guesses


def check(make_bench: Any, toy_grammars: Any, seed: int, **on: Any) -> tuple[int, int]:
    """One random trace with and without; how many tokens were guessed, and how many of these rightly."""
    plain, _ = play(make_bench, toy_grammars, seed, False)
    drafted = accepted = 0
    for overlap in (False, True):
        guessing, _ = play(make_bench, toy_grammars, seed, overlap, **on)
        for rid, (one, _, aborted) in plain.items():
            other = guessing[rid][0]
            if other.spec is not None:
                drafted, accepted = (
                    drafted + other.spec.drafted_tokens,
                    accepted + other.spec.accepted_tokens,
                )
                told = other.spec.acceptance_histogram
                assert sum(told) == other.spec.verify_ct
                assert sum(count * many for count, many in enumerate(told)) == other.spec.accepted_tokens
                if other.output_origins:
                    assert other.output_origins.count("speculated") == other.spec.accepted_tokens
            if "abort" in {one.finish.type, other.finish.type}:  # where it falls differs by steps
                assert aborted is not None
                shorter, longer = sorted((one.new_ids, other.new_ids), key=len)
                assert longer[: len(shorter)] == shorter
                continue
            assert (one.new_ids, one.finish) == (other.new_ids, other.finish)
            assert one.output_logprobs == other.output_logprobs
            assert one.output_top_logprobs == other.output_top_logprobs
            assert (one.output_origins.count("forced"), len(one.output_origins)) == (
                other.output_origins.count("forced"), len(other.output_origins),
            )  # fmt: skip
            assert one.input_logprobs == other.input_logprobs
            assert (one.completion_tokens, one.decode_steps, one.jumped_tokens) == (
                other.completion_tokens, other.decode_steps, other.jumped_tokens,
            )  # fmt: skip
    return drafted, accepted


@pytest.mark.parametrize("share", [0.9, 0.5])
def test_answers_are_the_same(
    make_bench: Any, toy_grammars: Any, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Speculation, "guesses", knowing(share))
    found = [check(make_bench, toy_grammars, seed, speculation=NGRAM) for seed in range(6)]
    drafted, accepted = (sum(part) for part in zip(*found))
    assert accepted > drafted * share / 4 > 100


def test_answers_are_the_same_with_look_up_and_with_a_draft_model(make_bench: Any, toy_grammars: Any) -> None:
    looked = [check(make_bench, toy_grammars, seed, speculation=NGRAM) for seed in range(100, 103)]
    assert sum(drafted for drafted, _ in looked) > 0
    model = [check(make_bench, toy_grammars, seed, speculation=MODEL) for seed in range(200, 203)]
    assert sum(accepted for _, accepted in model) > 100


def test_wrong_guesses_leave_nothing_behind(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in a lease of its own; what is in the cache afterwards is what was generated."""
    for share in (0.0, 0.6):
        monkeypatch.setattr(Speculation, "guesses", knowing(share))
        sim = bench(300, speculation=NGRAM, page_size=4)
        for number in range(4):
            sim.add(str(number), [number + 1, 2, 3], max_new_tokens=30, ignore_eos=True)
        while sim.scheduler.busy:
            sim.tick()
            sim.account()
        kept = sim.scheduler.manager.cache
        for number in range(4):
            whole = array("q", [number + 1, 2, 3, *sim.answer(str(number)).new_ids])
            assert kept.match(whole, None).length == (len(whole) - 1) // 4 * 4
        assert sum(node.length for node in kept.nodes()) == 4 * 32
        sim.empty()


def test_guesses_never_take_others_slots(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Speculation, "guesses", knowing(0.7))
    steps = []
    for config in ({}, {"speculation": NGRAM}):
        sim = bench(64, **config)
        for number in range(6):
            sim.add(str(number), [number, 9], max_new_tokens=20, ignore_eos=True)
        sim.run()
        steps.append((sim.runner.steps, [sim.answer(str(number)).new_ids for number in range(6)]))
        sim.empty()
    assert steps[0][1] == steps[1][1]
    assert steps[1][0] < steps[0][0]


@pytest.mark.parametrize("streaming", [False, True])
def test_turns_of_a_session(bench: Any, monkeypatch: pytest.MonkeyPatch, streaming: bool) -> None:
    """Each finds in the cache what the one before left there, and nothing else."""
    monkeypatch.setattr(Speculation, "guesses", knowing(0.7))
    found = []
    for config in ({}, {"speculation": NGRAM}):
        sim = bench(400, page_size=2, **config)
        sim.scheduler.open_session("s", streaming=streaming)
        answers, last = [], None
        for number in range(5):
            words = {"session_params": {"id": "s", **({} if last is None else {"rid": last})}}
            sim.add(str(number), [number, 5], max_new_tokens=9, ignore_eos=True, **words)
            last = str(number)
            answer = sim.run().answer(last)
            answers.append((answer.new_ids, answer.prompt_tokens, answer.cached_tokens))
            sim.account() if not streaming else sim.scheduler.check()
        found.append((answers, sim.scheduler.manager.available))
        sim.scheduler.close_session("s")
        sim.empty()
    assert found[0] == found[1]


def test_figures_of_a_request_and_of_all(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Speculation, "guesses", knowing(1.0))
    sim = bench(speculation=NGRAM)
    sim.add("a", [1, 2, 3], max_new_tokens=14, ignore_eos=True)
    sim.run()
    told = sim.answer("a").spec
    assert (told.verify_ct, told.accepted_tokens, told.drafted_tokens) == (2, 10, 10)
    assert told.acceptance_histogram == [0, 0, 0, 0, 0, 2, 0]
    state = sim.scheduler.state()
    assert state["spec_drafted_tokens_total"] == state["spec_accepted_tokens_total"] == 10
    assert state["spec_accept_rate"] == 1.0
    assert state["spec_accept_length"] == 6.0
    assert "spec_accept_rate" not in bench().scheduler.state()


def test_look_up_takes_the_longest_match_and_of_those_the_latest() -> None:
    lookup = PromptLookup(1, 8)
    text = array("q", [1, 2, 3, 4, 9, 2, 3, 5, 9, 7, 2, 3, 6, 8, 2, 3])
    assert lookup.guess(text, 3) == ((6, 8, 2), 2)
    text.extend([5, 1, 1, 2, 3, 4, 0, 1, 2, 3])
    assert lookup.guess(text, 2) == ((4, 0), 3)
    text.append(77)
    assert lookup.guess(text, 2) == ((), 0)
    text.append(77)
    assert lookup.guess(text, 4) == ((77, 77, 77, 77), 1)


def test_look_up_wants_enough_in_common() -> None:
    lookup = PromptLookup(3, 8)
    assert lookup.guess(array("q", [1, 2]), 4) == ((), 0)
    text = array("q", [5, 1, 2, 8, 9, 1, 2])
    assert lookup.guess(text, 4) == ((), 0)
    text.append(8)
    assert lookup.guess(text, 4) == ((9, 1, 2, 8), 3)


def test_look_up_in_a_text_that_is_cut_back() -> None:
    """What it guesses is always a copy of what follows the same tokens now."""
    pick = random.Random(3)
    for _ in range(200):
        lookup, text = PromptLookup(pick.choice([1, 2, 3]), 6), array("q")
        for _ in range(60):
            text.extend(pick.randrange(3) for _ in range(pick.randrange(1, 4)))
            if pick.random() < 0.3:
                del text[-pick.randrange(1, len(text) + 1) :]
            found, agreed = lookup.guess(text, 4)
            if not found:
                continue
            end = len(text)
            places = [
                place
                for place in range(agreed, end)
                if text[place - agreed : place] == text[end - agreed :]
                and all(token == text[place + at % (end - place)] for at, token in enumerate(found))
            ]
            assert places
            assert len(found) == 4


def test_fewer_are_guessed_where_guesses_are_wrong() -> None:
    drafting = Drafting(16, PromptLookup(1, 8))
    text = array("q", [1, 2, 1])
    for _ in range(8):
        drafting.verified(drafting.reach, 0)
    assert (drafting.reach, drafting.rest) == (1, PATIENCE)
    assert drafting.guess(text, 4) == ()
    assert drafting.rest == PATIENCE - 1
    drafting.rest = 0
    assert drafting.guess(text, 4) == (2, 1, 2, 1)
    drafting.verified(1, 1)
    drafting.verified(2, 2)
    assert drafting.reach == 4
    drafting.verified(4, 1)
    assert drafting.reach == 2


def test_what_a_guess_costs_is_learnt_from_passes() -> None:
    pace, dice = Pace(), random.Random(2)
    assert pace.price(8) == 0.0
    for _ in range(60):  # 6 ms and 0.6 for each token
        tokens = dice.choice([8, 12, 40])
        pace.observe(tokens, (0.006 + 0.0006 * tokens) * dice.uniform(0.9, 1.1))
        pace.observe(tokens, 0.0)
    pace.observe(8, 3.0)  # something held it up
    assert pace.price(1) == pytest.approx(0.09, abs=0.04)
    assert pace.price(10) == pytest.approx(0.5, abs=0.1)
    for _ in range(400):  # all passes alike say nothing new
        pace.observe(8, 0.0108)
    assert pace.price(10) == pytest.approx(0.5, abs=0.15)


def test_nothing_is_guessed_where_it_does_not_pay() -> None:
    drafting = Drafting(8, PromptLookup(1, 8))
    drafting.weigh(0.5, retry=False)
    assert drafting.tries
    for _ in range(6):
        drafting.verified(4, 1)
    drafting.weigh(0.5, retry=False)
    assert not drafting.tries
    drafting.weigh(0.5, retry=True)
    assert drafting.tries
    drafting.weigh(0.1, retry=False)
    assert drafting.tries
    for _ in range(6):
        drafting.verified(4, 4)
    drafting.weigh(0.9, retry=False)
    assert drafting.tries


def test_short_requests_look_again_too(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A price learnt in a bad moment is not kept for ever, though no request lives until a retry."""
    monkeypatch.setattr(
        "runtime.scheduler.speculation.Drafting.guess", lambda self, tokens, most: (1,) * most
    )
    sim = bench(speculation=NGRAM)
    sim.runner.takes = lambda plan: (0.0, 1e-5 + 1e-3 * plan.token_count)
    sim.add("first", [1, 2, 3], max_new_tokens=200, ignore_eos=True)
    sim.run()
    sim.runner.takes = lambda plan: (0.0, 1e-3)
    drafted = []
    for number in range(2 * RETRY):
        before = sim.runner.tokens
        sim.add(f"short {number}", [number % 16, 2, 3], max_new_tokens=8, ignore_eos=True)
        sim.run()
        drafted.append(sim.runner.tokens - before)
    assert drafted[0] == 10
    assert min(drafted[-8:]) > 10


def test_a_step_that_tells_its_time_sets_the_price(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes whose time is all their tokens': guessing stops, and nothing else changes."""
    monkeypatch.setattr(
        "runtime.scheduler.speculation.Drafting.guess", lambda self, tokens, most: (1,) * most
    )
    steps = []
    for each in (0.0, 1e-3):
        sim = bench(speculation=NGRAM)
        sim.runner.takes = lambda plan, each=each: (0.0, 1e-4 + each * plan.token_count)
        sim.add("a", [1, 2, 3], max_new_tokens=300, ignore_eos=True)
        sim.run()
        steps.append((sim.answer("a").new_ids, sim.runner.tokens))
    assert steps[0][0] == steps[1][0]
    assert steps[1][1] < 340 < 420 < steps[0][1]


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"algorithm": "EAGLE"}, "algorithm"),
        ({"algorithm": "STANDALONE"}, "algorithm"),
        ({"draft_model_path": "x"}, "draft_model_path"),
        ({"num_steps": 3}, "num_steps"),
        ({"algorithm": "NGRAM", "draft_model_path": "x"}, "draft_model_path"),
        ({"algorithm": "NGRAM", "num_draft_tokens": 1}, "num_draft_tokens"),
        (
            {"algorithm": "STANDALONE", "draft_model_path": "x", "num_steps": 3, "num_draft_tokens": 3},
            "num_steps",
        ),
        (
            {
                "algorithm": "NGRAM",
                "ngram_min_match_window_size": 5,
                "ngram_max_match_window_size": 4,
            },
            "ngram_min_match_window_size",
        ),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], where: str) -> None:
    with pytest.raises(BadRequest) as caught:
        speculation(**options)
    assert caught.value.where == f"speculative_{where}"


def speculation(**options: Any) -> SpeculationConfig:
    return EngineConfig.of({f"speculative_{name}": value for name, value in options.items()}).speculation()


def test_options_that_do() -> None:
    ngram = speculation(
        algorithm="ngram",
        num_draft_tokens=8,
        ngram_min_match_window_size=1,
        ngram_max_match_window_size=5,
    )
    assert ngram == SpeculationConfig("NGRAM", 7, 1, 5)
    drafting = {"draft_model_path": "x", "num_draft_tokens": 5, "num_steps": 4}
    assert speculation(algorithm="STANDALONE", **drafting).drafts == 4
    assert speculation(algorithm=None).algorithm is None
