"""Log-probabilities of prompts and outputs, across chunks, caches and company."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.protocol.constraint import Constraint
from tests.unit.runtime.scheduler.fake import START, follow, hidden, logprob


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
        fields = {"max_new_tokens": 50, "min_new_tokens": 50, "return_logprob": True, "logprob_start_len": 0}
        sim.add(str(number), prompt, **fields)
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


def best(history: int, count: int, vocab: int) -> list[float]:
    return sorted((logprob(history, other) for other in range(vocab)), reverse=True)[:count]


@pytest.mark.parametrize("chunk", [1, 7, 2048])
@pytest.mark.parametrize("start", [0, 1, 14, 29])
def test_prompt_and_output_alike_give_top_and_chosen_ids(bench: Any, chunk: int, start: int) -> None:
    sim = bench(400, chunked_prefill_size=chunk)
    ids, vocab = [4, 0, 17], len(sim.vocabulary)
    for round in range(2):
        sim.add(
            str(round),
            PROMPT,
            max_new_tokens=3,
            return_logprob=True,
            logprob_start_len=start,
            top_logprobs_num=2,
            token_ids_logprob=ids,
            ignore_eos=True,
        )
        answer = sim.run().answer(str(round))
        whole, histories = [*PROMPT, *answer.new_ids], [START]
        for token in whole:
            histories.append(follow(histories[-1], (token,)))
        tops = [*answer.input_top_logprobs, *answer.output_top_logprobs]
        chosen = [*answer.input_token_ids_logprobs, *answer.output_token_ids_logprobs]
        assert len(tops) == len(chosen) == len(whole) - start
        for place, (top, own) in enumerate(zip(tops, chosen), start):
            if place == 0:
                assert top == own == []
                continue
            here = histories[place]
            assert [value for _, value in top] == best(here, 2, vocab)
            assert [logprob(here, token) for token, _ in top] == [value for _, value in top]
            assert own == [(token, logprob(here, token)) for token in ids]


def test_forced_text_has_them_too(bench: Any, toy_grammars: Any) -> None:
    sim = bench(400, grammar=toy_grammars())
    sim.add(
        "a",
        PROMPT,
        max_new_tokens=20,
        constraint=Constraint(kind="regex", spec="thing in a stabbed ab|xyz"),
        return_logprob=True,
        top_logprobs_num=3,
        token_ids_logprob=[2],
        seed=1,
    )
    answer = sim.run().answer("a")
    assert answer.jumped_tokens > 0
    history = follow(START, PROMPT)
    for token, value, top, own in zip(
        answer.new_ids,
        answer.output_logprobs,
        answer.output_top_logprobs,
        answer.output_token_ids_logprobs,
        strict=True,
    ):
        assert value == logprob(history, token)
        assert [one for _, one in top] == best(history, 3, len(sim.vocabulary))
        assert own == [(2, logprob(history, 2))]
        history = follow(history, (token,))


def states(tokens: list[int]) -> list[list[float]]:
    histories = [START]
    for token in tokens:
        histories.append(follow(histories[-1], (token,)))
    return [list(hidden(history)) for history in histories[1:]]


@pytest.mark.parametrize("chunk", [1, 7, 2048])
@pytest.mark.parametrize("new", [0, 1, 4])
def test_hidden_states(bench: Any, chunk: int, new: int) -> None:
    """All computed tokens', or the last one's; what the cache holds makes no difference."""
    sim = bench(400, chunked_prefill_size=chunk)
    for round, how in enumerate([True, "last", True, "last", False]):
        sim.add(str(round), PROMPT, max_new_tokens=new, return_hidden_states=how, ignore_eos=True)
        answer = sim.run().answer(str(round))
        right = states([*PROMPT, *answer.new_ids][: 30 + max(new - 1, 0)])
        assert answer.hidden_states == {True: right, "last": right[-1:], False: None}[how]
        assert answer.cached_tokens == (29 if round and how is not True else 0)


def test_embedding_is_the_last_prompt_tokens_state(bench: Any) -> None:
    sim = bench(400, chunked_prefill_size=7)
    sim.add("first", PROMPT, max_new_tokens=0)
    sim.run()
    sim.add("a", PROMPT, max_new_tokens=0, embedding=True)
    answer = sim.run().answer("a")
    assert answer.hidden_states == states(PROMPT)[-1:]
    assert (answer.new_ids, answer.cached_tokens) == ([], 29)


def test_retraction_keeps_hidden_states(bench: Any) -> None:
    sim = bench(130, conservativeness=0.01, chunked_prefill_size=8)
    for number in range(6):
        # Without ignore_eos, admission only estimates how long they become; here they all become long.
        sim.add(
            str(number),
            [number, *PROMPT[:12]],
            max_new_tokens=50,
            min_new_tokens=50,
            return_hidden_states=True,
        )
    sim.run()
    assert sim.scheduler.state()["retractions"] > 0
    for number in range(6):
        answer = sim.answer(str(number))
        assert answer.hidden_states == states([number, *PROMPT[:12], *answer.new_ids[:-1]])


def test_a_failed_request_has_none(bench: Any) -> None:
    sim = bench(400)
    sim.add(
        "a", PROMPT, max_new_tokens=50, return_logprob=True, logprob_start_len=0, return_hidden_states=True
    )
    sim.tick()
    sim.scheduler.abort("a")
    answer = sim.run().answer("a")
    assert answer.finish.type == "abort"
    assert answer.hidden_states is answer.input_logprobs is answer.input_top_logprobs is None


@pytest.mark.parametrize(
    ("words", "where"),
    [
        ({"token_ids_logprob": [-1], "return_logprob": True}, "token_ids_logprob"),
        ({"logit_bias": {41: 1.0}}, "logit_bias"),
        ({"custom_logit_processor": "x"}, "custom_logit_processor"),
        ({"stop_regex": ("ok", "(a")}, "stop_regex[1]"),
        ({"stop_regex": ("a(?=b)",)}, "stop_regex[0]"),
    ],
)
def test_what_cannot_be_is_answered_at_once(bench: Any, words: dict[str, Any], where: str) -> None:
    sim = bench(400)
    assert len(sim.vocabulary) == 41
    sim.add("a", PROMPT, **words)
    answer = sim.run().answer("a")
    assert answer.finish.error["code"] in ("bad_request", "bad_constraint", "unsupported_constraint")
    assert where in answer.finish.error["where"]
