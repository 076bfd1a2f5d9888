"""Questions that one token answers, after a few examples: `max_new_tokens=1` for the whole batch.

Chat models are asked in turns, others in plain text: the program is chosen by the backend's name.

    python examples/benchmarks/mmlu.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tasks

import sglang_dsl as sgl


@sgl.function
def asked_in_turns(s, examples, question):
    s += sgl.user(examples + question)
    s += sgl.assistant(sgl.gen("answer"))


@sgl.function
def asked_as_text(s, examples, question):
    s += examples + question + sgl.gen("answer")


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = tasks.arguments(__doc__, argv, num_shots=3)
    questions = tasks.reviews(args.num_questions)
    shots = tasks.reviews(args.num_shots, seed=1)
    examples = "".join(f"Q: {shot.text}\nA: {shot.answer}\n" for shot in shots)
    chat = args.backend.startswith("gpt-")
    program = asked_in_turns if chat else asked_as_text
    items = [{"examples": examples, "question": f"Q: {question.text}\nA:"} for question in questions]

    clock = tasks.Clock()
    states = program.run_batch(
        items, temperature=0, max_new_tokens=1, backend=args.chosen, num_threads=args.parallel
    )
    # One token is the begin of the word; the two words begin differently.
    found = [state["answer"].strip()[:1] for state in states]
    right = [question.answer[:1] for question in questions]
    return tasks.tell("mmlu", args, clock, states=states, accuracy=tasks.accuracy(found, right))


if __name__ == "__main__":
    main()
