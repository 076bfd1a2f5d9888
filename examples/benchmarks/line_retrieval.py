"""A line to be found in a long text that four branches put together.

The lines are questions about pocket's own world with their answers, and one of them is asked again; numbers
under other numbers, as the benchmark of this name has them, are more than so small a model can look up. The
figure to watch is how much of the text came from the prefix cache.

    python examples/benchmarks/line_retrieval.py --num-lines 60
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import tasks

import sglang_dsl as sgl

PARTS = 4


@sgl.function
def line_retrieval(s, prefix, suffix, body_0, body_1, body_2, body_3):
    s += prefix + "\n"

    contexts = [body_0, body_1, body_2, body_3]
    # As programs written for sglang say it: it has no effect, there as here.
    position_ids_offset = [i * 1000 for i in range(len(contexts))]
    forks = s.fork(len(contexts), position_ids_offset)
    forks += lambda i: contexts[i] + "\n"
    forks.join(mode="concate_and_append")

    s += suffix + sgl.gen("answer", max_tokens=24, stop="\n")


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = tasks.arguments(__doc__, argv, questions=4, num_lines=24)
    asked = tasks.lands(args.num_lines)
    lines = [f"Q: {question.text}\nA: {tasks.sentence(place, question)}" for question, place in asked]
    size = len(lines) // PARTS
    parts = [lines[at * size : (at + 1) * size if at + 1 < PARTS else None] for at in range(PARTS)]
    bodies = {f"body_{at}": "\n".join(part) for at, part in enumerate(parts)}
    wanted = random.Random(0).sample(asked, args.num_questions)

    clock = tasks.Clock()
    states = line_retrieval.run_batch(
        [{"prefix": "Examples:", "suffix": f"Q: {question.text}\nA:", **bodies} for question, _ in wanted],
        temperature=0,
        backend=args.chosen,
        num_threads=args.parallel,
    )
    found = [state["answer"].strip() for state in states]
    metas = [state.get_meta_info("answer") for state in states]
    return tasks.tell(
        "line_retrieval",
        args,
        clock,
        states=states,
        accuracy=tasks.accuracy(found, [tasks.sentence(place, question) for question, place in wanted]),
        prompt_tokens=sum(meta["prompt_tokens"] for meta in metas),
        cached_tokens=sum(meta["cached_tokens"] for meta in metas),
        in_order=["\n".join(lines) in state.text() for state in states],
    )


if __name__ == "__main__":
    main()
