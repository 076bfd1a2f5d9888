"""Problems solved by thinking first, several tries each, drawn at random: accuracy and its standard error.

`separate_reasoning` takes the thoughts apart from the answer.

    python examples/benchmarks/reasoning_benchmark.py --num-tries 4
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import tasks

import sglang_dsl as sgl


@sgl.function
def reasoning_gen(s, question):
    s += sgl.system("Think step by step.")
    s += sgl.user(question)
    s += sgl.assistant(sgl.separate_reasoning(sgl.gen("answer"), model_type="deepseek-r1"))


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = tasks.arguments(__doc__, argv, questions=6, num_tries=2)
    sgl.set_default_backend(args.chosen)
    problems = tasks.word_problems(args.num_questions)
    items = [{"question": one.text} for one in problems for _ in range(args.num_tries)]

    clock = tasks.Clock()
    states = reasoning_gen.run_batch(
        items, num_threads=args.parallel, temperature=0.6, top_p=0.95, max_new_tokens=96, seed=3
    )
    right = [one.answer for one in problems for _ in range(args.num_tries)]
    outcomes = [state["answer"].strip() == answer for state, answer in zip(states, right, strict=True)]
    error = statistics.stdev(outcomes) / len(outcomes) ** 0.5 if len(outcomes) > 1 else 0.0
    return tasks.tell(
        "reasoning_benchmark",
        args,
        clock,
        states=states,
        accuracy=round(sum(outcomes) / len(outcomes), 3),
        standard_error=round(error, 3),
        tokens=sum(state.get_meta_info("answer")["completion_tokens"] for state in states),
        thoughts=[state["answer_reasoning_content"] for state in states],
    )


if __name__ == "__main__":
    main()
