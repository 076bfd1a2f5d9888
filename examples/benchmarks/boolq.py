"""A passage and a question about it, answered with one word that ends at the line's end.

python examples/benchmarks/boolq.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tasks

import sglang_dsl as sgl


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = tasks.arguments(__doc__, argv, num_shots=4)
    sgl.set_default_backend(args.chosen)
    questions = tasks.headlines(args.num_questions)
    few_shots = "".join(f"Q: {q.text}\nA: {q.answer}\n" for q in tasks.headlines(args.num_shots, seed=1))

    @sgl.function
    def few_shot_topic(s, question):
        s += few_shots + question
        s += sgl.gen("answer", max_tokens=5, stop=["\n"])

    clock = tasks.Clock()
    states = few_shot_topic.run_batch(
        [{"question": f"Q: {question.text}\nA:"} for question in questions],
        temperature=0,
        num_threads=args.parallel,
    )
    found = [state["answer"].strip() for state in states]
    right = [question.answer for question in questions]
    return tasks.tell("boolq", args, clock, states=states, accuracy=tasks.accuracy(found, right))


if __name__ == "__main__":
    main()
