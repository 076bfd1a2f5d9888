"""The same requests, of every kind, through differently set engines: one after the other or at once,
overlapped or not, in a pool that is too small, with pages, with pauses between. No answer depends on it."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from runtime.api import Engine
from runtime.protocol.errors import RuntimeFault
from runtime.protocol.io_struct import GenerateOutput, GenerateReqInput

COUNT = 36
ROOMY = {"device": "cpu", "dtype": "float32", "threads": 1, "max_total_tokens": 8192}
TIGHT = {"max_total_tokens": 170, "conservativeness": 0.05}
GUESSING = {"speculative_algorithm": "NGRAM", "speculative_ngram_min_match_window_size": 1}
STEMS = [
    "Classify the review as positive or negative.\nReview: The soup was cold and the waiter rude.\nLabel:",
    "The capital of France is",
    "Extract JSON from: Anna is 31 years old and lives in Oslo.\n",
    "Q: What is 3 + 4?\nA:",
    "안녕하세요, 저는",
    "user: tell me a story about a fox and a dog who live near the river in the old town\nassistant:",
]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
KINDS = (
    "greedy", "seeded", "regex", "json", "stop", "penalties", "bias", "minimum", "choices", "samples",
    "stream", "ids", "logprobs", "ignore", "stop_regex", "processor", "hidden", "ebnf",
)  # fmt: skip
_CLOSE = 1e-3  # log-probabilities and hidden states: sums in another order


def mixed(seed: int, count: int) -> list[GenerateReqInput]:
    """All kinds in turn; the same seed gives the same requests."""
    draw = random.Random(seed)
    return [_one(KINDS[index % len(KINDS)], f"r{index}", draw) for index in range(count)]


def _one(kind: str, rid: str, draw: random.Random) -> GenerateReqInput:
    seeded = {"temperature": draw.choice([0.7, 1.0, 1.3]), "seed": draw.randrange(1 << 30)}
    often = seeded if draw.random() < 0.5 else {}
    kinds: dict[str, dict[str, Any]] = {
        "greedy": {},
        "seeded": seeded | {"top_p": draw.choice([1, 0.9]), "top_k": draw.choice([-1, 20]), "min_p": 0.02},
        "regex": {"regex": draw.choice([r"[a-z]{3,12} (cat|dog)s?", r"The answer is [0-9]+\."])} | often,
        "json": {"json_schema": SCHEMA, "max_new_tokens": 60},
        "stop": {"stop": draw.choice([["\n"], ["ance", "e\nF"], ["."], ["the"]]), "max_new_tokens": 40},
        "penalties": {"frequency_penalty": 0.5, "presence_penalty": 0.7, "repetition_penalty": 1.3} | often,
        "bias": {"logit_bias": {str(draw.randrange(300, 1200)): draw.choice([5.0, -8.0]) for _ in range(5)}},
        "minimum": {"min_new_tokens": 10, "max_new_tokens": 30, "stop_token_ids": [205, 350]} | seeded,
        "samples": seeded | {"n": 3},
        "stream": {"max_new_tokens": 30},
        "ignore": {"ignore_eos": True, "max_new_tokens": 40},
        "stop_regex": {"stop_regex": [r"[A-Z][a-z]+ce", r"\d+"], "max_new_tokens": 40},
        "processor": {
            "custom_logit_processor": "bad_words",
            "custom_params": {"banned_token_ids": [88, 205]},
        },
        "ebnf": {"ebnf": 'root ::= "yes" | "no" | "maybe " [a-z]+'},
    }
    others: dict[str, dict[str, Any]] = {
        "ids": {"input_ids": [draw.randrange(3, 1200) for _ in range(draw.randrange(1, 60))]},
        "choices": {"choices": [" positive", " negative", " neutral, or so"], "unconditional": True},
        "stream": {"stream": True},
        "hidden": {"return_hidden_states": draw.choice([True, "last"])},
        "logprobs": {
            "return_logprob": True,
            "logprob_start_len": draw.choice([-1, 0, 3]),
            "top_logprobs_num": 3,
            "token_ids_logprob": [5, 77],
        },
    }
    more, fields = kinds.get(kind, {}), others.get(kind, {})
    params = (
        {} if kind == "choices" else {"temperature": 0, "max_new_tokens": draw.choice([1, 5, 16, 40])} | more
    )
    if "input_ids" not in fields:
        fields["text"] = draw.choice(STEMS) + (f" {draw.randrange(5)}" if draw.random() < 0.5 else "")
    if draw.random() < 0.1:
        fields["extra_key"] = "apart"
    return GenerateReqInput(rid=rid, sampling_params=params, **fields)


async def answers(
    engine: Engine, requests: Sequence[GenerateReqInput], *, at_once: bool
) -> list[list[GenerateOutput | RuntimeFault]]:
    """What each request (made for this call alone) came to, one entry per sample."""

    async def one(request: GenerateReqInput) -> list[GenerateOutput | RuntimeFault]:
        if request.stream:
            pieces = [piece async for piece in engine.stream(request)]
            for before, after in pairwise(pieces):
                assert after.text.startswith(before.text)
            return [pieces[-1]]
        if (request.sampling_params or {}).get("n", 1) > 1:
            return await engine.submit_batch(request)
        return [await engine.submit(request)]

    if at_once:
        return list(await asyncio.gather(*map(one, requests)))
    return [await one(request) for request in requests]


def said(output: GenerateOutput | RuntimeFault) -> tuple[Any, ...]:
    """What must be the same to the letter."""
    if isinstance(output, RuntimeFault):
        return output.code, output.message
    kept = ("id", "finish_reason", "prompt_tokens", "completion_tokens")
    choices = [(choice.text, choice.token_ids) for choice in output.choices or ()]
    return output.text, output.output_ids, [output.meta.get(name) for name in kept], choices


def agree(one: GenerateOutput | RuntimeFault, other: GenerateOutput | RuntimeFault) -> bool:
    """The same to the letter, and as close as numbers can be."""
    if said(one) != said(other):
        return False
    mine, theirs = _numbers(one), _numbers(other)
    return len(mine) == len(theirs) and all(
        a == b if a is None or b is None else abs(a - b) < _CLOSE for a, b in zip(mine, theirs)
    )


def _numbers(output: GenerateOutput | RuntimeFault) -> list[float | None]:
    if isinstance(output, RuntimeFault):
        return []
    found: list[float | None] = []
    for name in ("input_token_logprobs", "output_token_logprobs"):
        found += [entry[0] for entry in output.meta.get(name) or ()]
    for name in ("output_top_logprobs", "output_token_ids_logprobs", "input_top_logprobs"):
        found += [entry[0] for entries in output.meta.get(name) or () for entry in entries or ()]
    for state in output.meta.get("hidden_states") or ():
        found += state
    for choice in output.choices or ():
        found += [*choice.logprobs, *(choice.unconditional or ())]
    return found


def run(options: dict[str, Any], seed: int, *, at_once: bool = True, pauses: Any = None) -> list[Any]:
    """`pauses`: the models' pace; they are slow until something was retracted."""
    with Engine("pocket", **{**ROOMY, **options}) as engine:
        over = threading.Event()

        def disturb() -> None:
            draw = random.Random(seed)
            while not over.wait(draw.random() * 0.06):
                engine.pause(draw.choice(["retract", "retract", "in_place"]))
                over.wait(draw.random() * 0.003)
                engine.resume()
                if engine.state()["retractions"]:
                    pauses.free()

        disturber = threading.Thread(target=disturb)
        if pauses:
            pauses.hold(0.1)
            disturber.start()
        try:
            found = asyncio.run(answers(engine, mixed(seed, COUNT), at_once=at_once))
        finally:
            over.set()
            if pauses:
                disturber.join(300)
        state = engine.state()
        assert (state["live"], state["running"], state["waiting"], state["repairs"]) == (0, 0, 0, 0)
        assert state["num_requests_total"] == state["finished"] + state["failed"]
        assert not pauses or state["retractions"]
        assert engine.flush_cache()
        assert engine.state()["free"] == state["slots"]
        return found


