"""Log-probabilities of prompts and outputs, across chunks, caches and company."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.scheduler.fake import START, follow, logprob


def truth(tokens: list[int]) -> list[float | None]:
    values: list[float | None] = []
    history = START
    for token in tokens:
        values.append(logprob(history, token) if values else None)
        history = follow(history, (token,))
    return values


PROMPT = [n * n % 31 for n in range(30)]


@pytest.mark.parametrize("chunk", [1, 2, 7, 15, 2048])
@pytest.mark.parametrize("start", [0, 1, 2, 13, 14, 15, 28, 29, 30])
@pytest.mark.parametrize("new", [0, 1, 3])
def test_prompt_scores(bench: Any, chunk: int, start: int, new: int) -> None:
    sim = bench(400, chunked_prefill_size=chunk)
    for round in range(2):  # the second time the cache has it all
        sim.add(
            str(round),
            PROMPT,
            max_new_tokens=new,
            return_logprob=True,
            logprob_start_len=start,
            ignore_eos=True,
        )
        answer = sim.run().answer(str(round))
        assert answer.input_logprobs == truth(PROMPT)[start:]
        assert answer.output_logprobs == truth([*PROMPT, *answer.new_ids])[30:]
        assert (answer.finish.type, len(answer.new_ids)) == ("length", new)
    assert answer.cached_tokens == min(29, max(0, start - 1)), "only what is not needed for a score is reused"


def test_none_are_given_unasked(bench: Any) -> None:
    sim = bench(400)
    sim.add("a", PROMPT, max_new_tokens=2, return_logprob=True, ignore_eos=True)
    sim.add("b", PROMPT, max_new_tokens=2, ignore_eos=True)
    sim.run()
    assert (sim.answer("a").input_logprobs, len(sim.answer("a").output_logprobs)) == (None, 2)
    assert (sim.answer("b").input_logprobs, sim.answer("b").output_logprobs) == (None, [])


def test_options_over_a_shared_prefix(bench: Any) -> None:
    """What scoring choices does: the prefix once, a few tokens for each option."""
    sim = bench(4000)
    stem = [n * 7 % 31 for n in range(500)]
    options = [[number, number + 1, number + 2] for number in range(20)]
    sim.add("stem", stem, max_new_tokens=0)
    sim.run()
    before = sim.runner.tokens
    for number, option in enumerate(options):
        sim.add(str(number), [*stem, *option], max_new_tokens=0, return_logprob=True, logprob_start_len=500)
    sim.run()
    for number, option in enumerate(options):
        assert sim.answer(str(number)).input_logprobs == truth([*stem, *option])[500:]
    assert sim.runner.tokens - before <= 20 * 4


def test_retraction_keeps_scores(bench: Any) -> None:
    sim = bench(130, conservativeness=0.01, chunked_prefill_size=8)
    prompts = [[number, *PROMPT[:12]] for number in range(6)]
    for number, prompt in enumerate(prompts):
        sim.add(
            str(number), prompt, max_new_tokens=50, return_logprob=True, logprob_start_len=0, ignore_eos=True
        )
    sim.run()
    assert sim.scheduler.state()["retractions"] > 0
    for number, prompt in enumerate(prompts):
        answer = sim.answer(str(number))
        assert [*answer.input_logprobs, *answer.output_logprobs] == truth([*prompt, *answer.new_ids])


def test_top_logprobs(bench: Any) -> None:
    sim = bench(400)
    sim.add("a", PROMPT, max_new_tokens=3, return_logprob=True, top_logprobs_num=4, ignore_eos=True)
    answer = sim.run().answer("a")
    history = follow(START, PROMPT)
    for token, top in zip(answer.new_ids, answer.output_top_logprobs, strict=True):
        values = sorted((logprob(history, other) for other in range(len(sim.vocabulary))), reverse=True)
        assert [value for _, value in top] == values[:4]
        history = follow(history, (token,))
