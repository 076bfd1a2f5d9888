"""Options in the prompt, and the answer read out of free text.

The words come from `sglang_dsl.lang.api`, where programs written for sglang look for them.

    python examples/benchmarks/ceval.py
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import tasks

from sglang_dsl.lang.api import assistant, function, gen, set_default_backend, system, user


@function
def few_shot_words(s, examples, question):
    s += system(examples)
    s += user(question)
    s += assistant(gen("Answer"))


def answer_in(text: str) -> str:
    found = re.search(r"\b(" + "|".join(tasks.TOPICS) + r")\b", text)
    return found.group(1) if found else ""


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = tasks.arguments(__doc__, argv, num_shots=2)
    set_default_backend(args.chosen)
    questions = tasks.headlines(args.num_questions, seed=2)
    shots = tasks.headlines(args.num_shots, seed=3)
    examples = "Here are examples.\n" + "\n".join(f"Q: {shot.text}\nA: {shot.answer}" for shot in shots)

    clock = tasks.Clock()
    states = few_shot_words.run_batch(
        [{"examples": examples, "question": question.text} for question in questions],
        temperature=0,
        num_threads=args.parallel,
    )
    found = [answer_in(state["Answer"]) for state in states]
    right = [question.answer for question in questions]
    return tasks.tell("ceval", args, clock, states=states, accuracy=tasks.accuracy(found, right))


if __name__ == "__main__":
    main()
