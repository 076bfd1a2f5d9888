"""A tree of plans, answers and reviews: helper functions that fork, joined from the leaves to the root.

A join makes a list of each variable, so joins within joins make lists of lists: `s["answer"]` has one list
per plan.

    python examples/benchmarks/tree_of_thought_v0.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import tasks

import sglang_dsl as sgl

# A low temperature, so that the branches differ a little.
TEMPERATURE = 0.3


def grown(s, words, name, num_branches):
    """A user's turn, and branches that each answer it."""
    s += sgl.user(words)
    forks = s.fork(num_branches)
    forks += sgl.assistant(sgl.gen(name, max_tokens=24, temperature=TEMPERATURE))
    return forks


@sgl.function
def tree_search(s, land, num_branches):
    to_join = []

    plans = grown(s, f"Which river runs through {land}?", "plan", num_branches)
    to_join.append(plans)

    solved = []
    for plan in plans:
        forks = grown(plan, "And who rules there?", "answer", num_branches)
        to_join.append(forks)
        solved.extend(forks)

    to_join += [grown(state, "And what is its capital?", "score", num_branches) for state in solved]

    for forks in reversed(to_join):
        forks.join()


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = tasks.arguments(__doc__, argv, questions=3, num_branches=2)
    asked = tasks.lands(args.num_questions)

    clock = tasks.Clock()
    states = tree_search.run_batch(
        [{"land": place.name, "num_branches": args.num_branches} for _, place in asked],
        temperature=0,
        seed=7,
        backend=args.chosen,
        num_threads=args.parallel,
    )
    found = []
    for state in states:
        answers = [answer for by_plan in state["answer"] for answer in by_plan]
        found.append(Counter(answers).most_common(1)[0][0])
    right = [f"The ruler of {place.name} is {place.ruler}." for _, place in asked]
    deepest = states[0]["score"]
    return tasks.tell(
        "tree_of_thought_v0",
        args,
        clock,
        states=states,
        accuracy=tasks.accuracy(found, right),
        shape=[len(deepest), len(deepest[0]), len(deepest[0][0])],
        calls=sum(state.usage()["calls"] for state in states),
    )


if __name__ == "__main__":
    main()
