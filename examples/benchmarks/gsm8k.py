"""Sums after a few worked ones: one prompt's beginning is shared by all, one generation each.

The plainest benchmark there is: text, a `gen` with stop strings, `run_batch`.

    python examples/benchmarks/gsm8k.py --num-questions 16
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tasks

import sglang_dsl as sgl


def one(question: tasks.Question, worked: bool) -> str:
    return f"Q: {question.text}\nA:" + (f" {question.answer}\n" if worked else "")


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = tasks.arguments(__doc__, argv, num_shots=5)
    questions = tasks.sums(args.num_questions)
    few_shot_examples = "".join(one(question, True) for question in tasks.sums(args.num_shots, seed=1))

    @sgl.function
    def few_shot_sums(s, question):
        s += few_shot_examples + question
        s += sgl.gen("answer", max_tokens=32, stop=["Q:", "\n"])

    clock = tasks.Clock()
    states = few_shot_sums.run_batch(
        [{"question": one(question, False)} for question in questions],
        temperature=0,
        backend=args.chosen,
        num_threads=args.parallel,
    )
    found = [tasks.last_number(state["answer"]) for state in states]
    return tasks.tell(
        "gsm8k",
        args,
        clock,
        states=states,
        accuracy=tasks.accuracy(found, [int(question.answer) for question in questions]),
        invalid=round(found.count(tasks.INVALID) / len(found), 3),
        tokens=sum(state.get_meta_info("answer")["completion_tokens"] for state in states),
        cached=sum(state.get_meta_info("answer")["cached_tokens"] for state in states),
    )


if __name__ == "__main__":
    main()
