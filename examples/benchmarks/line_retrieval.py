"""A line to be found in a long text that four branches put together.

The bundled model is too small to look up a number in a list; the figure to watch is how much of the text came
from the prefix cache when the same lines are asked about again.

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

    s += "\n" + suffix
    s += sgl.gen("answer", max_tokens=8)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = tasks.arguments(__doc__, argv, questions=4, num_lines=24)
    rng = random.Random(0)
    values = [str(rng.randint(10, 99)) for _ in range(args.num_lines)]
    lines = [f"line {number}: {value}" for number, value in enumerate(values)]
    size = len(lines) // PARTS
    parts = [lines[at * size : (at + 1) * size if at + 1 < PARTS else None] for at in range(PARTS)]
    bodies = {f"body_{at}": "\n".join(part) for at, part in enumerate(parts)}
    wanted = [rng.randrange(len(lines)) for _ in range(args.num_questions)]

    clock = tasks.Clock()
    states = line_retrieval.run_batch(
        [{"prefix": "Remember these lines.", "suffix": f"line {at}:", **bodies} for at in wanted],
        temperature=0,
        backend=args.chosen,
        num_threads=args.parallel,
    )
    found = [str(tasks.last_number(state["answer"])) for state in states]
    metas = [state.get_meta_info("answer") for state in states]
    return tasks.tell(
        "line_retrieval",
        args,
        clock,
        accuracy=tasks.accuracy(found, [values[at] for at in wanted]),
        prompt_tokens=sum(meta["prompt_tokens"] for meta in metas),
        cached_tokens=sum(meta["cached_tokens"] for meta in metas),
        in_order=["\n".join(lines) in state.text() for state in states],
    )


if __name__ == "__main__":
    main()
