"""Constraints through the whole engine: whatever is drawn, an output that ends by itself validates; the same
seed gives the same again, in a batch as alone, streamed as whole.

    EXPLORE=7 PROPERTY_LOOPS=10 pytest tests/process/constraints/test_constrained_outputs.py
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from runtime.api import Engine
from runtime.protocol.io_struct import GenerateReqInput
from tests.unit.runtime.grammar import drawn
from tests.unit.runtime.grammar.drawn_cases import CASES, Case

pytestmark = pytest.mark.drawn

PROMPTS = ["Once", "The capital of", "{", "Answer: ", "<think>", 'He said "', "日本", ""]


@pytest.fixture(scope="module")
def exact_engine() -> Iterator[Engine]:
    """In float32: in bfloat16 a row depends a little on the rows beside it."""
    with Engine("pocket", max_total_tokens=8192, dtype="float32") as running:
        yield running


def fields(case: Case, dice: random.Random) -> dict[str, Any]:
    params: dict[str, Any] = {
        "temperature": dice.choice([0.0, 0.3, 1.0, 1.0, 2.5]),
        "seed": dice.randrange(1 << 20),
        "max_new_tokens": dice.choice([1, 3, 8, 30, 60, 90]),
        "top_p": dice.choice([1.0, 0.9]),
        "top_k": dice.choice([-1, 20]),
        "min_p": dice.choice([0.0, 0.0, 0.1]),
        "repetition_penalty": dice.choice([1.0, 1.0, 1.3]),
    }
    if case.kind == "choices":
        pattern = "|".join(["yes", "yes no", "é", "日本語", "ab", "abab"])
        return {**params, "regex": f"({pattern})"}
    return {**params, case.kind: case.spec}


def request(case: Case, dice: random.Random) -> dict[str, Any]:
    return {
        "text": dice.choice(PROMPTS[:-1]),
        "sampling_params": fields(case, dice),
        "return_logprob": dice.random() < 0.2,
        "jump_forward": dice.random() < 0.7,
    }


def drawn_requests(count: int, seed: int) -> list[tuple[Case, dict[str, Any]]]:
    dice = random.Random(seed)
    return [(case, request(case, dice)) for case in (dice.choice(CASES) for _ in range(count))]


def told(answer: Any) -> tuple[str, tuple[int, ...], str]:
    return answer.text, tuple(answer.output_ids), answer.meta["finish_reason"]["type"]


def judge(case: Case, body: dict[str, Any], answer: Any) -> None:
    meta = answer.meta
    most = body["sampling_params"]["max_new_tokens"]
    assert len(answer.output_ids) <= most
    assert meta["completion_tokens"] == len(answer.output_ids)
    grammar = meta["grammar"]
    assert grammar["backend"] in ("outlines", "llguidance", "xgrammar")
    closed = grammar["closed_by_budget"]
    if meta["finish_reason"]["type"] == "stop" or closed:
        assert case.accepts(answer.text), (case.name, body, answer.text)
    assert meta["finish_reason"]["type"] in (("length",) if closed else ("stop", "length"))


def send(engine: Engine, bodies: list[dict[str, Any]]) -> list[Any]:
    async def go() -> list[Any]:
        return await asyncio.gather(*(engine.submit(GenerateReqInput(**body)) for body in bodies))

    return asyncio.run(go())


def test_outputs_that_stop_validate_and_come_again(exact_engine):
    pairs = drawn_requests(36 * drawn.LOOPS, drawn.SEED)
    bodies = [body for _, body in pairs]
    free = [
        {"text": "Once", "sampling_params": {"max_new_tokens": 40, "temperature": 1.0, "seed": n}}
        for n in range(6)
    ]
    first = send(exact_engine, [*bodies, *free])
    for (case, body), answer in zip(pairs, first, strict=False):
        judge(case, body, answer)
    again = send(exact_engine, [*free[::-1], *bodies[::-1]])[::-1]
    assert [told(one) for one in again] == [told(one) for one in first]
    for body, answer in list(zip([*bodies, *free], first, strict=True))[::3]:
        assert told(send(exact_engine, [body])[0]) == told(answer), body


def test_with_room_for_the_shortest_every_output_validates(exact_engine):
    """With tokens for the shortest text that was found, nothing ends halfway."""
    dice = random.Random(drawn.SEED + 1)
    pairs = []
    for case in CASES:
        body = request(case, dice)
        body["sampling_params"]["max_new_tokens"] = dice.choice([48, 70])
        body["sampling_params"]["temperature"] = dice.choice([1.0, 3.0])
        pairs.append((case, body))
    for (case, body), answer in zip(pairs, send(exact_engine, [body for _, body in pairs]), strict=True):
        judge(case, body, answer)
        assert case.accepts(answer.text), (case.name, body["sampling_params"], answer.text)


def test_streams_tell_the_same(exact_engine):
    pairs = drawn_requests(10 * drawn.LOOPS, drawn.SEED + 2)

    async def streamed(body: dict[str, Any]) -> list[Any]:
        return [event async for event in exact_engine.stream(GenerateReqInput(**body, stream=True))]

    async def all_streamed() -> list[list[Any]]:
        return await asyncio.gather(*(streamed(body) for _, body in pairs))

    whole = send(exact_engine, [body for _, body in pairs])
    for (case, body), events, answer in zip(pairs, asyncio.run(all_streamed()), whole, strict=True):
        for before, after in pairwise(events):
            assert after.text.startswith(before.text), (case.name, before.text, after.text)
            assert list(after.output_ids)[: len(before.output_ids)] == list(before.output_ids), case.name
        assert told(events[-1]) == told(answer), (case.name, body)
        judge(case, body, events[-1])


def test_stop_strings_end_a_constrained_output_where_they_stand(exact_engine):
    dice = random.Random(drawn.SEED + 3)
    pairs = []
    for case in dice.choices(CASES, k=8):
        body = request(case, dice)
        body["sampling_params"].update(stop=dice.choice(['"', "a", "0", ">", ","]), max_new_tokens=60)
        pairs.append((case, body))
    for (case, body), answer in zip(pairs, send(exact_engine, [body for _, body in pairs]), strict=True):
        stop = body["sampling_params"]["stop"]
        assert stop not in answer.text
        reason = answer.meta["finish_reason"]
        if reason["type"] == "stop" and reason.get("matched") != stop:
            assert case.accepts(answer.text), (case.name, answer.text)


def test_several_samples(exact_engine):
    dice = random.Random(drawn.SEED + 4)
    for case in dice.choices(CASES, k=3):
        body = request(case, dice)
        body["sampling_params"].update(n=3, temperature=1.5, max_new_tokens=60)
        answers = asyncio.run(exact_engine.submit_batch(GenerateReqInput(**body)))
        assert len(answers) == 3
        for answer in answers:
            judge(case, body, answer)
