"""Two turns, the second about the first's answer. An empty system turn stands for the template's default.

python examples/benchmarks/mtbench.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tasks

import sglang_dsl as sgl


@sgl.function
def two_turns(s, question_1, question_2):
    s += sgl.system()
    s += sgl.user(question_1)
    s += sgl.assistant(sgl.gen("answer_1"))
    s += sgl.user(question_2)
    s += sgl.assistant(sgl.gen("answer_2"))


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = tasks.arguments(__doc__, argv)
    sgl.set_default_backend(args.chosen)
    asked = tasks.lands(args.num_questions, ["capital", "river"])

    clock = tasks.Clock()
    states = two_turns.run_batch(
        [{"question_1": question.text, "question_2": "And who rules there?"} for question, _ in asked],
        temperature=0,
        max_new_tokens=48,
        num_threads=args.parallel,
    )
    answers = [[state["answer_1"], state["answer_2"]] for state in states]
    first = [question.answer in answer for (question, _), (answer, _) in zip(asked, answers, strict=True)]
    second = [place.ruler in answer for (_, place), (_, answer) in zip(asked, answers, strict=True)]
    info = getattr(args.chosen, "model_info", {})
    return tasks.tell(
        "mtbench",
        args,
        clock,
        states=states,
        first_turn=round(sum(first) / len(first), 3),
        second_turn=round(sum(second) / len(second), 3),
        model=str(info.get("served_name", args.backend)),
        answers=answers,
    )


if __name__ == "__main__":
    main()
