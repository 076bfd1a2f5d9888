"""Four levels of branches and no join: the program's return value, `state.ret_value`, carries what it found.

python examples/benchmarks/tree_of_thought_deep.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import tasks
from tree_of_thought_v0 import grown

import sglang_dsl as sgl

LEVELS = (
    ("plan", "Which river runs through {}?"),
    ("answer", "And what is its capital?"),
    ("score", "And its dish?"),
    ("final_answer", "And who rules there?"),
)


@sgl.function
def tree_search(s, land, num_branches):
    states = [s]
    for name, words in LEVELS:
        states = [fork for state in states for fork in grown(state, words.format(land), name, num_branches)]
    return [state["final_answer"] for state in states]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = tasks.arguments(__doc__, argv, questions=2, num_branches=2)
    asked = tasks.lands(args.num_questions)

    clock = tasks.Clock()
    states = tree_search.run_batch(
        [{"land": place.name, "num_branches": args.num_branches} for _, place in asked],
        temperature=0,
        seed=7,
        backend=args.chosen,
        num_threads=args.parallel,
    )
    found = [Counter(state.ret_value).most_common(1)[0][0] for state in states]
    right = [f"The ruler of {place.name} is {place.ruler}." for _, place in asked]
    return tasks.tell(
        "tree_of_thought_deep",
        args,
        clock,
        states=states,
        accuracy=tasks.accuracy(found, right),
        leaves=[len(state.ret_value) for state in states],
    )


if __name__ == "__main__":
    main()