@pytest.fixture(scope="module")
def alone() -> list[list[GenerateOutput | RuntimeFault]]:
    """Plain loop, each request by itself."""
    found = run({"overlap": False}, 7, at_once=False)
    assert 2 * len(KINDS) <= COUNT
    assert not any(isinstance(output, RuntimeFault) for outputs in found for output in outputs)
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"overlap": False},
        {"overlap": True, **TIGHT},
        {"overlap": False, "page_size": 16, "chunked_prefill_size": 16, **TIGHT, "max_total_tokens": 256},
        {"radix_cache": False, "mixed_prefill": False, "schedule_policy": "dfs-weight", **TIGHT},
        {"schedule_policy": "priority", "eviction_policy": "lfu", "chunked_prefill_size": 5, **TIGHT},
        {"overlap": True, "page_size": 4, **GUESSING, **TIGHT, "max_total_tokens": 256},
    ],
    ids=["plain", "tight", "pages", "no radix", "chunks", "guesses"],
)
def test_no_setting_changes_an_answer(alone: list[Any], options: dict[str, Any]) -> None:
    same(alone, run(options, 7))


@pytest.mark.parametrize("options", [{"overlap": True}, {"overlap": False, "page_size": 16}], ids=["1", "16"])
def test_nor_do_pauses_and_retractions(alone: list[Any], options: dict[str, Any], pace: Any) -> None:
    same(alone, run(options, 7, pauses=pace))


def same(expected: list[Any], found: list[Any]) -> None:
    for ours, theirs in zip(expected, found, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert agree(one, other), (said(one), said(other))
