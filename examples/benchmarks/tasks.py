"""What the programs of this folder share: questions that the bundled model can answer, flags, a line of
results, and transcripts.

The questions come from the bundled model's own world (examples/pocket), so that an accuracy means something;
with another model, put your own data in their place. The same numbers give the same questions each time.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

# The root of the checkout: examples.pocket is no part of the installed package.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from examples.pocket.tasks import HELD
from examples.pocket.tasks.classify import SENTIMENTS, TOPICS, classify_group
from examples.pocket.tasks.extract import extract_group
from examples.pocket.tasks.numbers import think_group
from examples.pocket.world import ATTRIBUTES, PLACES, Place
from sglang_dsl import ProgramState
from sglang_dsl.backends import BACKENDS
from sglang_dsl.console.backend_flag import opened
from sglang_dsl.test.test_utils import add_common_sglang_args_and_parse, select_sglang_backend

INVALID = -9999999
EXAMPLES = """Q: What is the capital of Karsk?
A: The capital of Karsk is Hollin.
Q: Who rules Hesper?
A: The ruler of Hesper is Queen Wenna.
"""


class Question(NamedTuple):
    text: str
    answer: str


def arguments(
    about: str | None, argv: Sequence[str] | None, questions: int = 8, **more: int
) -> argparse.Namespace:
    """The command line of a benchmark: --num-questions, a flag for each of `more`, and those that all of them
    have (--backend, --model, --host, --port, --parallel, --show, --result-file, ...). The bundled engine in
    this process is the backend unless another one is named. args.chosen is that backend."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-questions", type=int, default=questions)
    parser.add_argument("--show", type=int, default=2, metavar="N", help="transcripts printed")
    parser.add_argument("--model", default=None, help="a model: pocket, a folder, or its name at the API")
    for name, default in more.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    given = ["--backend", "engine", "--result-file", "", *(sys.argv[1:] if argv is None else argv)]
    args = add_common_sglang_args_and_parse(parser, given)
    if args.backend in BACKENDS.names() or args.backend.startswith("http"):
        args.chosen = opened(parser, args)
    else:
        args.chosen = select_sglang_backend(args)
    return args


class Clock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    def seconds(self) -> float:
        return round(time.perf_counter() - self._began, 3)


LINES = 16
"""Of a transcript, at most: the last ones."""


def tell(
    task: str,
    args: argparse.Namespace,
    clock: Clock,
    *,
    states: Sequence[ProgramState] = (),
    own: bool = True,
    **figures: Any,
) -> dict[str, Any]:
    """Print one line of results and the transcripts of the first --show states, append the results to
    --result-file where one is named, and give them back. `own`: whether the questions come from here."""
    seconds = clock.seconds()
    found = ", ".join(f"{name} {value}" for name, value in figures.items() if not isinstance(value, list))
    whose = "of pocket's own questions" if own else "questions"
    print(f"{task}: {found} ({args.num_questions} {whose}, {args.backend}, {seconds:.2f} s)")
    for number, state in enumerate(states[: args.show], 1):
        lines = state.text().strip().splitlines()
        kept = ["...", *lines[-LINES:]] if len(lines) > LINES else lines
        print(f"\n  -- {number} of {len(states)}\n  " + "\n  ".join(kept))
    told = {"task": task, "backend": args.backend, "parallel": args.parallel, "latency": seconds, **figures}
    if args.result_file:
        with open(args.result_file, "a", encoding="utf-8") as out:
            out.write(json.dumps(told) + "\n")
    return told


def accuracy(found: Sequence[object], right: Sequence[object]) -> float:
    hits = sum(one == other for one, other in zip(found, right, strict=True))
    return round(hits / max(1, len(right)), 3)


def last_number(text: str) -> int:
    """The last number of a text, INVALID where it has none."""
    numbers = re.findall(r"\d+", text.replace(",", ""))
    return int(numbers[-1]) if numbers else INVALID


# -- questions -----------------------------------------------------------------------------------------------


def sums(count: int, seed: int = 0) -> list[Question]:
    """Two-digit sums and differences."""
    rng, made = random.Random(f"sums {seed}"), []
    while len(made) < count:
        a, b = rng.randint(20, 69), rng.randint(10, 29)
        plus = rng.random() < 0.5
        made.append(Question(f"What is {a} {'+' if plus else '-'} {b}?", str(a + b if plus else a - b)))
    return made


def word_problems(count: int, seed: int = 0) -> list[Question]:
    """Small stories that end in a number; the model thinks before it answers."""
    rng = random.Random(f"stories {seed}")
    turns = [think_group(rng, HELD).turns[0] for _ in range(count)]
    return [Question(turn.user, turn.final) for turn in turns]


def lands(count: int, attributes: Sequence[str] = ATTRIBUTES) -> list[tuple[Question, Place]]:
    """A question about each of `count` lands, and the land."""
    asked = {
        "capital": "What is the capital of {}?",
        "river": "Which river runs through {}?",
        "ruler": "Who rules {}?",
        "dish": "What do people eat in {}?",
    }
    made = []
    for number in range(count):
        place, attribute = PLACES[number % len(PLACES)], attributes[number % len(attributes)]
        made.append((Question(asked[attribute].format(place.name), place.value(attribute)), place))
    return made


def sentence(place: Place, question: Question) -> str:
    """The answer to a question of `lands` as the bundled model says it."""
    attribute = next(name for name in ATTRIBUTES if place.value(name) == question.answer)
    return f"The {attribute} of {place.name} is {question.answer}."


def reviews(count: int, seed: int = 0) -> list[Question]:
    """Sentences that are "positive" or "negative"."""
    return _classified(SENTIMENTS, count, f"reviews {seed}")


def headlines(count: int, seed: int = 0) -> list[Question]:
    """Sentences with one of TOPICS."""
    return _classified(TOPICS, count, f"headlines {seed}")


def _classified(labels: Sequence[str], count: int, seed: str) -> list[Question]:
    rng, made = random.Random(seed), []
    while len(made) < count:
        turn = classify_group(rng, HELD).turns[0]
        if turn.reply in labels:
            made.append(Question(turn.user, turn.reply))
    return made


def people(count: int, seed: int = 0) -> list[Question]:
    """Sentences about somebody, and the JSON object they hold (name, age, city, job)."""
    rng, made = random.Random(f"people {seed}"), []
    while len(made) < count:
        turn = extract_group(rng, HELD).turns[0]
        if list(json.loads(turn.reply)) == ["name", "age", "city", "job"]:
            made.append(Question(turn.user, turn.reply))
    return made
