"""Batches of random programs that read while they write: each says what the reference on strings says,
however many run beside it; and what was recorded of a random program is said again without a backend.
"""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path
from typing import Any

import pytest

import sglang_dsl as sgl
from tests.exploring import EXPLORE
from tests.unit.sglang_dsl.frontend.random_programs import Maker, Reference, Steps, driven, plain_mock, play

pytestmark = pytest.mark.drawn

BEGIN = EXPLORE
BATCHES = int(os.environ.get("BATCHES", "3"))
SIZE = 40


def steps_of(seed: int) -> Steps:
    """Steps that read each value as soon as it is asked for, in half of the places."""
    rng = random.Random(seed)

    def reading(steps: Steps) -> Steps:
        made: Steps = []
        for step in steps:
            made.append(tuple(reading(part) if is_steps(part) else part for part in parts_of(step)))
            if step[0] in ("gen", "select") and step[1] is not None and rng.random() < 0.5:
                made.append(("read", step[1]))
        return made

    def parts_of(step: tuple[Any, ...]) -> tuple[Any, ...]:
        if step[0] == "fork":
            return (step[0], [reading(part) for part in step[1]], *step[2:])
        return step

    return reading(Maker(seed, safe=True).steps())


def is_steps(part: Any) -> bool:
    return isinstance(part, list) and bool(part) and isinstance(part[0], tuple)


@sgl.function
def program(s: sgl.ProgramState, seed: int) -> int:
    driven(play(s, steps_of(seed)))
    return seed


@sgl.function
async def aprogram(s: sgl.AsyncProgramState, seed: int) -> int:
    await play(s, steps_of(seed))
    return seed


def check(state: sgl.ProgramState) -> None:
    seed = state.ret_value
    expected = Reference().play(steps_of(seed))
    assert state.text() == expected.text, seed
    assert {name: state[name] for name in expected.values} == expected.values, seed


@pytest.mark.parametrize("way", ["threads", "few threads", "as they end", "async", "own loop"])
def test_each_program_of_a_batch_says_what_it_would_alone(way: str, idle: Any) -> None:
    for batch in range(BEGIN, BEGIN + BATCHES):
        backend = plain_mock(batch)
        backend.delay_s = 0.0005 * (batch % 3)
        seeds = [SIZE * batch + at for at in range(SIZE)]
        items = [{"seed": seed} for seed in seeds]
        match way:
            case "threads":
                states = program.run_batch(items, backend=backend)
            case "few threads":
                states = list(program.run_batch(items, backend=backend, num_threads=3, generator_style=True))
            case "as they end":
                states = list(
                    program.run_batch(
                        items, backend=backend, num_threads=16, generator_style=True, ordered=False
                    )
                )
                states.sort(key=lambda state: state.index or 0)
            case "async":
                states = aprogram.run_batch(items, backend=backend)
            case _:
                states = asyncio.run(gathered(items, backend))
        assert [state.ret_value for state in states] == seeds
        assert [state.index for state in states] == list(range(SIZE))
        for state in states:
            check(state)
        assert backend.in_flight == 0
    assert idle() == 0


async def gathered(items: list[dict[str, int]], backend: Any) -> list[sgl.ProgramState]:
    found = [state async for state in aprogram.arun_batch(items, backend=backend, num_threads=16)]
    return [state.blocking for state in found]


@sgl.function
def drawing(s: sgl.ProgramState, steps: Steps) -> None:
    driven(play(s, steps))


def drawn(steps: Steps, rng: random.Random) -> Steps:
    """The same, half of the selects drawn by chance."""
    made: Steps = []
    for step in steps:
        match step:
            case ("select", name, options, _, _) if rng.random() < 0.5:
                made.append(("select", name, options, "token_length_normalized", 1.0))
            case (word, parts, *rest) if word == "fork":
                made.append((word, [drawn(part, rng) for part in parts], *rest))
            case _:
                made.append(tuple(drawn(part, rng) if is_steps(part) else part for part in step))
    return made


def test_what_was_recorded_is_said_again_without_a_backend(tmp_path: Path) -> None:
    for seed in range(BEGIN, BEGIN + 20 * BATCHES):
        steps = drawn(steps_of(seed), random.Random(seed))
        words: dict[str, Any] = {"cache_dir": str(tmp_path / str(seed % 7))}
        if seed % 2:
            words["seed"] = seed
        first = drawing.run(steps, backend=plain_mock(seed), cache="rw", **words)
        said = first.text()
        again = drawing.run(steps, cache="ro", **words)
        assert again.text() == said, seed
        assert again.messages() == first.messages(), seed
        names = sorted(first.core.names())
        assert sorted(again.core.names()) == names, seed
        assert [again[name] for name in names] == [first[name] for name in names], seed
        if not cancels(steps):  # what is cancelled may have been done by then
            assert again.usage() == first.usage(), seed


def cancels(step: Any) -> bool:
    if isinstance(step, tuple | list):
        return (step[:1] == ("back",) and step[3]) or any(cancels(part) for part in step)
    return False
