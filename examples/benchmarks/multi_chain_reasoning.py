"""Several chains of thought for one question, drawn side by side, and an answer that has read them all.

python examples/benchmarks/multi_chain_reasoning.py --num-chains 5
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tasks

import sglang_dsl as sgl

LEADS = ("Let us work it out.", "Tens first.", "Step by step.", "Add it up.", "Here we go.")


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = tasks.arguments(__doc__, argv, questions=4, num_chains=3)
    questions = tasks.sums(args.num_questions, seed=4)

    @sgl.function
    def multi_chain(s, question):
        s += question + "\n"
        forks = s.fork(args.num_chains)
        for i in range(args.num_chains):
            forks[i] += "Q: " + LEADS[i % len(LEADS)] + " " + question + "\nA:"
            forks[i] += sgl.gen("chain", max_tokens=24, temperature=0.3, stop="\n")
        forks.join()

        s += "Here are some solutions.\n"
        for i in range(args.num_chains):
            s += f"Solution {i + 1}: " + forks[i]["chain"].strip() + "\n"
        s += "Q: " + question + "\nA:" + sgl.gen("answer", max_tokens=24, stop="\n")

    clock = tasks.Clock()
    states = multi_chain.run_batch(
        [{"question": question.text} for question in questions],
        temperature=0,
        seed=1,
        backend=args.chosen,
        num_threads=args.parallel,
    )
    right = [int(question.answer) for question in questions]
    votes = []
    for state in states:
        # join() made a list of each variable of the forks.
        chains = [tasks.last_number(chain) for chain in state["chain"]]
        votes.append(max(chains, key=chains.count))
    return tasks.tell(
        "multi_chain_reasoning",
        args,
        clock,
        states=states,
        accuracy=tasks.accuracy([tasks.last_number(state["answer"]) for state in states], right),
        vote_accuracy=tasks.accuracy(votes, right),
        chains=[len(state["chain"]) for state in states],
    )


if __name__ == "__main__":
    main()
