"""Sampling words through the whole engine, on the bundled checkpoint."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from runtime.api import Engine
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import BadConstraint, BadRequest, RuntimeFault
from runtime.protocol.io_struct import GenerateReqInput

PROMPT = "The capital of France is"
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(
        "pocket", dtype="float32", device="cpu", max_total_tokens=16_384, max_top_logprobs=1 << 20
    ) as made:
        yield made


def crowd(count: int) -> list[tuple[str, dict[str, Any]]]:
    """Prompts, some with common beginnings, and every kind of draw."""
    stems = [PROMPT, "Write a story about a dog.\n", "1 + 2 =", '{"name": ', "서울은", "Once upon a time"]
    made = []
    for n in range(count):
        words: dict[str, Any] = {"max_new_tokens": 16, "seed": n, "temperature": [1.0, 0.7, 0.0, 1.3][n % 4]}
        words |= {"top_p": 0.9} if n % 3 == 0 else {}
        words |= {"top_k": 20} if n % 5 == 0 else {"min_p": 0.02} if n % 5 == 1 else {}
        words |= {"frequency_penalty": 0.5, "repetition_penalty": 1.2} if n % 7 == 0 else {}
        words |= {"logit_bias": {300: 3.0}, "min_new_tokens": 5} if n % 6 == 0 else {}
        made.append((stems[n % len(stems)] + f" {n}" * (n % 5), {"ignore_eos": n % 2 == 0, **words}))
    return made


def answers(engine: Engine, requests: list[Any], indices: list[int], **how: Any) -> dict[int, list[int]]:
    """Of these requests, sent at once."""
    prompts, words = zip(*(requests[index] for index in indices), strict=True)
    outputs = engine.generate(list(prompts), list(words), **how)
    return {index: list(output.output_ids) for index, output in zip(indices, outputs, strict=True)}


def test_same_seed_same_output_whatever_the_batch() -> None:
    """In the numbers that an engine on the CPU computes in unless told otherwise."""
    requests = crowd(36)
    with Engine("pocket", device="cpu", max_total_tokens=16_384) as engine:
        alone = {i: answers(engine, requests, [i])[i] for i in range(36)}
        order = list(range(36))
        assert answers(engine, requests, order) == alone
        engine.flush_cache()
        assert answers(engine, requests, order) == alone
        random.Random(0).shuffle(order)
        for size in (3, 13):
            engine.flush_cache()
            parts = [answers(engine, requests, order[first : first + size]) for first in range(0, 36, size)]
            assert {i: ids for part in parts for i, ids in part.items()} == alone
    assert len({tuple(ids) for ids in alone.values()}) > 25


@pytest.mark.parametrize(("seed", "options"), [pytest.param(0, {}, id="plain")])
def test_same_seed_same_output_in_random_company(seed: int, options: dict[str, Any]) -> None:
    """Random prompts and constraints; alone, then in batches of random sizes, from the cache and not, with
    jumps and without."""
    draw = random.Random(seed)
    words = "river town king bread 12 7 yes no the of".split()  # noqa: SIM905
    requests = []
    for prompt, sampling in crowd(30):
        more = {"regex": draw.choice([r'\{"name": "[a-z]{1,8}", "age": [0-9]{1,3}\}', r"It's (yes|no)!"])}
        told = sampling | more if draw.random() < 0.3 else sampling
        requests.append((prompt + " ".join(draw.choices(words, k=draw.randrange(60))), told))
    with Engine("pocket", device="cpu", threads=1, max_total_tokens=16_384) as engine:
        alone = {i: answers(engine, requests, [i])[i] for i in range(len(requests))}
    with Engine("pocket", device="cpu", threads=1, max_total_tokens=16_384, **options) as engine:
        for jumps in (True, False):
            order = draw.sample(range(len(requests)), len(requests))
            while order:
                size = draw.choice([1, 2, 3, 5, 13])
                some, order = order[:size], order[size:]
                found = answers(engine, requests, some, jump_forward=jumps)
                assert found == {index: alone[index] for index in some}


@pytest.mark.parametrize("chunk", [2048, 5])
def test_scored_again_the_numbers_are_the_same(chunk: int) -> None:
    with Engine(
        "pocket", dtype="float32", device="cpu", max_total_tokens=8192, chunked_prefill_size=chunk
    ) as engine:
        said = engine.generate(
            PROMPT,
            {"max_new_tokens": 40, "temperature": 1.0, "seed": 1, "ignore_eos": True},
            return_logprob=True,
            top_logprobs_num=3,
            token_ids_logprob=[7, 300],
        )
        start = said.meta["prompt_tokens"]
        again = engine.generate(
            [*engine.encode(PROMPT), *said.output_ids],
            {"max_new_tokens": 0},
            return_logprob=True,
            logprob_start_len=start,
            top_logprobs_num=3,
            token_ids_logprob=[7, 300],
        )
    for kind in ("token_logprobs", "token_ids_logprobs", "top_logprobs"):
        first, second = said.meta[f"output_{kind}"], again.meta[f"input_{kind}"]
        assert len(first) == len(second) == 40
        ours, theirs = (np.array(list(found), dtype=object) for found in (first, second))
        values = [np.array(found[..., 0], dtype=float) for found in (ours, theirs)]
        np.testing.assert_allclose(values[0], values[1], atol=5e-4)
        assert abs(values[0].sum() - values[1].sum()) < 3e-3
        assert (ours[..., 1] == theirs[..., 1]).all()


def test_log_probabilities_at_the_temperature_of_the_draw(engine: Engine) -> None:
    """Of what is generated, forced text included; the prompt's are the model's own, so are greedy ones."""
    fields = {"return_logprob": True, "top_logprobs_num": engine.spec.vocab_size, "logprob_start_len": 0}
    params = {
        "max_new_tokens": 30,
        "seed": 3,
        "temperature": 0.5,
        "regex": "[a-z]{2,8} is a good thing, [a-z]+",
    }
    with Engine(
        "pocket", dtype="float32", device="cpu", max_total_tokens=512, scaled_logprobs=True,
        max_top_logprobs=1 << 20,
    ) as scaled:  # fmt: skip
        for words in (params, {**params, "temperature": 0.0}):
            own, told = engine.generate(PROMPT, words, **fields), scaled.generate(PROMPT, words, **fields)
            assert own.output_ids == told.output_ids
            assert own.meta["jumped_tokens"] > 0
            for name in ("input_token_logprobs", "output_token_logprobs"):
                factor = 1 / words["temperature"] if words["temperature"] and "output" in name else 1.0
                tops = own.meta[name.replace("token_", "top_", 1)]
                for (mine, _, _), top, (theirs, _, _) in zip(
                    own.meta[name], tops, told.meta[name], strict=True
                ):
                    if mine is None:
                        assert theirs is None
                        continue
                    total = np.log(np.exp(np.array([one[0] for one in top]) * factor).sum())
                    assert theirs == pytest.approx(mine * factor - total, abs=1e-3)


def test_penalties_and_biases_decide_each_step(engine: Engine) -> None:
    """The whole distribution is asked for, so that every choice can be made again with numpy."""
    words = {"frequency_penalty": 0.9, "presence_penalty": 0.4, "logit_bias": {"44": 1.5, "88": -2.0}}
    output = engine.generate(
        PROMPT,
        {**GREEDY, "max_new_tokens": 30, **words},
        return_logprob=True,
        top_logprobs_num=engine.spec.vocab_size,
    )
    counts = np.zeros(engine.spec.vocab_size)
    plain = 0
    for token, top in zip(output.output_ids, output.meta["output_top_logprobs"], strict=True):
        scores = np.zeros(engine.spec.vocab_size)
        scores[[one[1] for one in top]] = [one[0] for one in top]
        plain += token == int(scores.argmax())
        scores -= counts * 0.9 + (counts > 0) * 0.4
        scores[44] += 1.5
        scores[88] -= 2.0
        assert scores[token] >= scores.max() - 1e-3
        counts[token] += 1
    assert plain < 30, "the penalties changed something"


def test_bias_within_a_grammar(engine: Engine) -> None:
    letters = {letter: engine.encode(letter, add_special_tokens=False)[0] for letter in "ab"}
    ask = {"constraint": Constraint(kind="regex", spec="[ab]{6}"), "jump_forward": False}
    for letter, token in letters.items():
        biases = {other: -100.0 for other in range(engine.spec.vocab_size) if other != token}
        output = engine.generate(PROMPT, {**GREEDY, "logit_bias": biases}, **ask)
        assert output.text == letter * 6


def test_min_new_tokens_and_ignore_eos(engine: Engine) -> None:
    bias = {next(iter(engine.spec.eos_ids)): 100.0}
    words = {"temperature": 0.0, "logit_bias": bias, "max_new_tokens": 20}
    assert engine.generate(PROMPT, words).meta["completion_tokens"] == 1
    output = engine.generate(PROMPT, {**words, "min_new_tokens": 7})
    assert output.meta["completion_tokens"] == 8
    output = engine.generate(PROMPT, {**words, "ignore_eos": True})
    assert output.meta["completion_tokens"] == 20


@pytest.mark.parametrize("pattern", [r"\w+e\b", "[A-Z]", r"\n\w", "(?i:FR)[a-z]{3}", r"ran.*\n", "nowhere"])
@pytest.mark.parametrize("trim", [True, False])
def test_stop_regex(engine: Engine, pattern: str, trim: bool) -> None:
    words = {**GREEDY, "max_new_tokens": 40}
    free = engine.generate(PROMPT, words).text
    ends = (end for end in range(len(free) + 1) if re.search(pattern, free[:end]))
    found = next((re.search(pattern, free[:end]) for end in ends), None)
    words |= {"stop_regex": [pattern], "no_stop_trim": not trim}
    output = engine.generate(PROMPT, words)
    reason = output.meta["finish_reason"]
    if found is None:
        assert (reason["type"], output.text) == ("length", free)
        return
    assert (reason["type"], reason["matched"]) == ("stop", found.group())
    assert output.text == free[: found.start()] if trim else output.text.startswith(free[: found.end()])
    assert output.meta["completion_tokens"] == len(output.output_ids) <= 40

    async def pieces() -> list[str]:
        request = GenerateReqInput(text=PROMPT, sampling_params=words)
        return [part.text async for part in engine.stream(request)]

    told = asyncio.run(pieces())
    assert told[-1] == output.text
    assert all(later.startswith(sooner) for sooner, later in itertools.pairwise(told)), (
        "no text is taken back"
    )


def test_stop_regex_within_forced_text(engine: Engine) -> None:
    """A jump appends many tokens at once; the generation ends at the one that completes the match."""
    spec = "The number is 4711, and that is all there is to say about it\\."
    output = engine.generate(
        PROMPT, {**GREEDY, "stop_regex": [r"\d{3}"]}, constraint=Constraint(kind="regex", spec=spec)
    )
    assert output.meta["finish_reason"] == {"type": "stop", "matched": "471"}
    assert output.text == "The number is "
    assert engine.decode(output.output_ids).startswith("The number is 471")
    assert "and" not in engine.decode(output.output_ids)


@pytest.mark.parametrize(
    ("words", "kind", "what"),
    [
        ({"stop_regex": ["(?=a)b"]}, BadConstraint, r"stop_regex\[0\]: look-ahead"),
        ({"stop_regex": ["x", "(y"]}, BadRequest, r"stop_regex\[1\]"),
        ({"stop_regex": ["y*"]}, BadConstraint, "empty text"),
        ({"custom_logit_processor": "nobody"}, BadRequest, "known: allowed_token_ids, bad_words"),
        (
            {"custom_logit_processor": "deterministic", "custom_params": {"token_id": "x"}},
            BadRequest,
            "token_id",
        ),
        ({"logit_bias": {5000: 1.0}}, BadRequest, "logit_bias"),
    ],
)
def test_what_cannot_be_kept_is_a_bad_request(
    engine: Engine, words: dict[str, Any], kind: type[RuntimeFault], what: str
) -> None:
    with pytest.raises(kind, match=what) as caught:
        engine.generate(PROMPT, words)
    assert caught.value.status == 400


def test_logit_processors(engine: Engine) -> None:
    def run(name: str, **params: Any) -> list[int]:
        words = {**GREEDY, "max_new_tokens": 8, "custom_logit_processor": name, "custom_params": params}
        return engine.generate(PROMPT, words).output_ids

    free = engine.generate(PROMPT, {**GREEDY, "max_new_tokens": 8}).output_ids
    assert run("deterministic", token_id=77) == [77] * 8
    assert set(run("allowed_token_ids", allowed_token_ids=[50, 60])) <= {50, 60}
    assert free[2] not in run("bad_words", banned_token_ids=[free[2]])
    forced = run("thinking_budget", thinking_budget=3, think_end_ids=[90, 91])
    assert forced[:3] == free[:3]
    assert forced[3:5] == [90, 91]


def test_a_processor_that_leaves_nothing_fails_its_request_alone(engine: Engine) -> None:
    words = [
        {**GREEDY, "max_new_tokens": 8},
        {
            **GREEDY,
            "max_new_tokens": 8,
            "custom_logit_processor": "bad_words",
            "custom_params": {"banned_token_ids": list(range(engine.spec.vocab_size))},
        },
    ]
    well, sick = engine.generate([PROMPT, PROMPT], words, on_error="return")
    assert not isinstance(well, RuntimeFault)
    assert len(well.output_ids) == 8
    assert isinstance(sick, RuntimeFault)
    assert "'bad_words'" in str(sick)


def test_hidden_states(engine: Engine) -> None:
    words = {**GREEDY, "max_new_tokens": 5}
    for _ in range(2):  # the second time the cache has the prompt
        output = engine.generate(PROMPT, words, return_hidden_states=True)
        states = np.array(output.meta["hidden_states"])
        assert states.shape == (output.meta["prompt_tokens"] + 4, engine.spec.hidden_size)
    ids = [*engine.encode(PROMPT), *output.output_ids[:4]]
    for end in (output.meta["prompt_tokens"], len(ids)):
        last = engine.generate(ids[:end], {"max_new_tokens": 0}, return_hidden_states="last")
        np.testing.assert_allclose(last.meta["hidden_states"], states[end - 1 : end], atol=1e-4)
        assert last.meta["cached_tokens"] > 0 or end > output.meta["prompt_tokens"]
    assert "hidden_states" not in engine.generate(PROMPT, words).meta


def test_samples_differ_and_share_their_prompt(engine: Engine) -> None:
    prompt = f"{PROMPT} a city. " * 6
    words = {"max_new_tokens": 12, "temperature": 1.5, "n": 4, "seed": 11, "ignore_eos": True}
    engine.flush_cache()
    samples = engine.generate(prompt, words)
    assert len({tuple(sample.output_ids) for sample in samples}) == 4
    assert [sample.output_ids for sample in engine.generate(prompt, words)] == [
        one.output_ids for one in samples
    ]
    size = samples[0].meta["prompt_tokens"]
    assert sorted(sample.meta["cached_tokens"] for sample in samples)[1:] == [size - 1] * 3
    alone = engine.generate(prompt, {**words, "n": 1})
    assert alone.output_ids == samples[0].output_ids, "the first sample is what the seed alone gives"
